// Flags that every command running a model shares.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "sluice/format_names.h"

namespace sluice::tools {

// Accepts these words, and the names of formats.
CLI::IsMember words_or(std::initializer_list<const char*> words, std::vector<std::string> names);

// Values of --device-memory and --host-memory: nothing if `text` is empty. Throws Error{usage}.
std::optional<std::uint64_t> parse_cap(const std::string& text, const char* flag);
// Values of --disk: DIR or DIR:SIZE. Throws Error{usage}.
DiskConfig parse_disk(const std::vector<std::string>& values);

struct ModelFlags {
  std::string model;
  std::string device = "cpu";
  std::string device_memory;
  std::string host_memory;
  std::vector<std::string> disk;
  std::string row_cache;
  std::string host_attention = "auto";
  std::string kv_dtype = "bf16";
  std::string compute = "auto";
  std::string weights = "auto";
  std::vector<std::string> scorers;         // files of --scorer
  std::string plan;                         // file of --plan; see tools/plan_flag.h
  std::vector<const CLI::Option*> planned;  // flags that a plan decides
  int threads = 0;
  int chunk = 0;

  void add_to(CLI::App& app);
  // Declares --scorer, for commands that take policy lines.
  void add_scorers_to(CLI::App& app);
  // `tokens`, capped to the chunk of a step.
  int of_step(int tokens) const { return chunk > 0 ? std::min(tokens, chunk) : tokens; }
  // Throws Error{usage} for values that make no sense.
  EngineConfig config() const;
};

}  // namespace sluice::tools
