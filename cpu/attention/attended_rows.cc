#include "cpu/attention/attended_rows.h"

#include <algorithm>
#include <cstring>

#include "cpu/attention/simd.h"

namespace sluice::cpu {

ArenaParts::ArenaParts(std::byte* arena, std::int64_t arena_rows, std::size_t bytes,
                       std::int64_t items)
    : data(arena), rows(arena == nullptr ? 0 : arena_rows), row_bytes(bytes), count(items) {
  if (arena != nullptr) {
    count = std::clamp<std::int64_t>(rows / kPageTokens, 1, std::max<std::int64_t>(items, 1));
  }
}

ArenaPart ArenaParts::part(std::int64_t head, std::int64_t number) const {
  if (data == nullptr) return {};
  const std::int64_t each = rows / count;
  return {data + static_cast<std::size_t>(head * rows + number * each) * row_bytes, each};
}

void AttendedRows::add(const std::byte* rows, std::int64_t count) {
  if (!runs_.empty()) {
    RowSpan& last = runs_.back();
    if (last.rows + static_cast<std::size_t>(last.count) * tile_.row_bytes == rows) {
      last.count += count;
      return;
    }
  }
  runs_.push_back({rows, count});
}

void AttendedRows::add_copy(const std::byte* rows, std::int64_t count) {
  if (arena_.rows == 0) return add(rows, count);
  while (count > 0) {
    if (used_ == arena_.rows) attend();
    const std::int64_t now = std::min(count, arena_.rows - used_);
    const std::size_t bytes = static_cast<std::size_t>(now) * tile_.row_bytes;
    std::byte* const to = arena_.data + static_cast<std::size_t>(used_) * tile_.row_bytes;
    std::memcpy(to, rows, bytes);
    add(to, now);
    used_ += now;
    rows += bytes;
    count -= now;
  }
}

void AttendedRows::attend() {
  tile_.count = 0;
  for (const RowSpan& run : runs_) tile_.count += run.count;
  tile_.visible = tile_.count;
  attend_decode(tile_, runs_);
  tile_.merge = true;
  runs_.clear();
  used_ = 0;
}

void add_rows(const PagedRows& rows, std::int32_t sequence, std::int64_t head, std::int64_t first,
              std::int64_t end, std::size_t row_bytes, AttendedRows& to) {
  for (std::int64_t at = first; at < end;) {
    const std::int64_t page = at / kPageTokens;
    const std::int64_t count = std::min(end, (page + 1) * kPageTokens) - at;
    const std::byte* const from =
        rows.row(sequence, head, at, static_cast<std::int64_t>(row_bytes));
    if (rows.is_on_device(rows.page(sequence, page))) {
      to.add(from, count);
    } else {
      to.add_copy(from, count);
    }
    at += count;
  }
}

}  // namespace sluice::cpu
