#include "tools/bench_positions.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "io/checksum.h"
#include "io/file_draft.h"
#include "io/safetensors.h"
#include "lib/bytes.h"
#include "lib/check.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/version.h"

namespace sluice::tools {
namespace {

constexpr std::int32_t kAttendsAll = -1;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
constexpr std::int64_t kMostSteps = 20000;
// A recorded position's logit. The rows of the token's own page, whose keys are zero, weigh e^-64
// as much.
constexpr float kRecordedLogit = 64.0f;

[[noreturn]] void refuse_trace(const std::string& name, const std::string& what,
                               ErrorCode code = ErrorCode::corrupt) {
  throw Error(code, name + " " + what);
}

// One tensor of a trace.
class TraceTensor {
 public:
  TraceTensor(const SafetensorsFile& file, const char* name, const char* dtype, std::size_t rank)
      : file_(file),
        info_(file.find(name)),
        name_(file.path().string() + ": tensor " + in_quotes(name)) {
    if (info_ == nullptr) {
      refuse_trace(file.path().string() + ":", "has no tensor " + in_quotes(name) +
                                                   "; a trace of positions has sizes, counts and "
                                                   "positions");
    }
    if (info_->stored_dtype != dtype) {
      refuse_trace(name_, "is of " + info_->stored_dtype + ", not " + dtype);
    }
    if (info_->shape.size() == rank) return;
    refuse_trace(name_, "has " + std::to_string(info_->shape.size()) + " dimensions, not " +
                            std::to_string(rank));
  }

  const std::string& name() const { return name_; }
  const std::vector<std::int64_t>& shape() const { return info_->shape; }
  template <class T>
  std::vector<T> values() const {
    std::vector<T> values(static_cast<std::size_t>(info_->elements()));
    file_.read_stored(*info_, 0, std::as_writable_bytes(std::span(values)));
    return values;
  }

 private:
  const SafetensorsFile& file_;
  const TensorInfo* info_;
  std::string name_;
};

void require_between(const std::string& name, const std::string& what, std::int64_t value,
                     std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  refuse_trace(name,
               "has " + std::to_string(value) + " " + what + "; Sluice takes " +
                   std::to_string(least) + " to " + std::to_string(most),
               value < 1 ? ErrorCode::corrupt : ErrorCode::unsupported);
}

std::string place_of(std::int64_t step, int layer, int head) {
  return "step " + std::to_string(step) + ", layer " + std::to_string(layer) + ", KV head " +
         std::to_string(head);
}

// Adds a tensor to the header and its bytes to the data.
template <class T>
void add_tensor(nlohmann::json& header, std::string& data, const char* name, const char* dtype,
                const std::vector<std::int64_t>& shape, const std::vector<T>& values) {
  const std::size_t first = data.size();
  const auto bytes = std::as_bytes(std::span(values));
  data.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {first, data.size()}}};
}

}  // namespace

