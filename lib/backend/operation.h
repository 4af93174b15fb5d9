// All operations of a backend. An operation is a parameter struct, which says what it
// computes. To add one: write the struct, add it to the list here, and give each backend's queue an
// execute() for it; a backend without one does not compile. Everything that wraps operations
// (tracing, counting, simulation) wraps this one type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

#include "lib/backend/dense_ops.h"
#include "lib/backend/index_ops.h"
#include "lib/backend/kv_ops.h"
#include "lib/backend/operation_label.h"
#include "lib/backend/page_ops.h"
#include "lib/value_tiles.h"

namespace sluice {

// One copy of contiguous bytes. The caller knows which of the two sides is host memory.
struct CopyOp {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

// How a backend makes the copies of one operation; one without a copy engine does `fastest`
// together and the others one after the other.
enum class CopyWay : std::uint8_t {
  fastest,  // small pieces by a kernel, large ones by the copy engine
  each,     // one request of the copy engine for each
  batched,  // one request of the copy engine for all; Error{unsupported} if it has none
};

// Copies between any tiers but disk. Regions do not overlap.
struct CopyParams {
  static constexpr OperationLabel kLabel = {"copy", TraceKind::copy};
  std::span<const CopyOp> ops;
  CopyWay way = CopyWay::fastest;
};

template <class... Params>
using OperationOf = std::variant<const Params*...>;

// Refers to the parameters of one operation, which live at least as long as the call.
using Operation =
    OperationOf<CopyParams,
                // dense
                EmbedParams, WriteWeightParams, LinearParams, LinearChain, RmsNormParams,
                RopeParams, SwigluParams, CastParams, ReadHeadsParams, SampleParams,
                // rows
                AppendParams, AppendBatchParams, AttendParams, AttendBatchParams, FindRowsParams,
                ForgetRowsParams, AttendSelectedParams, GatherParams, PackTokensParams,
                UnpackTokensParams, SumValuesParams,
                // key index and selection
                BuildIndexParams, BuildBatchParams, EstimateParams, SelectParams, ColumnSumsParams,
                ChooseTokensParams, PageMeansParams, ChoosePagesParams,
                // value tiles
                BuildValuesParams, BuildValuesBatchParams, AttendTilesParams, MergePartialsParams>;

// The operation's parameters if it is of this kind, else null.
template <class Params>
const Params* params_of(const Operation& operation) {
  const Params* const* const params = std::get_if<const Params*>(&operation);
  return params != nullptr ? *params : nullptr;
}

OperationLabel label_of(const Operation& operation);

}  // namespace sluice
