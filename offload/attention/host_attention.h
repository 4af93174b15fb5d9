// Attention by the host beside the device: some of the rows that a decode step's dense layers have
// only in host memory are attended there by the CPU, while the others cross to the device. Each
// side yields a partial, and the two merge by log-sum-exp.
//
//   queue    queries to host memory ─┬─ attend around the gaps ───────────┬─ merge
//   beside                           └─ call: the host attends to the gaps ┘
//
// All work goes through queues, so that a recorded step can replay it. Gaps are read from memory,
// because their size may change from step to step.
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

// The backend that attends on the host, and its share of the rows.
struct HostAttender {
  std::shared_ptr<Backend> backend;  // computes in host memory; null: no host attention
  std::optional<double> share;       // see HostShare; unset: the fastest, learnt from steps
};

class HostAttention {
 public:
  // Allocates HostAttentionBytes. Steps are issued to `queue`; `beside` is a second queue of the
  // same backend. In the backend's memory: `pages`, the table of one set of layers,
  // [sequences, pages], and `tokens`, the tokens of a step, [decode_batch].
  HostAttention(Queue& queue, Queue& beside, const KvPlan& plan, const HostAttender& attender,
                const PageSlots* pages, const BatchToken* tokens);
  HostAttention(const HostAttention&) = delete;
  HostAttention& operator=(const HostAttention&) = delete;
  ~HostAttention();

  // Copies changed table entries, given by number, to where the host reads them.
  void mirror(std::span<const std::int64_t> entries);

  // Chooses the gaps of a step's tokens in `layers`, which attend to all rows, and copies the gaps
  // to where both sides read them. The backend already has the tokens, each of a different
  // sequence. Returns false if the host has nothing to do: such a step is issued without it.
  bool begin(std::span<const BatchToken> tokens, std::vector<int> layers,
             const BlockTables& tables);
  // A token's gap in the layers of a set.
  const PositionGap& gap(int set, std::size_t token) const { return gaps_[at(set, token)]; }
  // Attends to everything that `params` ask of the device alone in a layer, with the host's help.
  void attend(int layer, AttendBatchParams params);
  // Call after waiting for the backend: throws any error that the host met in this step, and learns
  // the share from the step's times.
  void finish();

  const HostShare& share() const { return share_; }
  // Times that a row of a KV head is read for a group of queries.
  int reads(int group) const {
    return ReadPattern::parts(group, attender_->info().reads.attend_queries);
  }

 private:
  // The host's part of a layer, for steps with the number of tokens in `params`.
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

  // State of the current step:
  std::vector<int> layers_;
  std::vector<PositionGap> gaps_;       // [sets, decode_batch]
  std::vector<std::int64_t> crossing_;  // [sets]: rows in host memory that the device attends to
  std::vector<std::int64_t> gap_rows_;  // [sets]
  bool has_learnt_ = true;

  std::mutex mutex_;  // guards what calls write: failure_ and seconds_
  std::exception_ptr failure_;
  std::vector<double> seconds_;  // [layers], spent by the host

  Buffer device_gaps_;  // PositionGap [sets, decode_batch]
  Buffer host_gaps_;    // the same in host memory, like all buffers below
  Buffer tokens_;       // BatchToken [decode_batch]
  Buffer table_;        // PageSlots [sequences, pages]
  Buffer queries_;      // [decode_batch, query_heads, head_dim]
  Buffer out_;          // [decode_batch, query_heads, head_dim]
  Buffer lse_;          // [decode_batch, query_heads]
  Buffer times_;        // std::uint64_t [layers, 2]: when the device began and ended
};

}  // namespace sluice
