// --save-session and --load-session.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/engine.h"

namespace sluice::tools {

struct SavedSessionFlags {
  std::string load;
  std::string save;
  std::int64_t every = 0;  // tokens of a prompt after which it is saved; 0: at the end only

  // `loaded`: what --load-session has again, for its help.
  void add_to(CLI::App& app, const std::string& loaded);
  // --save-every.
  void add_every_to(CLI::App& app);
  // Throws before the work what saving `tokens` tokens after it would throw.
  void require_savable(const Engine& engine, std::int64_t tokens) const;
};

// What of a text is not in its saved session yet. It is the note with which `sluice generate` saves
// one, so the text goes on exactly as if it had not been cut off.
struct SavedText {
  std::optional<TokenId> pending;  // its last token; none if the text came to its end
  std::vector<TokenId> unread;     // the rest of a prompt that was not read to its end
};

std::string note_of(const SavedText& text);
// Nothing, if another program wrote the note. Throws Error{usage} for a note of `sluice chat`.
SavedText saved_text_of(std::string_view note);

}  // namespace sluice::tools
