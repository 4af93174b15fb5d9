#include "kernels/dense/coded.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "kernels/dense/coded_product.h"
#include "lib/bytes.h"
#include "lib/check.h"
#include "lib/weight_code.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

// Most tokens for which reading codes once per pass takes less time than decoding the matrix into
// memory, writing and reading it.
constexpr std::int64_t kMostTileTokens = 2 * kMostBatchTokens;
// Part of the scratch memory for decoded rows; the rest is cuBLAS's workspace. 2,048 rows of 14,336
// bf16 weights fit, which fill an H200 when 2,048 tokens are multiplied by them.
constexpr std::size_t kUnpackedBytes = std::size_t{56} << 20;
// Outputs of decoded parts, where that many fit: every tile size of cuBLAS divides them.
constexpr std::int64_t kDecodedOutputs = 2048;

constexpr int kStaticBytes = 1024;  // barriers and block sums; the system takes its part beside
// Fewer warps leave the memory idle. GPUs whose shared memory has room for no more have less
// bandwidth, and one token's inputs leave more room on all others.
constexpr int kLeastRowWarps = 8;
constexpr int kLeastOneTokenWarps = 4;

template <typename Body>
auto dispatch_code(WeightCode code, const Body& body) {
  if (code == WeightCode::int8) return body.template operator()<WeightCode::int8>();
  return body.template operator()<WeightCode::int4>();
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// The source of the inputs.
const Matrix& source_of(const LinearChain& chain) {
  if (chain.norm) return chain.norm->x;
  return chain.cast ? chain.cast->from : chain.linear.x;
}

// What row_kernel() computes beside the product.
struct RowKind {
  bool is_gated;
  bool is_cast;  // or normalised before
};

RowKind kind_of(const LinearChain& chain) {
  return {chain.swiglu.has_value(), chain.norm.has_value() || chain.cast.has_value()};
}

// Shared memory of row_kernel(): rings and inputs before the results, and all of it.
struct RowBytes {
  int results;
  int all;
};
template <WeightCode kCode>
RowBytes row_bytes(int columns, int tokens, int warps, const RowKind& kind) {
  const bool as_digits = tokens <= kMostDigitTokens;
  const int rings = warps * kRowStages * kRowTiles<kCode> * CodedTile<kCode>::kBytes;
  const int inputs =
      as_digits ? digit_bytes<kCode>(columns, tokens) : element_bytes<kCode>(columns, tokens);
  const int results = 2 * warps * (kind.is_gated ? 2 : 1) * kTileOutputs * tokens *
                      (as_digits ? kDigits : 1) * static_cast<int>(sizeof(float));
  const int elements = kind.is_cast ? columns * kTileInputs * 2 : 0;  // of one token
  return {rings + inputs, rings + inputs + std::max(results, elements)};
}

// The launch of row_kernel(), or none if its inputs leave less room than `least` warps need.
template <WeightCode kCode>
std::optional<CodedLaunch> row_launch(const CodedMatrix& weight, std::int64_t tokens,
                                      const RowKind& kind, int least, const DeviceLimits& device) {
  if (tokens > kMostRowTokens || weight.tile_columns() > device.shared_bytes / kTileInputs) {
    return {};
  }
  const auto columns = static_cast<int>(weight.tile_columns());
  const auto bytes = [&](int warps) {
    return row_bytes<kCode>(columns, static_cast<int>(tokens), warps, kind).all;
  };
  int warps = kMostRowWarps;
  while (warps >= least && bytes(warps) + kStaticBytes > device.shared_bytes) --warps;
  if (warps < least) return {};
  // As few warps as share the columns in as many rounds; but enough to load inputs.
  const int parts = (columns + kRowTiles<kCode> - 1) / kRowTiles<kCode>;
  const int rounds = (parts + warps - 1) / warps;
  warps = std::min(warps, std::max((parts + rounds - 1) / rounds, kLeastRowWarps));
  CodedLaunch shape;
  const std::int64_t rows = weight.tile_rows() / (kind.is_gated ? 2 : 1);
  shape.blocks = static_cast<int>(std::min<std::int64_t>(device.multiprocessors, rows));
  shape.warps = warps;
  shape.shared_bytes = static_cast<std::size_t>(bytes(warps));
  return shape;
}

std::optional<CodedLaunch> row_launch(const CodedMatrix& weight, std::int64_t tokens,
                                      const RowKind& kind, int least, const DeviceLimits& device) {
  return dispatch_code(weight.code, [&]<WeightCode kCode>() {
    return row_launch<kCode>(weight, tokens, kind, least, device);
  });
}

CodedProductParams product_params(const LinearParams& p, const CodedMatrix& weight) {
  check(p.x.columns == weight.inputs && p.y.columns == weight.outputs && p.x.rows == p.y.rows &&
            p.y.dtype == DType::f32,
        "linear: shapes or dtypes disagree");
  CodedProductParams k{};
  k.tiles = weight.tiles;
  k.tile_rows = weight.tile_rows();
  k.columns = static_cast<int>(weight.tile_columns());
  k.x = static_cast<const std::byte*>(p.x.data);
  k.x_stride = p.x.stride * static_cast<std::int64_t>(size_of(p.x.dtype));
  k.inputs = static_cast<int>(weight.inputs);
  k.tokens = static_cast<int>(p.x.rows);
  k.bias = p.bias;
  k.y = p.y.data;
  k.y_stride = p.y.stride;
  k.outputs = weight.outputs;
  k.accumulate = p.accumulate;
  std::copy(kWeightLevels.begin(), kWeightLevels.end(), k.levels);
  return k;
}

void run_rows(CodedProductParams params, WeightCode code, DType dtype, bool is_gated,
              const CodedLaunch& shape, const Launch& launch) {
  dispatch_code(code, [&]<WeightCode kCode>() {
    const RowKind kind = {is_gated, params.is_cast};
    params.results = row_bytes<kCode>(params.columns, params.tokens, shape.warps, kind).results;
    launch_row_kernel<kCode>(params, dtype, is_gated, shape, launch);
  });
}

// Tokens [first, first + count) of a product.
LinearParams tokens_of(const LinearParams& all, std::int64_t first, std::int64_t count) {
  LinearParams part = all;
  const std::int64_t x_bytes = all.x.stride * static_cast<std::int64_t>(size_of(all.x.dtype));
  part.x.data = static_cast<std::byte*>(all.x.data) + first * x_bytes;
  part.y.data = static_cast<float*>(all.y.data) + first * all.y.stride;
  part.x.rows = part.y.rows = count;
  return part;
}

// Teams of a block of batch_kernel(), and slots of each.
struct BatchShape {
  int teams, slots;
};

// Its shared memory.
template <WeightCode kCode>
std::int64_t batch_bytes(const BatchShape& shape, int tokens) {
  const std::int64_t teams = shape.teams;
  const std::int64_t rings = teams * kPartRows * kBatchStages * CodedTile<kCode>::kBytes;
  const std::int64_t inputs = teams * shape.slots * tokens * kTokenBytes;
  const std::int64_t sums =
      (teams - 1) * kTeamWarps * kTileOutputs * tokens * static_cast<std::int64_t>(sizeof(float));
  return kPairTableBytes<kCode> + rings + inputs + sums;
}

// As many teams as fit, and then slots.
template <WeightCode kCode>
BatchShape batch_shape(int most_teams, int tokens, const DeviceLimits& device) {
  for (int teams = most_teams; teams > 0; --teams) {
    for (int slots = kMostSlots; slots >= 2; --slots) {
      const BatchShape shape = {teams, slots};
      if (batch_bytes<kCode>(shape, tokens) + kStaticBytes <= device.shared_bytes) return shape;
    }
  }
  throw Error(ErrorCode::unsupported, "coded weights need more shared memory per block");
}

template <WeightCode kCode, int kTokenTiles>
CodedLaunch batch_launch(CodedProductParams& k, const Launch& launch) {
  constexpr int kTokens = kTokenTiles * kMmaColumns;
  const BatchShape fits = batch_shape<kCode>(kMostTeams<kTokenTiles>, kTokens, *launch.device);
  const std::int64_t parts = (k.tile_rows + kPartRows - 1) / kPartRows;
  const std::int64_t units = parts * k.columns;
  const std::int64_t most_blocks = std::min<std::int64_t>(units, launch.device->multiprocessors);
  const std::int64_t block_units = (units + most_blocks - 1) / most_blocks;
  const std::int64_t blocks = (units + block_units - 1) / block_units;
  const std::int64_t partial_bytes =
      2 * blocks * kPartRows * kTileOutputs * kTokens * static_cast<std::int64_t>(sizeof(float));
  check(units + k.columns <= std::numeric_limits<int>::max() &&
            partial_bytes <= static_cast<std::int64_t>(launch.scratch_bytes) &&
            blocks * kTeamWarps <= Launch::kHalfCounters,
        "coded weights: a matrix that is too large, or a queue without scratch memory");
  k.parts = static_cast<int>(parts);
  k.block_units = static_cast<int>(block_units);
  k.teams = fits.teams;
  k.slots = fits.slots;
  k.partial = reinterpret_cast<float*>(launch.scratch);
  k.tickets = launch.counters;
  CodedLaunch shape;
  shape.blocks = static_cast<int>(blocks);
  shape.warps = fits.teams * kTeamWarps;
  shape.shared_bytes = static_cast<std::size_t>(batch_bytes<kCode>(fits, kTokens));
  return shape;
}

void run_batch(CodedProductParams params, WeightCode code, DType dtype, const Launch& launch) {
  dispatch_code(code, [&]<WeightCode kCode>() {
    dispatch_token_tiles(params.tokens, [&](auto token_tiles) {
      const auto shape = batch_launch<kCode, decltype(token_tiles)::value>(params, launch);
      launch_batch_kernel<kCode>(params, dtype, shape, launch);
    });
  });
}

}  // namespace

