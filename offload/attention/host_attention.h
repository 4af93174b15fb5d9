// Attention by the host beside the device: of the rows that a decode step's dense layers have only
// at home, the host attends to some where they lie, while the others cross to the device. What both
// found are partials, and merge.
//
//   queue    queries to host memory ─┬─ attend around the gaps ───────────┬─ merge
//   beside                           └─ call: the host attends to the gaps ┘
//
// All of it is work of queues, which a recorded step replays: gaps are read from memory, so that
// their size may change from step to step.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "lib/backend.h"
#include "offload/attention/host_share.h"
#include "offload/plan/planner.h"
#include "offload/tiers/block_tables.h"

namespace sluice {

// Who attends, and to how much.
struct HostAttender {
  std::shared_ptr<Backend> backend;  // computes in host memory; null: nobody does
  std::optional<double> share;       // see HostShare; unset: what is fastest
};

class HostAttention {
 public:
  // Allocates HostAttentionBytes. Steps are issued to `queue`; `beside` is another of its backend.
  // In the backend's memory: `pages`, the table of one set of layers, [sequences, pages], and
  // `tokens`, those of a step, [decode_batch].
  HostAttention(Queue& queue, Queue& beside, const KvPlan& plan, const HostAttender& attender,
                const PageSlots* pages, const BatchToken* tokens);
  HostAttention(const HostAttention&) = delete;
  HostAttention& operator=(const HostAttention&) = delete;
  ~HostAttention();

  // Brings entries of the table that have changed, by their number, where the host reads them.
  void mirror(std::span<const std::int64_t> entries);

  // Chooses the gaps of a step's tokens, which the backend has and of which each is of another
  // sequence, in layers that attend to all rows; brings them where both sides read them. False if
  // the host has nothing to do: such a step is issued without it.
  bool begin(std::span<const BatchToken> tokens, std::vector<int> layers,
             const BlockTables& tables);
  // The gap of a token in the layers of a set.
  const PositionGap& gap(int set, std::size_t token) const { return gaps_[at(set, token)]; }
  // Of a layer: what `params` ask of the device alone.
  void attend(int layer, AttendBatchParams params);
  // Once the backend was waited for: throws what went wrong on the host in this step, and learns
  // from what it took.
  void finish();

  const HostShare& share() const { return share_; }
  // Rows of every KV head are read so often for a group of queries.
  int reads(int group) const {
    return ReadPattern::parts(group, attender_->info().reads.attend_queries);
  }

 private:
  // The host's part of a layer, in steps of so many tokens.
  class Call : public HostCall {
   public:
    Call(HostAttention& owner, int layer, const AttendBatchParams& params)
        : owner_(&owner), layer_(layer), params_(params) {}
    void run() noexcept override { owner_->attend_gaps(layer_, params_); }

   private:
    HostAttention* owner_;
    int layer_;
    AttendBatchParams params_;
  };

  std::size_t at(int set, std::size_t token) const {
    return static_cast<std::size_t>(set) * static_cast<std::size_t>(plan_.decode_batch) + token;
  }
  std::int64_t choose(const BlockTables& tables, int set, std::span<const BatchToken> tokens);
  void publish(std::size_t tokens);
  Call& call(int layer, const AttendBatchParams& params);
  void copy_queries(const AttendBatchParams& params);
  void attend_gaps(int layer, const AttendBatchParams& params) noexcept;
  void learn();

  Queue& queue_;
  Queue& beside_;
  KvPlan plan_;
  HostShare share_;
  std::shared_ptr<Backend> attender_;
  std::unique_ptr<Queue> host_queue_;  // of the attender
  const PageSlots* pages_;
  const BatchToken* step_tokens_;
  std::map<std::pair<int, std::int64_t>, std::unique_ptr<Call>> calls_;  // by layer and tokens

  // Of the step.
  std::vector<int> layers_;
  std::vector<PositionGap> gaps_;       // [sets, decode_batch]
  std::vector<std::int64_t> crossing_;  // [sets]: rows at home that are the device's
  std::vector<std::int64_t> gap_rows_;  // [sets]
  bool has_learnt_ = true;

  std::mutex mutex_;  // of what calls leave behind
  std::exception_ptr failure_;
  std::vector<double> seconds_;  // [layers], of the host

  Buffer device_gaps_;  // PositionGap [sets, decode_batch]
  Buffer host_gaps_;    // the same in host memory, as all that follows
  Buffer tokens_;       // BatchToken [decode_batch]
  Buffer table_;        // PageSlots [sequences, pages]
  Buffer queries_;      // [decode_batch, query_heads, head_dim]
  Buffer out_;          // likewise
  Buffer lse_;          // [decode_batch, query_heads]
  Buffer times_;        // std::uint64_t [layers, 2]: when the device began and ended
};

}  // namespace sluice
