// --save-session and --load-session.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "sluice/engine.h"
#include "sluice/generate.h"

namespace sluice::tools {

struct SavedSessionFlags {
  std::string load;
  std::string save;

  // `loaded`: what --load-session has again, for its help.
  void add_to(CLI::App& app, const std::string& loaded);
  // Throws before the work what saving `tokens` tokens after it would throw.
  void require_savable(const Engine& engine, std::int64_t tokens) const;
};

// The note with which `sluice generate` saves a session: the last token of the text, which is not
// in the session yet. So the text goes on exactly as if it had not been cut off.
std::string note_of(const GenerateResult& result);
// That token; none if the text came to its end, or another program wrote the note. Throws
// Error{usage} for a note of `sluice chat`.
std::optional<TokenId> pending_of(std::string_view note);

}  // namespace sluice::tools
