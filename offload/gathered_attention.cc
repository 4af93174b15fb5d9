#include "offload/gathered_attention.h"

#include <algorithm>
#include <vector>

namespace sluice {

void attend_gathered(Queue& queue, const GatheredAttention& params) {
  AttendParams attend = params.attend;
  GatherParams gather = params.keys;
  gather.to = params.arena;
  gather.to_rows = params.arena_rows;
  const auto heads = static_cast<std::size_t>(attend.shape.kv_heads);
  const std::size_t of_head =
      static_cast<std::size_t>(params.arena_rows) * attend.shape.row_bytes();
  for (std::int64_t first = 0; first < params.count; first += params.arena_rows) {
    const std::int64_t count = std::min(params.arena_rows, params.count - first);
    const std::vector<std::int64_t> counts(heads, count);
    std::vector<RowSpan> rows;
    for (std::size_t head = 0; head < heads; ++head) {
      rows.push_back({params.arena + head * of_head, count});
    }
    gather.first = first;
    gather.counts = counts;
    queue.gather(gather);
    attend.rows = rows;
    attend.first_row_position = first;
    queue.attend(attend);
    attend.merge = true;
  }
}

}  // namespace sluice
