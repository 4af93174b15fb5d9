// --speculate: drafts of the next tokens, from the context or of a second model.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "sluice/drafter.h"
#include "sluice/generate.h"
#include "tools/model_flags.h"

namespace sluice::tools {

struct SpeculationFlags {
  std::string from;  // "lookup" or a checkpoint; empty: no drafts
  int drafts = 8;    // most of a step

  // Returns the option of `from`.
  CLI::Option* add_to(CLI::App& app);
  // Throws Error{usage} for a number of drafts out of range.
  void validate() const;
  int decode_batch() const { return from.empty() ? 1 : drafts + 1; }
};

// The drafter of a command, with its model if it has one.
class Speculation {
 public:
  explicit Speculation(const SpeculationFlags& flags) : flags_(&flags) {}

  // Plans and loads the draft model, if there is one, for sessions of `context` tokens of `engine`.
  // Then reopens `engine` with the memory that the draft model leaves of the caps and of a GPU.
  // Throws Error{usage} for a model with another vocabulary, Error{memory} if it does not fit.
  void open(const ModelFlags& model, std::int64_t context, bool quiet, EngineConfig& config,
            Engine& engine);
  // Makes answers take drafts.
  void use(GenerateOptions& options);

 private:
  const SpeculationFlags* flags_;
  std::optional<Engine> engine_;
  std::unique_ptr<Drafter> drafter_;
};

// "N drafts accepted of M"; empty if no step had drafts.
std::string drafts_line(const GenerateResult& result);

}  // namespace sluice::tools
