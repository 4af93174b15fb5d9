// Selection among logits of which a scan has noted whole pages (PageDigest).
#pragma once

#include <cstdint>
#include <span>

#include "cpu/runtime/threads.h"
#include "lib/backend/index_ops.h"

namespace sluice::cpu {

// Chooses for the KV heads of all tokens as select() does, where a look at the digest and at few
// pages tells, and sets `chosen`, [tokens, kv_heads], to 1. Elsewhere it sets 0, and the logits of
// the whole pages and of the newest rows have become weights: what softmax() makes of them.
void choose_by_digest(const SelectParams& params, Threads& threads, std::span<std::uint8_t> chosen);

}  // namespace sluice::cpu
