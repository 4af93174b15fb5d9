// The rows of `bench --shape`: made up with given statistics, at the shape of any model.
//
// In every (layer, KV head) a share of the tokens is marked with one of some topics, and every step
// asks for some of the topics. Logits of all tokens are normal; those of tokens whose topic is
// asked for, the heavy tokens of the step, lie higher by what gives them their share of the weight.
// From step to step each topic that is asked for stays or gives way to another. The query heads of
// a KV head ask for the same topics. Heavy tokens lie anywhere in the context: there are no sinks
// and no neighbourhoods. Values are normal. So losses say nothing about any model.
//
// Construction: half of the channels have the noise of keys and queries, the other half one channel
// per topic, so topics and noise do not disturb each other. A Hadamard rotation and random signs
// then spread both over all channels, since few channels of their own would be easy to code.
#pragma once

#include <cstdint>
#include <span>

#include "tools/bench_rows.h"

namespace sluice::tools {

struct MadeUpStatistics {
  double logit_std = 2.0;          // of the logits of all tokens that are not heavy, nats; 0 to 8
  double heavy_share = 1.0 / 256;  // of the tokens, per step and KV head; above 0, up to 1/8
  double heavy_weight = 0.8;       // share of the attention weight of heavy tokens; above 0, to 1
  double persistence = 0.9;        // share of the heavy tokens that the next step has, 1/8 to 1
};

// Throws Error{usage} naming the flag whose value is out of range.
void validate(const MadeUpStatistics& statistics);

// Computes every row when it is read, from its place and the seed. Threads may share it.
class MadeUpRows : public BenchRows {
 public:
  MadeUpRows(const KvShape& shape, const MadeUpStatistics& statistics, std::uint64_t seed)
      : shape_(shape), statistics_(statistics), seed_(seed) {}

  KvShape shape() const override { return shape_; }
  DType dtype(RowPart /*part*/) const override { return DType::f32; }
  void read(RowPart part, int layer, std::int64_t first, std::int64_t count,
            std::span<std::byte> to) const override;

  // Returns true if a token is heavy in a step.
  bool is_heavy(int layer, int head, std::int64_t token, std::int64_t step) const;
  // Logits of heavy tokens less those of others, on average, in nats.
  double heavy_lead() const;

 private:
  static constexpr int kTopicsOfSlot = 8;  // a step asks for one of them

  int slots() const { return shape_.head_dim / 2 / kTopicsOfSlot; }
  // The topic of a token, or -1.
  int topic(int layer, int head, std::int64_t token) const;
  // The topic of these kTopicsOfSlot that a step asks for.
  int asked_topic(int layer, int head, int slot, std::int64_t step) const;
  void make_key(int layer, int head, std::int64_t token, std::span<float> to) const;
  void make_value(int layer, int head, std::int64_t token, std::span<float> to) const;
  // `query_head` of the layer.
  void make_query(int layer, int query_head, std::int64_t step, std::span<float> to) const;
  void spread(int layer, int head, std::span<float> vector) const;

  KvShape shape_;
  MadeUpStatistics statistics_;
  std::uint64_t seed_;
};

}  // namespace sluice::tools
