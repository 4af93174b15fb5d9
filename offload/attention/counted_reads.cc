#include "offload/attention/counted_reads.h"

#include <string>

#include "sluice/errors.h"

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::unsupported, "reads " + why);
}

void require_within(std::int64_t number, std::int64_t end, const std::string& what) {
  if (number >= 0 && number < end) return;
  refuse(what + " " + std::to_string(number) + ", and may read those below " + std::to_string(end));
}

void require_part(std::size_t offset, std::size_t bytes, std::size_t all, const std::string& of) {
  if (offset <= all && bytes <= all - offset) return;
  refuse(std::to_string(bytes) + " bytes from byte " + std::to_string(offset) + " of " + of +
         ", which has " + std::to_string(all));
}

}  // namespace

CountedReads::CountedReads(const RunScorer& call, Tier tier)
    : shape_(call.use.shape),
      batch_(call.batch),
      rows_(call.rows),
      memory_(call.memory),
      tier_(tier),
      counts_(static_cast<std::size_t>(call.batch.count * call.use.shape.kv_heads)) {}

ScorerCount& CountedReads::at(std::int64_t token, int head) const {
  require_within(token, batch_.count, "for token");
  require_within(head, shape_.kv_heads, "KV head");
  return counts_[static_cast<std::size_t>(token * shape_.kv_heads + head)];
}

const std::byte* CountedReads::key(std::int64_t token, int head, std::int64_t position) const {
  ScorerCount& count = at(token, head);
  const BatchToken& of = batch_.tokens[token];
  require_within(position, of.position, "the key of position");
  const PageSlots& page = rows_.page(of.sequence, position / kPageTokens);
  const bool on_device = rows_.is_on_device(page);
  if (!on_device && !rows_.is_in_host(page)) {
    refuse("the key of position " + std::to_string(position) +
           ", whose row is neither on the device nor in host memory");
  }
  // Without a device tier, attention reads rows in host memory.
  ++(on_device || tier_ == Tier::host ? count.near_keys : count.far_keys);
  return rows_.row(of.sequence, head, position, static_cast<std::int64_t>(shape_.row_bytes()));
}

const std::byte* CountedReads::page(std::int64_t token, int head, std::int64_t number,
                                    std::size_t offset, std::size_t bytes) const {
  ScorerCount& count = at(token, head);
  const BatchToken& of = batch_.tokens[token];
  require_within(number, of.pages(), "page");
  require_part(offset, bytes, memory_.page_bytes, "a page of its memory");
  count.bytes += bytes;
  return memory_.page(head, of.sequence, number) + offset;
}

std::byte* CountedReads::sequence(std::int64_t token, int head, std::size_t offset,
                                  std::size_t bytes) const {
  ScorerCount& count = at(token, head);
  require_part(offset, bytes, memory_.sequence_bytes, "its sequence's memory");
  count.bytes += bytes;
  return memory_.sequence(batch_.tokens[token].sequence) + offset;
}

}  // namespace sluice
