#include "cpu/reference/backend.h"

#include <cstring>
#include <limits>
#include <utility>

#include "cpu/attention/attention.h"
#include "cpu/reference/attention.h"
#include "cpu/reference/index.h"
#include "cpu/reference/ops.h"
#include "cpu/reference/pages.h"
#include "cpu/reference/selection.h"
#include "lib/check.h"
#include "lib/read_heads.h"
#include "sluice/errors.h"

namespace sluice::cpu {
namespace {

class ReferenceWeight : public Weight {
 public:
  ReferenceWeight(Buffer values, std::int64_t outputs, std::int64_t inputs)
      : values_(std::move(values)), outputs_(outputs), inputs_(inputs) {}
  std::int64_t outputs() const override { return outputs_; }
  std::int64_t inputs() const override { return inputs_; }
  Matrix dense_rows() const override { return {values(), DType::f32, outputs_, inputs_, inputs_}; }
  float* values() const { return values_.floats(); }

 private:
  Buffer values_;  // [outputs, inputs]
  std::int64_t outputs_;
  std::int64_t inputs_;
};

}  // namespace

ReferenceBackend::ReferenceBackend(std::uint64_t device_cap, std::uint64_t host_cap)
    : memory_(device_cap, host_cap) {
  info_.name = "reference";
  info_.description = "plain loops, one thread, fp32";
  info_.attends_host_rows = true;
  info_.synchronous = true;
}

std::unique_ptr<Weight> ReferenceBackend::make_weight(std::int64_t outputs, std::int64_t inputs) {
  return std::make_unique<ReferenceWeight>(
      allocate(info_.compute_tier, weight_bytes(outputs, inputs)), outputs, inputs);
}

std::unique_ptr<Queue> ReferenceBackend::make_queue(const QueueOptions& options) {
  if (options.stream != nullptr) {
    throw Error(ErrorCode::usage, "device reference has no streams (`stream`)");
  }
  return std::make_unique<ReferenceQueue>(*this);
}

void ReferenceQueue::copy(std::span<const CopyOp> ops) {
  for (const CopyOp& op : ops) std::memcpy(op.to, op.from, op.bytes);
}

void ReferenceQueue::embed(const Matrix& table, const TokenId* ids, const Matrix& y) {
  reference_embed(table, ids, y);
}

void ReferenceQueue::linear(const LinearParams& params) {
  reference_linear(params, static_cast<const ReferenceWeight*>(params.weight)->values());
}

void ReferenceQueue::write_weight(Weight& weight, std::int64_t first, const Matrix& rows) {
  check(first + rows.rows <= weight.outputs() && rows.columns == weight.inputs(),
        "write_weight: shapes disagree");
  float* const to = static_cast<ReferenceWeight&>(weight).values() + first * weight.inputs();
  reference_cast(rows, {to, DType::f32, rows.rows, rows.columns, rows.columns});
}

void ReferenceQueue::rms_norm(const RmsNormParams& params) { reference_rms_norm(params); }
void ReferenceQueue::rope(const RopeParams& params) { reference_rope(params); }
void ReferenceQueue::swiglu(const SwigluParams& params) { reference_swiglu(params); }
void ReferenceQueue::cast(const Matrix& from, const Matrix& to) { reference_cast(from, to); }
void ReferenceQueue::read_heads(const ReadHeadsParams& params) { sluice::read_heads(params); }

void ReferenceQueue::sample(const Matrix& logits, std::span<const TokenDraw> params,
                            std::span<SampledToken> tokens) {
  const auto* row = static_cast<const float*>(logits.data);
  for (std::size_t i = 0; i < tokens.size(); ++i, row += logits.stride) {
    tokens[i] = draw_token({row, static_cast<std::size_t>(logits.columns)}, params[i]);
  }
}

void ReferenceQueue::append(const AppendParams& params) {
  reference_append(params);
  copy_home(*this, params);
}
void ReferenceQueue::append_batch(const AppendBatchParams& params) {
  reference_append_batch(params);
}
void ReferenceQueue::attend(const AttendParams& params) { reference::attend(params, *this); }

void ReferenceQueue::attend_batch(const AttendBatchParams& params) {
  reference::attend_batch(params, *this);
}

void ReferenceQueue::build_index(const BuildIndexParams& params) { reference::build_index(params); }

void ReferenceQueue::build_batch(const BuildBatchParams& params) { reference::build_batch(params); }

void ReferenceQueue::estimate(const EstimateParams& params) {
  reference::estimate(params,
                      {backend().info().reads, [&](const PageRead& read) { on_index_read(read); },
                       [&](const std::byte* row, std::size_t bytes) { on_key_read(row, bytes); }});
}

void ReferenceQueue::select(const SelectParams& params) { reference::select(params); }

// Where rows are found does not depend on who computes, so there is no slower way to do it.
void ReferenceQueue::find_rows(const FindRowsParams& params) {
  Threads one(1);
  cpu::find_rows(params, one);
}

void ReferenceQueue::forget_rows(const ForgetRowsParams& params) { cpu::forget_rows(params); }

void ReferenceQueue::attend_selected(const AttendSelectedParams& params) {
  reference::attend_selected(params, *this);
}

void ReferenceQueue::gather(const GatherParams& params) { reference::gather(params, *this); }

void ReferenceQueue::pack_tokens(const PackTokensParams& params) { reference::pack_tokens(params); }

void ReferenceQueue::unpack_tokens(const UnpackTokensParams& params) {
  reference::unpack_tokens(params);
}

void ReferenceQueue::column_sums(const ColumnSumsParams& params) { reference::column_sums(params); }

void ReferenceQueue::choose_tokens(const ChooseTokensParams& params) {
  reference::choose_tokens(params);
}

void ReferenceQueue::page_means(const PageMeansParams& params) { reference::page_means(params); }

void ReferenceQueue::choose_pages(const ChoosePagesParams& params) {
  reference::choose_pages(params);
}

void ReferenceQueue::sum_values(const SumValuesParams& params) { reference::sum_values(params); }

void ReferenceQueue::build_values(const BuildValuesParams& params) {
  reference::build_values(params);
}

void ReferenceQueue::build_values_batch(const BuildValuesBatchParams& params) {
  reference::build_values_batch(params);
}

void ReferenceQueue::merge_partials(const MergePartialsParams& params) {
  reference::merge_partials(params);
}

void ReferenceQueue::attend_tiles(const AttendTilesParams& params) {
  reference::attend_tiles(params, [&](const PageRead& read) { on_values_read(read); });
}

}  // namespace sluice::cpu
