// Selection among logits of which a scan has noted whole pages (PageDigest).
#pragma once

#include <cstdint>

#include "lib/backend/index_ops.h"

namespace sluice::cpu {

// Chooses for one KV head of one token as select() does, if a look at the digest and at few pages
// tells. Else it returns false, and the logits of the whole pages and of the newest rows have
// become weights: what softmax() makes of them.
bool choose_by_digest(const SelectParams& params, std::int64_t token, std::int64_t kv_head);

}  // namespace sluice::cpu