PositionTrace PositionTrace::open(const std::filesystem::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const TraceTensor sizes(file, "sizes", "I64", 1);
  const TraceTensor counts(file, "counts", "I32", 3);
  const TraceTensor positions(file, "positions", "I32", 1);
  if (sizes.shape()[0] != 3) {
    refuse_trace(sizes.name(), "has " + std::to_string(sizes.shape()[0]) +
                                   " numbers, not 3: context, query heads, head_dim");
  }
  PositionTrace trace;
  const std::vector<std::int64_t> numbers = sizes.values<std::int64_t>();
  require_between(counts.name(), "steps", counts.shape()[0], 1, kMostSteps);
  require_between(counts.name(), "layers", counts.shape()[1], 1, 4096);
  require_between(counts.name(), "KV heads", counts.shape()[2], 1, 4096);
  require_between(sizes.name(), "tokens before the steps", numbers[0], 1, kMostTokens);
  require_between(sizes.name(), "query heads", numbers[1], 1, 4096);
  require_between(sizes.name(), "channels", numbers[2], 2, 256);
  trace.context_ = numbers[0];
  trace.steps_ = counts.shape()[0];
  trace.shape_.layers = static_cast<int>(counts.shape()[1]);
  trace.shape_.kv_heads = static_cast<int>(counts.shape()[2]);
  trace.shape_.query_heads = static_cast<int>(numbers[1]);
  trace.shape_.head_dim = static_cast<int>(numbers[2]);
  if (trace.shape_.query_heads % trace.shape_.kv_heads != 0) {
    refuse_trace(sizes.name(), "has " + std::to_string(numbers[1]) +
                                   " query heads, which is no multiple of the " +
                                   std::to_string(counts.shape()[2]) + " KV heads of 'counts'");
  }
  trace.counts_ = counts.values<std::int32_t>();
  trace.positions_ = positions.values<std::int32_t>();
  std::int64_t sum = 0;
  for (const std::int32_t count : trace.counts_) {
    if (count < kAttendsAll) refuse_trace(counts.name(), "has a count of " + std::to_string(count));
    trace.first_.push_back(sum);
    sum += std::max(count, 0);
    trace.most_ = std::max<std::int64_t>(trace.most_, count);
  }
  if (sum != std::ssize(trace.positions_)) {
    refuse_trace(positions.name(), "has " + std::to_string(trace.positions_.size()) +
                                       " numbers, but 'counts' add up to " + std::to_string(sum));
  }
  trace.require_positions(positions.name());
  if (file.find("missed") == nullptr) return trace;
  const TraceTensor missed(file, "missed", "I64", 2);
  if (missed.shape()[0] != trace.steps_ || missed.shape()[1] != trace.shape_.layers) {
    refuse_trace(missed.name(), "has not the steps and layers of 'counts'");
  }
  const std::vector<std::int64_t> by_layer = missed.values<std::int64_t>();
  for (auto at = by_layer.begin(); at != by_layer.end(); at += trace.shape_.layers) {
    trace.missed_.push_back(std::reduce(at, at + trace.shape_.layers));
  }
  return trace;
}

std::size_t PositionTrace::entry(std::int64_t step, int layer, int head) const {
  return static_cast<std::size_t>((step * shape_.layers + layer) * shape_.kv_heads + head);
}

std::span<const std::int32_t> PositionTrace::at(std::int64_t step, int layer, int head) const {
  const std::size_t number = entry(step, layer, head);
  return std::span(positions_)
      .subspan(static_cast<std::size_t>(first_.at(number)),
               static_cast<std::size_t>(std::max(counts_.at(number), 0)));
}

bool PositionTrace::is_dense(int layer) const { return counts_[entry(0, layer, 0)] == kAttendsAll; }

void PositionTrace::require_positions(const std::string& name) const {
  bool selects = false;
  for (std::int64_t step = 0; step < steps_; ++step) {
    const std::int64_t page_first = (context_ + step) / kPageTokens * kPageTokens;
    for (int layer = 0; layer < shape_.layers; ++layer) {
      selects = selects || !is_dense(layer);
      for (int head = 0; head < shape_.kv_heads; ++head) {
        if ((counts_[entry(step, layer, head)] == kAttendsAll) != is_dense(layer)) {
          refuse_trace(name, "belong to counts of -1 and others in one layer, " +
                                 place_of(step, layer, head));
        }
        std::int64_t before = -1;
        for (const std::int32_t position : at(step, layer, head)) {
          if (position <= before || position >= page_first) {
            refuse_trace(name, "has " + std::to_string(position) + " after " +
                                   std::to_string(before) + " in " + place_of(step, layer, head) +
                                   "; positions ascend from 0 and are below " +
                                   std::to_string(page_first) + ", the token's own page");
          }
          before = position;
        }
      }
    }
  }
  if (!selects) refuse_trace(name, "belong to layers that all attend to everything");
}

std::uint64_t PositionTrace::checksum() const {
  Checksum sum;
  const std::vector<std::int64_t> sizes = {
      context_, steps_, shape_.layers, shape_.kv_heads, shape_.query_heads, shape_.head_dim};
  sum.add(std::as_bytes(std::span(sizes)));
  sum.add(std::as_bytes(std::span(counts_)));
  sum.add(std::as_bytes(std::span(positions_)));
  sum.add(std::as_bytes(std::span(missed_)));
  return sum.value();
}

// top_p with a share that less than all of a million equal weights do not reach, because heads may
// have different numbers of positions.
Policy PositionTrace::policy(const Scorers& scorers) const {
  std::string line = "select=" + std::string(PositionScorer::kName) +
                     " prune=top_p(0.999999) compensate=none cap=" +
                     std::to_string(std::max<std::int64_t>(most_, 1));
  std::string dense;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    if (is_dense(layer)) dense += (dense.empty() ? "" : ",") + std::to_string(layer);
  }
  if (!dense.empty()) line += " dense=" + dense;
  return parse_policy(line, scorers);
}

