#include "cpu/reference/backend.h"

#include <cstring>
#include <limits>
#include <utility>
#include <variant>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/reference/attention.h"
#include "cpu/reference/index.h"
#include "cpu/reference/ops.h"
#include "cpu/reference/pages.h"
#include "cpu/reference/selection.h"
#include "lib/check.h"
#include "lib/read_heads.h"
#include "lib/weight_code.h"
#include "sluice/errors.h"

namespace sluice::cpu {
namespace {

class ReferenceWeight : public Weight {
 public:
  ReferenceWeight(Buffer rows, const WeightShape& shape) : rows_(std::move(rows)), shape_(shape) {}
  std::int64_t outputs() const override { return shape_.outputs; }
  std::int64_t inputs() const override { return shape_.inputs; }
  Matrix dense_rows() const override {
    if (format().is_coded()) return {};
    return {rows_.data(), DType::f32, shape_.outputs, shape_.inputs, shape_.inputs};
  }
  const WeightFormat& format() const { return shape_.format; }
  std::byte* row(std::int64_t index) const {
    return rows_.data() + static_cast<std::size_t>(index) * format().row_bytes(shape_.inputs);
  }

 private:
  Buffer rows_;  // [outputs], of f32 elements or coded
  WeightShape shape_;
};

// A coded weight as floats [outputs, inputs].
std::vector<float> decoded(const ReferenceWeight& weight) {
  const std::int64_t inputs = weight.inputs();
  std::vector<float> values(static_cast<std::size_t>(weight.outputs() * inputs));
  for (std::int64_t row = 0; row < weight.outputs(); ++row) {
    decode_row(weight.row(row), weight.format(), inputs, values.data() + row * inputs);
  }
  return values;
}

}  // namespace

ReferenceBackend::ReferenceBackend(std::uint64_t device_cap, std::uint64_t host_cap)
    : memory_(device_cap, host_cap) {
  info_.name = "reference";
  info_.description = "plain loops, one thread, fp32";
  info_.attends_host_rows = true;
  info_.synchronous = true;
}

std::unique_ptr<Weight> ReferenceBackend::take_weight(const WeightShape& shape) {
  return std::make_unique<ReferenceWeight>(allocate(info_.compute_tier, weight_bytes(shape)),
                                           shape);
}

std::unique_ptr<Queue> ReferenceBackend::make_queue(const QueueOptions& options) {
  if (options.stream != nullptr) {
    throw Error(ErrorCode::usage, "device reference has no streams (`stream`)");
  }
  return std::make_unique<ReferenceQueue>(*this);
}

// Dispatch: one line per operation in lib/backend/operation.h.
struct ReferenceExecute {
  ReferenceQueue& queue;

  void operator()(const CopyParams* p) const {
    for (const CopyOp& op : p->ops) std::memcpy(op.to, op.from, op.bytes);
  }

  void operator()(const EmbedParams* p) const { embed(*p); }
  void operator()(const WriteWeightParams* p) const { write_weight(*p); }
  void operator()(const LinearParams* p) const {
    const auto& weight = static_cast<const ReferenceWeight&>(*p->weight);
    if (weight.format().is_coded()) return reference_linear(*p, decoded(weight).data());
    reference_linear(*p, reinterpret_cast<const float*>(weight.row(0)));
  }
  void operator()(const LinearChain* p) const { run_one_by_one(queue, *p); }
  void operator()(const RmsNormParams* p) const { reference_rms_norm(*p); }
  void operator()(const RopeParams* p) const { reference_rope(*p); }
  void operator()(const SwigluParams* p) const { reference_swiglu(*p); }
  void operator()(const CastParams* p) const { reference_cast(*p); }
  void operator()(const ReadHeadsParams* p) const { read_heads(*p); }
  void operator()(const SampleParams* p) const { reference_sample(*p); }

  void operator()(const AppendParams* p) const {
    reference_append(*p);
    copy_to_host(queue, *p);
  }
  void operator()(const AppendBatchParams* p) const { reference_append_batch(*p); }
  void operator()(const AttendParams* p) const { reference::attend(*p, queue); }
  void operator()(const AttendBatchParams* p) const { reference::attend_batch(*p, queue); }
  // The reference uses the CPU's find_rows(), because the rows a cache holds are defined exactly.
  void operator()(const FindRowsParams* p) const {
    Threads one(1);
    find_rows(*p, one);
  }
  void operator()(const ForgetRowsParams* p) const { forget_rows(*p); }
  void operator()(const AttendSelectedParams* p) const { reference::attend_selected(*p, queue); }
  void operator()(const GatherParams* p) const { reference::gather(*p, queue); }
  void operator()(const PackTokensParams* p) const { reference::pack_tokens(*p); }
  void operator()(const UnpackTokensParams* p) const { reference::unpack_tokens(*p); }
  void operator()(const SumValuesParams* p) const { reference::sum_values(*p); }

  void operator()(const BuildIndexParams* p) const { reference::build_index(*p); }
  void operator()(const BuildBatchParams* p) const { reference::build_batch(*p); }
  void operator()(const EstimateParams* p) const {
    reference::estimate(
        *p, {queue.backend().info().reads, [&](const PageRead& read) { queue.on_index_read(read); },
             [&](const std::byte* row, std::size_t bytes) { queue.on_key_read(row, bytes); }});
  }
  void operator()(const SelectParams* p) const { reference::select(*p); }
  void operator()(const ColumnSumsParams* p) const { reference::column_sums(*p); }
  void operator()(const ChooseTokensParams* p) const { reference::choose_tokens(*p); }
  void operator()(const PageMeansParams* p) const { reference::page_means(*p); }
  void operator()(const ChoosePagesParams* p) const { reference::choose_pages(*p); }

  void operator()(const BuildValuesParams* p) const { reference::build_values(*p); }
  void operator()(const BuildValuesBatchParams* p) const { reference::build_values_batch(*p); }
  void operator()(const AttendTilesParams* p) const {
    reference::attend_tiles(*p, [&](const PageRead& read) { queue.on_values_read(read); });
  }
  void operator()(const MergePartialsParams* p) const { reference::merge_partials(*p); }

 private:
  static void embed(const EmbedParams& p) {
    if (p.coded == nullptr) return reference_embed(p);
    const auto& weight = static_cast<const ReferenceWeight&>(*p.coded);
    std::vector<float> values = decoded(weight);
    EmbedParams dense = p;
    dense.table = {values.data(), DType::f32, weight.outputs(), weight.inputs(), weight.inputs()};
    reference_embed(dense);
  }
  static void write_weight(const WriteWeightParams& p) {
    const auto& weight = static_cast<const ReferenceWeight&>(*p.weight);
    check(p.first + p.rows.rows <= weight.outputs() && p.rows.inputs == weight.inputs(),
          "write_weight: shapes disagree");
    std::byte* const to = weight.row(p.first);
    const WeightRows& from = p.rows;
    check(from.format.is_coded() ? from.format == weight.format() : !weight.format().is_coded(),
          "write_weight: formats disagree");
    if (from.format.is_coded()) {
      std::memcpy(to, from.data, from.bytes());
      return;
    }
    reference_cast({{from.data, from.format.element, from.rows, from.inputs, from.inputs},
                    {to, DType::f32, from.rows, from.inputs, from.inputs}});
  }
};

void ReferenceQueue::submit(const Operation& operation) {
  static_cast<void>(backend());
  std::visit(ReferenceExecute{*this}, operation);
}

}  // namespace sluice::cpu
