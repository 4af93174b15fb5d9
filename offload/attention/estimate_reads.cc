#include "offload/attention/estimate_reads.h"

#include "offload/plan/index_layout.h"

namespace sluice {

EstimateTraffic& EstimateTraffic::operator+=(const EstimateTraffic& other) {
  near += other.near;
  far += other.far;
  return *this;
}

ScanExtent extent_of(const ReadPattern& pattern, const KvShape& shape) {
  return {0, pattern.tile_pages, ReadPattern::parts(shape.group(), pattern.estimate_queries)};
}

EstimateReads::EstimateReads(const ReadPattern& pattern, const Policy& policy, const KvShape& shape,
                             std::int64_t context, const Scorer& scorer)
    : scorer_(&scorer), use_(use_of(policy, shape, context)), extent_(extent_of(pattern, shape)) {}

Traffic EstimateReads::keys(std::int64_t rows) const {
  const auto count = static_cast<std::uint64_t>(rows);
  return {count, count * static_cast<std::uint64_t>(extent_.passes) * use_.shape.value_offset()};
}

EstimateTraffic EstimateReads::scan(const BatchToken& token, std::int64_t resident, bool scored,
                                    bool whole) const {
  EstimateTraffic traffic;
  if (!scorer_->info().estimates()) return traffic;
  if (scored) traffic.near += keys(token.count() - token.page_first());
  if (!whole) return traffic;
  if (scorer_->reads_rows()) {
    traffic.near += keys(resident);
    traffic.far += keys(token.page_first() - resident);
    return traffic;
  }
  ScanExtent extent = extent_;
  extent.pages = token.pages();
  traffic.near +=
      {static_cast<std::uint64_t>(token.page_first()), scorer_->bytes_read(use_, extent)};
  return traffic;
}

EstimateTraffic EstimateReads::counted(const BatchToken& token, const ScorerCount& count) const {
  const std::uint64_t key_bytes = use_.shape.value_offset();
  const std::uint64_t estimated =
      count.bytes > 0 ? static_cast<std::uint64_t>(token.page_first()) : 0;
  EstimateTraffic traffic;
  traffic.near = {count.near_keys + estimated, count.near_keys * key_bytes + count.bytes};
  traffic.far = {count.far_keys, count.far_keys * key_bytes};
  return traffic;
}

EstimateTraffic EstimateReads::rescore(const BatchToken& token, std::int64_t candidates,
                                       std::int64_t pages_read, std::int64_t resident,
                                       bool scored) const {
  EstimateTraffic traffic;
  if (scored) traffic.near += keys(token.count() - token.page_first());
  if (candidates == 0) return traffic;
  if (scorer_->reads_rows()) {
    traffic.near += keys(resident);
    traffic.far += keys(candidates - resident);
    return traffic;
  }
  KeyTiles tiles;
  tiles.bits = use_.bits;
  traffic.near += {static_cast<std::uint64_t>(candidates),
                   static_cast<std::uint64_t>(pages_read) * tiles.page_bytes(use_.shape.head_dim)};
  return traffic;
}

}  // namespace sluice