PositionScorer::PositionScorer(std::shared_ptr<const PositionTrace> trace)
    : Scorer({kName, ScorerInfo::Kind::logits}), trace_(std::move(trace)) {}

void PositionScorer::score(const RunScorer& call) const {
  const KvShape& shape = call.use.shape;
  for (std::int64_t i = 0; i < call.batch.count; ++i) {
    const BatchToken& token = call.batch.tokens[i];
    const std::int64_t step = token.position - trace_->context();
    sluice::check(step >= 0 && step < trace_->steps(), "a step that a trace does not have");
    for (int query = 0; query < shape.query_heads; ++query) {
      float* const logits = call.logits.row<float>(i * shape.query_heads + query);
      std::fill_n(logits, token.page_first(), -std::numeric_limits<float>::infinity());
      for (const std::int32_t at : trace_->at(step, call.layer, query / shape.group())) {
        logits[at] = kRecordedLogit;
      }
    }
  }
}

PositionRecorder::PositionRecorder(const KvShape& shape, std::int64_t context, const Policy& policy)
    : shape_(shape), context_(context), policy_(policy) {}

void PositionRecorder::add(const StepSelection& selection, std::span<const LedgerEntry> entries) {
  std::vector<const LayerSelection*> by_layer(static_cast<std::size_t>(shape_.layers));
  for (const LayerSelection& layer : selection) {
    by_layer.at(static_cast<std::size_t>(layer.layer)) = &layer;
  }
  for (int layer = 0; layer < shape_.layers; ++layer) {
    if (policy_.is_dense(layer)) {
      counts_.insert(counts_.end(), static_cast<std::size_t>(shape_.kv_heads), kAttendsAll);
      continue;
    }
    const LayerSelection* const of_layer = by_layer[static_cast<std::size_t>(layer)];
    check(of_layer != nullptr && std::ssize(of_layer->positions) == shape_.kv_heads,
          "a step without the positions that it selected");
    for (const std::vector<std::int32_t>& head : of_layer->positions) {
      counts_.push_back(static_cast<std::int32_t>(head.size()));
      positions_.insert(positions_.end(), head.begin(), head.end());
    }
  }
  std::vector<std::int64_t> missed(static_cast<std::size_t>(shape_.layers));
  for (const LedgerEntry& entry : entries) {
    if (entry.cause != Cause::miss || entry.to != Tier::device) continue;
    missed.at(static_cast<std::size_t>(entry.layer)) +=
        static_cast<std::int64_t>(entry.traffic.rows);
  }
  missed_.insert(missed_.end(), missed.begin(), missed.end());
  ++steps_;
}

void PositionRecorder::write(const std::filesystem::path& path) const {
  constexpr std::size_t kLengthBytes = 8;
  nlohmann::json header = {
      {"__metadata__",
       {{"written_by", std::string("sluice ") + kVersion}, {"policy", to_string(policy_)}}}};
  std::string data;
  add_tensor(header, data, "missed", "I64", {steps_, shape_.layers}, missed_);
  add_tensor(header, data, "sizes", "I64", {3},
             std::vector<std::int64_t>{context_, shape_.query_heads, shape_.head_dim});
  add_tensor(header, data, "counts", "I32", {steps_, shape_.layers, shape_.kv_heads}, counts_);
  add_tensor(header, data, "positions", "I32", {std::ssize(positions_)}, positions_);
  std::string text = header.dump();
  text.resize(static_cast<std::size_t>(round_up(text.size(), kLengthBytes)), ' ');
  std::string length;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length += static_cast<char>((text.size() >> (8 * i)) & 0xffu);
  }
  replace_file(path, length + text + data);
}

void require_positions_of(const Policy& policy, int layers) {
  const auto refuse = [](const std::string& why) {
    throw Error(ErrorCode::usage, "--record-positions takes the first cell, and its policy " + why);
  };
  if (policy.correct != 0) refuse("corrects; give correct=0");
  if (policy.prefill.evict) refuse("evicts rows of the prompt");
  for (int layer = 0; layer < layers; ++layer) {
    if (!policy.is_dense(layer)) return;
  }
  refuse("attends to everything; give another --policy first, and --no-baseline");
}

}  // namespace sluice::tools
