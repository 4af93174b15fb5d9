#include "offload/planner.h"

#include <algorithm>
#include <array>
#include <string>

#include "lib/bytes.h"
#include "offload/important_tokens.h"
#include "offload/index_layout.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::int64_t kMaxContext = std::int64_t{1} << 31;
constexpr std::int64_t kMaxChunk = 1 << 16;
// Streaming buffers of at least 64 rows keep a transfer above 8 KiB per head; past 4 MiB
// a larger one gains nothing (8192 rows of 512 bytes; 512 KiB cost a fifth of PCIe's bandwidth).
constexpr std::int64_t kMinStreamTokens = 64;
constexpr std::int64_t kMaxStreamTokens = 8192;
constexpr std::int64_t kMinChunk = 16;
// With smaller chunks than this, prefill streams so often that tails are the wrong use of memory.
constexpr std::int64_t kMinChunkBesideTails = 64;
constexpr std::uint64_t kHostPage = 4096;

void validate(const KvShape& shape, std::int64_t context, std::int64_t chunk) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw Error(ErrorCode::usage, "KV cache: " + message);
  };
  require(shape.layers >= 1 && shape.layers <= 4096, "layers must be 1 to 4096");
  require(shape.kv_heads >= 1 && shape.kv_heads <= 4096, "kv_heads must be 1 to 4096");
  require(shape.query_heads >= shape.kv_heads && shape.query_heads % shape.kv_heads == 0,
          "query_heads must be a multiple of kv_heads");
  require(shape.head_dim >= 2 && shape.head_dim <= 256 && shape.head_dim % 2 == 0,
          "head_dim must be even and 2 to 256");
  require(context >= 1 && context <= kMaxContext, "context must be 1 to 2147483648 tokens");
  require(chunk >= 1 && chunk <= kMaxChunk, "chunk must be 1 to 65536 tokens");
}

// The device bytes of a layout, and of each part.
struct Sizes {
  std::uint64_t row, heads, regions;

  explicit Sizes(const KvShape& shape)
      : row(shape.row_bytes()),
        heads(static_cast<std::uint64_t>(shape.kv_heads)),
        regions(heads * static_cast<std::uint64_t>(shape.layers)) {}

  std::uint64_t per_region(std::int64_t tokens) const {
    return regions * static_cast<std::uint64_t>(tokens) * row;
  }
  std::uint64_t per_head(std::int64_t tokens) const {
    return heads * static_cast<std::uint64_t>(tokens) * row;
  }
  std::uint64_t total(const KvPlan& p) const {
    return p.index_bytes + p.work_bytes +
           per_region(p.resident_tokens + (p.tails ? kPageTokens : 0)) +
           per_head(p.window_tokens + 2 * p.stream_tokens);
  }
};

// A layout that streams, with the smallest streaming buffers and nothing resident.
KvPlan smallest(KvPlan plan, bool tails, std::int64_t chunk) {
  plan.tails = tails;
  plan.chunk = chunk;
  // The step's rows are attended in one piece with the unfinished page before them.
  plan.window_tokens = chunk + (tails ? kPageTokens - 1 : 0);
  plan.stream_tokens = kMinStreamTokens;
  return plan;
}

// Selecting attention needs the unfinished page on the device.
bool needs_tails(const KvPlan& plan) { return plan.work_bytes > 0; }

std::optional<KvPlan> fit_streaming(const KvPlan& base, const Sizes& sizes, std::uint64_t cap) {
  for (const bool tails : {true, false}) {
    if (!tails && needs_tails(base)) break;
    const std::int64_t least = std::min(base.chunk, tails ? kMinChunkBesideTails : kMinChunk);
    for (std::int64_t chunk = base.chunk; chunk >= least; chunk = std::max(chunk / 2, least)) {
      const KvPlan plan = smallest(base, tails, chunk);
      if (sizes.total(plan) <= cap) return plan;
      if (chunk == least) break;
    }
  }
  return std::nullopt;
}

// Spends what is left of the cap: larger streaming buffers first, then resident pages.
KvPlan widen(KvPlan plan, const Sizes& sizes, std::uint64_t cap) {
  for (std::int64_t tokens = kMaxStreamTokens; tokens > kMinStreamTokens; tokens /= 2) {
    KvPlan wider = plan;
    wider.stream_tokens = tokens;
    if (sizes.total(wider) > cap) continue;
    plan = wider;
    break;
  }
  const auto rows = static_cast<std::int64_t>((cap - sizes.total(plan)) / sizes.per_region(1));
  plan.resident_tokens = std::min(rows, plan.context) / kPageTokens * kPageTokens;
  return plan;
}

}  // namespace

std::uint64_t KvPlan::dense_bytes() const {
  return shape.token_bytes() * static_cast<std::uint64_t>(context);
}

std::uint64_t host_region_bytes(const KvShape& shape, std::int64_t tokens) {
  return round_up(static_cast<std::uint64_t>(tokens) * shape.row_bytes(), kHostPage);
}

KvPlan plan_kv(const KvShape& shape, std::int64_t context, std::int64_t chunk,
               std::optional<std::uint64_t> device_cap, bool attends_host_rows,
               std::span<const Policy> policies, std::int64_t decode_batch,
               const LogitFormat& logits, std::uint64_t beside) {
  validate(shape, context, chunk);
  const IndexLayout layout = plan_index(shape, context, decode_batch, policies, logits);
  const Sizes sizes(shape);
  KvPlan plan;
  plan.shape = shape;
  plan.context = context;
  plan.chunk = std::min(chunk, context);
  plan.decode_batch = decode_batch;
  plan.index_bytes = layout.index_bytes();
  plan.work_bytes = layout.work_bytes();
  if (layout.zipvl) plan.work_bytes += ImportantTokens::work_bytes(shape, context);
  plan.host_bytes = sizes.regions * host_region_bytes(shape, context) + layout.host_bytes();
  if (layout.zipvl) plan.host_bytes += ImportantTokens::host_bytes(shape, context);
  if (!device_cap && attends_host_rows) {
    plan.in_place = true;
    plan.host_bytes += plan.index_bytes + plan.work_bytes;
    return plan;
  }
  const std::uint64_t cap = device_cap.value_or(UINT64_MAX);
  if (plan.index_bytes + plan.work_bytes + sizes.per_region(context) <= cap) {
    plan.resident_tokens = context;
  } else if (const auto streaming = fit_streaming(plan, sizes, cap)) {
    plan = widen(*streaming, sizes, cap);
  } else {
    const bool selects = needs_tails(plan);
    const std::uint64_t streamed = sizes.total(
        smallest(plan, selects, std::min(plan.chunk, selects ? kMinChunkBesideTails : kMinChunk)));
    const std::uint64_t least =
        std::min(streamed, plan.index_bytes + plan.work_bytes + sizes.per_region(context));
    const std::string index = selects ? ", of which the policy's key index and work space take " +
                                            format_bytes(plan.index_bytes + plan.work_bytes) +
                                            "; --policy dense needs none"
                                      : "";
    throw Error(ErrorCode::memory, "--device-memory " + format_bytes(cap + beside) +
                                       " is too small for this model; give at least " +
                                       std::to_string(least + beside) + "B (" +
                                       format_bytes(least + beside) + ")" + index);
  }
  plan.device_bytes = sizes.total(plan);
  return plan;
}

}  // namespace sluice
