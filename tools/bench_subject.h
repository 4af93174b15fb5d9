// What the cells of `sluice bench` measure: a model behind a text, or attention over rows without a
// model.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/policy.h"
#include "tools/bench_cell.h"
#include "tools/bench_flags.h"

namespace sluice::tools {

struct BenchMethod {
  std::string name;  // a preset's name or a line
  std::string line;  // in full
  Policy policy;
};

// A cell that is to be measured.
struct WantedCell {
  CellKey key;
  BenchMethod method;
};

class BenchSubject {
 public:
  BenchSubject() = default;
  BenchSubject(const BenchSubject&) = delete;
  BenchSubject& operator=(const BenchSubject&) = delete;
  virtual ~BenchSubject() = default;

  // What is measured instead of policies, beside dense attention; none: the policies.
  virtual std::optional<BenchMethod> method() const { return std::nullopt; }
  // Parses a policy and checks it against the shape. Throws Error{usage}.
  virtual Policy policy(const std::string& text) const = 0;
  // The contexts if no flag names any.
  virtual std::vector<std::int64_t> contexts() const = 0;
  virtual BenchSteps steps() const = 0;
  // Throws for cells that are wrong under any cap, before any is measured.
  virtual void require(std::span<const WantedCell> cells) = 0;
  // The members of the report before its results, those of "run" included.
  virtual nlohmann::json head() const = 0;
  // Work that comes before the cells and is not measured.
  virtual void prepare(std::span<const WantedCell> /*cells*/) {}
  // Measures a cell and compares it with dense attention. Throws Error{memory} or {unsupported} if
  // this cell alone cannot run.
  virtual CellResult run(const WantedCell& cell) = 0;
};

// The files may not change while they live; `flags` have to outlive them.
std::unique_ptr<BenchSubject> model_subject(const BenchFlags& flags);
std::unique_ptr<BenchSubject> array_subject(const BenchFlags& flags);
std::unique_ptr<BenchSubject> positions_subject(const BenchFlags& flags);
std::unique_ptr<BenchSubject> made_up_subject(const BenchFlags& flags);

// The number of --steps and --warm-up, or those of BenchSteps. Throws Error{usage}.
BenchSteps steps_of(const BenchFlags& flags, const BenchSteps& otherwise);

}  // namespace sluice::tools