bool coded_chain_supported(const LinearChain& chain, const CodedMatrix& weight,
                           const DeviceLimits& device) {
  const Matrix& from = source_of(chain);
  if (chain.linear.x.rows != 1 || chain.linear.x.dtype == DType::f32) return false;
  if (chain.cast && from.dtype != DType::f32) return false;
  if (!is_aligned(from.data) || (chain.norm && !is_aligned(chain.norm->weight))) return false;
  // The gate's rows of tiles must not end within one.
  if (chain.swiglu && weight.outputs % (2 * kTileOutputs) != 0) return false;
  return row_launch(weight, 1, kind_of(chain), kLeastOneTokenWarps, device).has_value();
}

void coded_chain(const LinearChain& chain, const CodedMatrix& weight, const Launch& launch) {
  const LinearParams& p = chain.linear;
  CodedProductParams k = product_params(p, weight);
  k.x = static_cast<const std::byte*>(source_of(chain).data);
  k.is_cast = kind_of(chain).is_cast;
  if (chain.norm) {
    k.norm = chain.norm->weight;
    k.epsilon = chain.norm->epsilon;
  }
  if (chain.swiglu) {
    check(p.bias == nullptr && !p.accumulate, "coded weights: swiglu of a sum");
    check(chain.swiglu->y.dtype == p.x.dtype, "coded weights: swiglu in another dtype");
    k.y = chain.swiglu->y.data;
    k.y_stride = chain.swiglu->y.stride;
    k.outputs = chain.swiglu->y.columns;
  }
  const auto shape = row_launch(weight, 1, kind_of(chain), kLeastOneTokenWarps, *launch.device);
  check(shape.has_value(), "coded weights: a chain that is not supported");
  run_rows(k, weight.code, p.x.dtype, chain.swiglu.has_value(), *shape, launch);
}

