#include "offload/attention/listed_pages.h"

#include <vector>

#include "lib/check.h"

namespace sluice {
namespace {

std::int64_t pages_of(std::int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

std::size_t count_of(std::int64_t a, std::int64_t b = 1, std::int64_t c = 1) {
  return static_cast<std::size_t>(a * b * c);
}

}  // namespace

ListedPages::ListedPages(Queue& queue, const KvPlan& plan, Tier tier)
    : queue_(&queue),
      shape_(plan.shape),
      sequences_(plan.sequences),
      pages_of_sequence_(pages_of(plan.context)),
      blocks_(plan.listed_blocks) {
  const ListedPageBytes bytes(plan);
  Backend& backend = queue.backend();
  means_ = backend.allocate(tier, bytes.means);
  pages_ = backend.allocate(tier, bytes.pages);
  counts_ = backend.allocate(tier, bytes.counts);
  listed_ = backend.allocate(tier, bytes.listed);
  host_listed_ = backend.allocate(Tier::host, bytes.listed);
}

std::size_t ListedPages::means_of_sequence() const {
  return count_of(shape_.kv_heads, pages_of_sequence_, shape_.head_dim) * sizeof(std::uint16_t);
}

PageMeansView ListedPages::means(int layer) const {
  std::byte* const first = means_.data() + count_of(layer, sequences_) * means_of_sequence();
  return {reinterpret_cast<std::uint16_t*>(first), pages_of_sequence_};
}

void ListedPages::build(int layer, const WholePages& pages) {
  if (pages.count > 0) queue_->run(PageMeansParams{shape_, pages, means(layer)});
}

void ListedPages::copy(std::int32_t from, std::int32_t to) {
  const std::size_t bytes = means_of_sequence();
  std::vector<CopyOp> ops;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    auto* const all = reinterpret_cast<std::byte*>(means(layer).means);
    ops.push_back({all + count_of(to) * bytes, all + count_of(from) * bytes, bytes});
  }
  queue_->copy(ops);
}

PageLists ListedPages::choose(int layer, std::int32_t sequence, const StepRange& step,
                              const Queries& queries, double share) {
  PageLists lists;
  lists.pages = reinterpret_cast<std::int32_t*>(pages_.data());
  lists.counts = reinterpret_cast<std::int32_t*>(counts_.data());
  lists.blocks = PageLists::blocks_of(step.tokens);
  lists.capacity = pages_of_sequence_;
  check(lists.blocks <= blocks_, "more queries than lists were planned for");
  ChoosePagesParams params;
  params.q = queries.q;
  params.tokens = step.tokens;
  params.q_stride = queries.stride;
  params.first = step.first;
  params.sequence = sequence;
  params.shape = shape_;
  params.scale = attend_params(shape_, step, queries).scale;
  params.share = share;
  params.means = means(layer);
  params.lists = lists;
  params.listed = reinterpret_cast<std::uint32_t*>(listed_.data()) +
                  count_of(layer, shape_.kv_heads, pages_of_sequence_);
  queue_->run(params);
  return lists;
}

void ListedPages::issue_report() {
  const CopyOp op = {host_listed_.data(), listed_.data(), listed_.bytes()};
  queue_->copy({&op, 1});
}

std::span<const std::uint32_t> ListedPages::listed(int layer, int head) const {
  const auto* const all = reinterpret_cast<const std::uint32_t*>(host_listed_.data());
  return {all + count_of(std::int64_t{layer} * shape_.kv_heads + head, pages_of_sequence_),
          count_of(pages_of_sequence_)};
}

}  // namespace sluice
