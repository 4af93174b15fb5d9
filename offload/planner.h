// Decides where the rows of a cache live, from its shape and the caps, before any allocation.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "lib/selection.h"
#include "sluice/kv_cache.h"
#include "sluice/policy.h"

namespace sluice {

// `attends_host_rows`: without a device cap the rows may stay in host memory. `policies` are those
// that the session may use, `decode_batch` the tokens that it decodes in one step, `logits` how the
// backend keeps estimates, `beside` what else `--device-memory` has to hold. Throws
// Error{usage} for a shape, context or policy out of range, Error{memory} if `device_cap` is too
// small to run at all.
KvPlan plan_kv(const KvShape& shape, std::int64_t context, std::int64_t chunk,
               std::optional<std::uint64_t> device_cap, bool attends_host_rows,
               std::span<const Policy> policies = {}, std::int64_t decode_batch = 1,
               const LogitFormat& logits = {}, std::uint64_t beside = 0);

// Bytes of a region's rows, rounded to what the host store commits.
std::uint64_t host_region_bytes(const KvShape& shape, std::int64_t tokens);

}  // namespace sluice
