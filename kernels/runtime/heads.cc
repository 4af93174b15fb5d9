#include "kernels/runtime/heads.h"

#include <vector>

#include "lib/check.h"

namespace sluice::cuda {

HeadRows head_rows(std::span<const RowSpan> heads) {
  HeadRows all;
  if (heads.empty()) return all;
  all = {heads[0].rows, heads.size() > 1 ? heads[1].rows - heads[0].rows : 0, heads[0].count};
  for (std::size_t head = 0; head < heads.size(); ++head) {
    check(heads[head].rows == all[static_cast<int>(head)] && heads[head].count == all.count,
          "KV heads whose rows differ in number or distance");
  }
  return all;
}

HeadRows head_rows(std::span<std::byte* const> heads) {
  std::vector<RowSpan> spans;
  for (const std::byte* const rows : heads) spans.push_back({rows, 0});
  return head_rows(spans);
}

}  // namespace sluice::cuda
