#include "cpu/cpu_queue.h"

#include <cstring>
#include <variant>

#include "cpu/attention/attention.h"
#include "cpu/dense/dense.h"
#include "cpu/scan/scan.h"
#include "cpu/select/select.h"
#include "cpu/values/values.h"
#include "lib/read_heads.h"

namespace sluice::cpu {
namespace {

void copy(const CopyParams& params, Threads& threads) {
  std::size_t bytes = 0;
  for (const CopyOp& op : params.ops) bytes += op.bytes;
  const auto items = static_cast<std::int64_t>(params.ops.size());
  // A single row per head is not worth waking a thread.
  const bool in_turn = params.way != CopyWay::fastest || bytes < (std::size_t{64} << 10);
  const std::int64_t grain = in_turn ? items : 1;
  threads.for_ranges(items, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const CopyOp& op = params.ops[static_cast<std::size_t>(i)];
      // memcpy may not be given null, not even for 0 bytes.
      if (op.bytes > 0) std::memcpy(op.to, op.from, op.bytes);
    }
  });
}

// Dispatch: one line per operation in lib/backend/operation.h.
struct Execute {
  CpuQueue& queue;
  CpuBackend& backend;
  Threads& threads;
  RopeTable& rope_table;

  void operator()(const CopyParams* p) const { copy(*p, threads); }

  void operator()(const EmbedParams* p) const { embed(*p); }
  void operator()(const WriteWeightParams* p) const { backend.products().write(*p); }
  void operator()(const LinearParams* p) const { backend.products().run(*p); }
  void operator()(const LinearChain* p) const { run_one_by_one(queue, *p); }
  void operator()(const RmsNormParams* p) const { rms_norm(*p, threads); }
  void operator()(const RopeParams* p) const {
    rope_table.update(*p);
    rope(*p, rope_table, threads);
  }
  void operator()(const SwigluParams* p) const { swiglu(*p, threads); }
  void operator()(const CastParams* p) const { cast(*p, threads); }
  void operator()(const ReadHeadsParams* p) const { read_heads(*p); }
  void operator()(const SampleParams* p) const { sample(*p, threads); }

  void operator()(const AppendParams* p) const {
    append(*p, threads);
    copy_to_host(queue, *p);
  }
  void operator()(const AppendBatchParams* p) const { append_batch(*p, threads); }
  void operator()(const AttendParams* p) const { attend(*p, threads); }
  void operator()(const AttendBatchParams* p) const { attend_batch(*p, threads); }
  void operator()(const FindRowsParams* p) const { find_rows(*p, threads); }
  void operator()(const ForgetRowsParams* p) const { forget_rows(*p); }
  void operator()(const AttendSelectedParams* p) const { attend_selected(*p, threads); }
  void operator()(const GatherParams* p) const { gather(*p, threads); }
  void operator()(const PackTokensParams* p) const { pack_tokens(*p, threads); }
  void operator()(const UnpackTokensParams* p) const { unpack_tokens(*p, threads); }
  void operator()(const SumValuesParams* p) const { sum_values(*p); }

  void operator()(const BuildIndexParams* p) const { build_index(*p, threads); }
  void operator()(const BuildBatchParams* p) const { build_batch(*p, threads); }
  void operator()(const EstimateParams* p) const { estimate(*p, threads); }
  void operator()(const SelectParams* p) const { select(*p, threads); }
  void operator()(const ColumnSumsParams* p) const { column_sums(*p, threads); }
  void operator()(const ChooseTokensParams* p) const { choose_tokens(*p); }
  void operator()(const PageMeansParams* p) const { page_means(*p, threads); }
  void operator()(const ChoosePagesParams* p) const { choose_pages(*p, threads); }

  void operator()(const BuildValuesParams* p) const { build_values(*p, threads); }
  void operator()(const BuildValuesBatchParams* p) const { build_values_batch(*p, threads); }
  void operator()(const AttendTilesParams* p) const { attend_tiles(*p, threads); }
  void operator()(const MergePartialsParams* p) const { merge_partials(*p); }
};

}  // namespace

void CpuQueue::submit(const Operation& operation) {
  auto& own = static_cast<CpuBackend&>(backend());
  std::visit(Execute{*this, own, own.threads(), rope_table_}, operation);
}

}  // namespace sluice::cpu
