#include "kernels/runtime/heads.h"

#include <algorithm>
#include <string>
#include <vector>

#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

[[noreturn]] void throw_too_many(std::size_t heads) {
  throw Error(ErrorCode::unsupported,
              "the CUDA backend takes up to " + std::to_string(HeadRows::kListed) +
                  " KV heads whose rows differ in number or distance, not " +
                  std::to_string(heads));
}

}  // namespace

HeadRows head_rows(std::span<const std::byte* const> heads) {
  HeadRows result;
  if (heads.empty()) return result;
  result.base = heads[0];
  result.stride = heads.size() > 1 ? heads[1] - heads[0] : 0;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    if (heads[i] != result.base + static_cast<std::int64_t>(i) * result.stride) {
      result.is_listed = true;
    }
  }
  if (!result.is_listed) return result;
  if (heads.size() > HeadRows::kListed) throw_too_many(heads.size());
  std::copy(heads.begin(), heads.end(), result.listed);
  return result;
}

HeadRows head_rows(std::span<const RowSpan> heads) {
  std::vector<const std::byte*> pointers;
  for (const RowSpan& span : heads) pointers.push_back(span.rows);
  return head_rows(pointers);
}

HeadCounts head_counts(std::span<const std::int64_t> heads) {
  HeadCounts result;
  if (heads.empty()) return result;
  result.uniform = heads[0];
  result.is_listed = std::any_of(heads.begin(), heads.end(),
                                 [&](std::int64_t count) { return count != result.uniform; });
  if (!result.is_listed) return result;
  if (heads.size() > HeadRows::kListed) throw_too_many(heads.size());
  for (std::size_t i = 0; i < heads.size(); ++i) {
    result.listed[i] = static_cast<std::int32_t>(heads[i]);
  }
  return result;
}

HeadCounts head_counts(std::span<const RowSpan> heads) {
  std::vector<std::int64_t> counts;
  for (const RowSpan& span : heads) counts.push_back(span.count);
  return head_counts(counts);
}

}  // namespace sluice::cuda
