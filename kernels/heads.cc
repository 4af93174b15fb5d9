#include "kernels/heads.h"

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

HeadCounts head_counts(std::span<const RowSpan> heads) {
  HeadCounts result;
  if (heads.empty()) return result;
  result.uniform = heads[0].count;
  result.is_listed = std::any_of(heads.begin(), heads.end(),
                                 [&](const RowSpan& span) { return span.count != result.uniform; });
  if (!result.is_listed) return result;
  if (heads.size() > HeadRows::kListed) throw_too_many(heads.size());
  for (std::size_t i = 0; i < heads.size(); ++i) {
    result.listed[i] = static_cast<std::int32_t>(heads[i].count);
  }
  return result;
}

HeadSources head_sources(std::span<const RowSource> heads) {
  std::vector<const std::byte*> resident;
  std::vector<const std::byte*> home;
  std::vector<RowSpan> counts;
  for (const RowSource& source : heads) {
    resident.push_back(source.resident);
    home.push_back(source.home);
    counts.push_back({nullptr, source.resident_count});
  }
  return {head_rows(resident), head_rows(home), head_counts(counts)};
}

}  // namespace sluice::cuda
