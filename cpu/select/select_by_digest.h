// Selection among logits whose whole pages have a digest from the scan (PageDigest).
#pragma once

#include <cstdint>
#include <span>

#include "cpu/runtime/threads.h"
#include "lib/backend/index_ops.h"

namespace sluice::cpu {

// Makes select()'s choice for every token and KV head where the digest and few pages suffice, and
// sets `chosen`, [tokens, kv_heads], to 1 there. Elsewhere `chosen` is 0, and the logits of the
// whole pages and of the newest rows are replaced by their softmax() weights.
void choose_by_digest(const SelectParams& params, Threads& threads, std::span<std::uint8_t> chosen);

}  // namespace sluice::cpu
