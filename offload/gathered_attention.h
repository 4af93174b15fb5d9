// Attention of many tokens to rows found by position: gathered piece by piece into an arena, and
// attended there. Every row serves all queries.
#pragma once

#include <cstdint>

#include "lib/backend/queue.h"

namespace sluice {

struct GatheredAttention {
  // Without rows: query token i sees the keys up to number first_query_position + i.
  AttendParams attend;
  // Where the keys are; `first`, `counts`, `to` and `to_rows` are left open.
  GatherParams keys;
  std::int64_t count = 0;      // keys, as many for every KV head
  std::byte* arena = nullptr;  // [kv_heads, arena_rows, row_bytes]
  std::int64_t arena_rows = 0;
};

void attend_gathered(Queue& queue, const GatheredAttention& params);

}  // namespace sluice
