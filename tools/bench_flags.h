// The flags of `sluice bench`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench_made_up.h"
#include "tools/model_flags.h"

namespace sluice::tools {

struct BenchFlags {
  // A model and its text, arrays, positions, or a shape.
  ModelFlags model;
  std::string text;
  std::string arrays;
  std::optional<double> scale;  // of the arrays' logits
  std::string positions;
  std::string shape;
  std::uint64_t seed = 1;
  MadeUpStatistics statistics;

  std::vector<std::string> policies = {"values", "quest"};
  std::vector<std::string> contexts;  // none: 8K, or all that arrays have
  std::vector<std::string> caps;
  std::vector<int> sequences = {1};
  std::vector<std::string> buses;
  std::optional<int> steps;
  std::optional<int> warm_up;
  std::string record;
  std::string record_positions;
  std::string json;
  std::string csv;
  bool no_baseline = false;
  bool check = false;
  std::vector<std::string> transfers;
  bool force = false;
  bool resume = false;
};

}  // namespace sluice::tools