bool multiply_tiles_supported(const LinearParams& p) {
  return p.x.dtype != DType::f32 && is_aligned(p.x.data) && p.x.stride % 8 == 0;
}

void multiply_tiles(const LinearParams& p, const CodedMatrix& weight, const Launch& launch) {
  const int least = p.x.rows == 1 ? kLeastOneTokenWarps : kLeastRowWarps;
  if (const auto shape = row_launch(weight, p.x.rows, {}, least, *launch.device)) {
    return run_rows(product_params(p, weight), weight.code, p.x.dtype, false, *shape, launch);
  }
  for (std::int64_t first = 0; first < p.x.rows; first += kMostBatchTokens) {
    const LinearParams part =
        tokens_of(p, first, std::min<std::int64_t>(kMostBatchTokens, p.x.rows - first));
    run_batch(product_params(part, weight), weight.code, p.x.dtype, launch);
  }
}

void multiply_unpacked(const LinearParams& p, const CodedMatrix& weight, Gemm& gemm,
                       const Launch& launch) {
  const std::int64_t row_bytes = weight.inputs * static_cast<std::int64_t>(size_of(p.x.dtype));
  const std::int64_t fit = static_cast<std::int64_t>(kUnpackedBytes) / row_bytes;
  const std::int64_t unit = fit >= kDecodedOutputs ? kDecodedOutputs : kTileOutputs;
  const std::int64_t most = fit / unit * unit;
  check(launch.scratch_bytes > kUnpackedBytes, "coded weights: a queue without scratch memory");
  if (most == 0) throw Error(ErrorCode::unsupported, "a coded matrix has too many inputs");
  gemm.set_workspace(launch.scratch + kUnpackedBytes, launch.scratch_bytes - kUnpackedBytes);
  for (std::int64_t first = 0; first < weight.outputs; first += most) {
    LinearParams part = p;
    const std::int64_t count = std::min(most, weight.outputs - first);
    part.y.data = static_cast<float*>(p.y.data) + first;
    part.y.columns = count;
    if (p.bias != nullptr) part.bias = p.bias + first;
    unpack_rows(weight, first, count, p.x.dtype, launch.scratch, launch);
    gemm.run(part, launch.scratch);
  }
  gemm.set_workspace(launch.scratch, launch.scratch_bytes);
}

void multiply_coded(const LinearParams& p, const CodedMatrix& weight, Gemm& gemm,
                    const Launch& launch) {
  if (p.x.rows <= kMostTileTokens && multiply_tiles_supported(p)) {
    return multiply_tiles(p, weight, launch);
  }
  multiply_unpacked(p, weight, gemm, launch);
}

}  // namespace sluice::cuda
