#include "tools/bench_transfer.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cstring>
#include <functional>

#include "offload/backends.h"
#include "sluice/batch.h"
#include "sluice/errors.h"

namespace sluice::tools {
namespace {

using TransferClock = std::chrono::steady_clock;

constexpr std::uint64_t kMostHostBytes = std::uint64_t{1} << 30;
constexpr int kLeastPage = 8;

// The tokens of a page in a way's name; 0: it names none.
int page_of(const std::string& name) {
  constexpr std::string_view kPrefix = "page";
  int page = 0;
  if (!name.starts_with(kPrefix)) return 0;
  const char* const end = name.data() + name.size();
  const auto [at, error] = std::from_chars(name.data() + kPrefix.size(), end, page);
  const bool is_number = error == std::errc() && at == end && page >= kLeastPage;
  return is_number && page <= kPageTokens && std::has_single_bit(static_cast<unsigned>(page)) ? page
                                                                                              : 0;
}

// The part of each attention.
std::vector<std::span<const MissedRows>> by_operation(std::span<const MissedRows> missed) {
  std::vector<std::span<const MissedRows>> parts;
  for (std::size_t first = 0, i = 1; i <= missed.size(); ++i) {
    if (i < missed.size() && missed[i].operation == missed[first].operation) continue;
    parts.push_back(missed.subspan(first, i - first));
    first = i;
  }
  return parts;
}

std::int64_t count_of(std::span<const MissedRows> missed) {
  std::int64_t count = 0;
  for (const MissedRows& rows : missed) count += std::ssize(rows.positions);
  return count;
}

double seconds_of(const std::function<void()>& work) {
  const TransferClock::time_point start = TransferClock::now();
  work();
  return std::chrono::duration<double>(TransferClock::now() - start).count();
}

}  // namespace

TransferWay parse_transfer(const std::string& name) {
  if (name == "gather") return {name, TransferWay::Kind::gather, 1};
  if (name == "rows") return {name, TransferWay::Kind::rows, 1};
  if (name == "batched") return {name, TransferWay::Kind::batched, 1};
  const int page = page_of(name);
  if (page > 0) return {name, TransferWay::Kind::pages, page};
  throw Error(ErrorCode::usage, "--transfer " + name +
                                    ": there are gather, rows, batched, page8, page16, page32, "
                                    "page64 and page128");
}

TransferBench::TransferBench(const std::string& device, int threads, const KvShape& shape,
                             std::int64_t tokens)
    : shape_(shape), tokens_((tokens + kPageTokens - 1) / kPageTokens * kPageTokens) {
  BackendOptions options;
  options.device = device;
  options.threads = threads;
  backend_ = make_backend(options);
  queue_ = backend_->make_queue({.computes = false});
  const std::uint64_t of_layer =
      static_cast<std::uint64_t>(shape.kv_heads * tokens_) * shape.row_bytes();
  layers_ = static_cast<int>(
      std::clamp<std::uint64_t>(kMostHostBytes / of_layer, 1, static_cast<unsigned>(shape.layers)));
  host_ = backend_->allocate(Tier::host, static_cast<std::size_t>(layers_) * of_layer);
  // Pages that were never written would all be one page of zeros.
  std::memset(host_.data(), 1, host_.bytes());
  std::vector<PageSlots> pages;
  for (std::int32_t page = 0; page < tokens_ / kPageTokens; ++page) {
    pages.push_back({PageSlots::kNone, page});
  }
  pages_ = backend_->allocate(backend_->info().compute_tier, pages.size() * sizeof(PageSlots));
  const CopyOp op = {pages_.data(), reinterpret_cast<const std::byte*>(pages.data()),
                     pages_.bytes()};
  queue_->copy({&op, 1});
  queue_->synchronize();
}

std::byte* TransferBench::host_row(const MissedRows& rows, std::int64_t position) const {
  const std::int64_t head = std::int64_t{rows.operation % layers_} * shape_.kv_heads + rows.head;
  return host_.data() + static_cast<std::size_t>(head * tokens_ + position) * shape_.row_bytes();
}

// Freed first, because a device may not have room for both.
void TransferBench::reserve_device(std::size_t bytes) {
  if (bytes <= device_.bytes()) return;
  device_ = {};
  device_ = backend_->allocate(Tier::device, bytes);
}

void TransferBench::bring(std::span<const MissedRows> missed, Brought& to) {
  to.seconds.push_back(to.way.kind == TransferWay::Kind::gather ? time_gather(missed, to)
                                                                : time_copies(missed, to));
}

// The copies of one attention, to places in a buffer that do not begin anywhere yet.
std::vector<CopyOp> TransferBench::copies(std::span<const MissedRows> missed,
                                          const TransferWay& way) {
  std::vector<CopyOp> ops;
  for (const MissedRows& rows : missed) {
    std::int64_t end = -1;  // of the head's last copy
    for (const std::int32_t position : rows.positions) {
      if (position < end) continue;
      const std::int64_t first = position / way.page * way.page;
      const std::size_t bytes = static_cast<std::size_t>(way.page) * shape_.row_bytes();
      const bool is_neighbour = first == end && way.kind != TransferWay::Kind::pages;
      if (is_neighbour) {
        ops.back().bytes += bytes;
      } else {
        ops.push_back({nullptr, host_row(rows, first), bytes});
      }
      end = first + way.page;
    }
  }
  return ops;
}

double TransferBench::time_copies(std::span<const MissedRows> missed, Brought& to) {
  std::vector<std::vector<CopyOp>> parts;
  std::size_t most = 0;
  const bool is_batched = to.way.kind == TransferWay::Kind::batched;
  for (const std::span<const MissedRows> part : by_operation(missed)) {
    const std::vector<CopyOp>& ops = parts.emplace_back(copies(part, to.way));
    std::size_t bytes = 0;
    for (const CopyOp& op : ops) bytes += op.bytes;
    most = std::max(most, bytes);
    to.crossed += {bytes, is_batched ? (ops.empty() ? 0 : 1) : ops.size()};
  }
  reserve_device(most);
  for (std::vector<CopyOp>& ops : parts) {
    std::byte* at = device_.data();
    for (CopyOp& op : ops) {
      op.to = at;
      at += op.bytes;
    }
  }
  const CopyWay way = is_batched ? CopyWay::batched : CopyWay::each;
  return seconds_of([&] {
    for (const std::vector<CopyOp>& ops : parts) {
      if (!ops.empty()) queue_->run(CopyParams{ops, way});
    }
    queue_->synchronize();
  });
}

double TransferBench::time_gather(std::span<const MissedRows> missed, Brought& to) {
  std::vector<GatherParams> gathers;  // one for each KV head: heads miss other rows
  std::vector<std::int32_t> positions;
  std::int64_t most = 0;
  for (const std::span<const MissedRows> operation : by_operation(missed)) {
    const std::int64_t rows = count_of(operation);
    to.crossed += {static_cast<std::uint64_t>(rows) * shape_.row_bytes(),
                   static_cast<std::uint64_t>(rows > 0 ? 1 : 0)};
    for (const MissedRows& head : operation) {
      if (head.positions.empty()) continue;
      GatherParams gather;
      gather.shape = shape_;
      gather.shape.query_heads /= shape_.kv_heads;
      gather.shape.kv_heads = 1;
      gather.rows.host = host_row(head, 0);
      gather.rows.host_stride = tokens_ * static_cast<std::int64_t>(shape_.row_bytes());
      gather.rows.pages = reinterpret_cast<const PageSlots*>(pages_.data());
      gather.rows.table_stride = tokens_ / kPageTokens;
      gather.count = gather.to_rows = std::ssize(head.positions);
      positions.insert(positions.end(), head.positions.begin(), head.positions.end());
      gathers.push_back(gather);
      most = std::max(most, gather.count);
    }
  }
  reserve_device(static_cast<std::size_t>(most) * shape_.row_bytes());
  const Buffer on_device =
      backend_->allocate(backend_->info().compute_tier, positions.size() * sizeof(std::int32_t));
  const CopyOp op = {on_device.data(), reinterpret_cast<const std::byte*>(positions.data()),
                     on_device.bytes()};
  if (op.bytes > 0) queue_->copy({&op, 1});
  queue_->synchronize();
  const auto* next = reinterpret_cast<const std::int32_t*>(on_device.data());
  for (GatherParams& gather : gathers) {
    gather.positions = next;
    gather.to = device_.data();
    next += gather.count;
  }
  return seconds_of([&] {
    for (const GatherParams& gather : gathers) queue_->run(gather);
    queue_->synchronize();
  });
}

}  // namespace sluice::tools
