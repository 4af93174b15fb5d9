// KvCache on a stream of its caller's: calls return once their work is issued, in the stream's
// order, and what was bad is found at the end of the step.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <limits>
#include <thread>
#include <vector>

#include "kernels/runtime/owners.h"
#include "sluice/kv_cache.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/has_device.h"
#include "tests/support/random.h"
#include "tests/support/script.h"

namespace sluice::cuda {
namespace {

using testing::Script;

// Queries, keys and values of all layers of a step, and where its outputs go, on the device.
class StepArrays {
 public:
  StepArrays(const Script& script, std::int64_t first, std::int64_t tokens)
      : shape_(script.shape()), tokens_(tokens) {
    for (std::size_t layer = 0; layer < static_cast<std::size_t>(shape_.layers); ++layer) {
      add(script.q(layer, first), tokens * script.query_width());
      add(script.k(layer, first), tokens * script.key_width());
      add(script.v(layer, first), tokens * script.key_width());
      blocks_.push_back(make_device_block(out_bytes()));
    }
  }

  // Everything but end(), without waiting.
  void issue(KvStep& step) const {
    const ArrayLayout layout = {DType::f32, 0, 0, Tier::device};
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const auto at = [&](std::size_t part) {
        return blocks_[4 * static_cast<std::size_t>(layer) + part].get();
      };
      step.append(layer, {at(1), layout}, {at(2), layout});
      step.attend(layer, {at(0), layout}, {at(3), layout});
    }
  }

  // Attention's output of all layers, once it was waited for.
  std::vector<float> out() const {
    std::vector<float> all;
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::vector<float> one(out_bytes() / sizeof(float));
      EXPECT_EQ(cudaMemcpy(one.data(), blocks_[4 * static_cast<std::size_t>(layer) + 3].get(),
                           out_bytes(), cudaMemcpyDeviceToHost),
                cudaSuccess);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

 private:
  std::size_t out_bytes() const {
    return static_cast<std::size_t>(tokens_ * shape_.query_heads * shape_.head_dim) * sizeof(float);
  }
  void add(const float* from, std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
    blocks_.push_back(make_device_block(bytes));
    copy_in(blocks_.back().get(), from, bytes);
  }

  KvShape shape_;
  std::int64_t tokens_;
  std::vector<DeviceBlock> blocks_;  // of each layer: q, k, v, out
};

class CallerStream : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
    stream_ = make_stream();
  }
  KvConfig config(void* stream) const {
    KvConfig config;
    config.shape = {3, 8, 2, 64, DType::bf16};
    config.context = 400;
    config.chunk = 128;
    config.device = "cuda";
    config.stream = stream;
    config.sequences = 2;
    config.policies = {parse_policy("select=int4 prune=top_p(0.9) compensate=mean_value")};
    return config;
  }
  static void take(KvSequence& sequence, const Script& script, Phase phase, std::int64_t tokens,
                   std::vector<float>& outputs) {
    const StepArrays arrays(script, sequence.length(), tokens);
    KvStep step = sequence.begin_step(phase, tokens);
    arrays.issue(step);
    step.end();
    const std::vector<float> out = arrays.out();
    outputs.insert(outputs.end(), out.begin(), out.end());
  }
  std::vector<float> outputs_of(void* stream, const Script& script) const {
    KvCache cache(config(stream));
    KvSequence sequence = cache.new_sequence();
    std::vector<float> outputs;
    for (int i = 0; i < 2; ++i) take(sequence, script, Phase::prefill, 128, outputs);
    for (int i = 0; i < 5; ++i) take(sequence, script, Phase::decode, 1, outputs);
    return outputs;
  }

  const std::uint64_t seed_ = testing::seed(31);
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
  StreamOwner stream_;
};

TEST_F(CallerStream, GivesWhatTheCachesOwnGives) {
  const Script script(config(nullptr).shape, 400, seed_);
  EXPECT_EQ(outputs_of(stream_.get(), script), outputs_of(nullptr, script));
}

// The stream stands still until all was issued: a call that waited for its work would not return.
TEST_F(CallerStream, CallsReturnBeforeTheirWorkIsDone) {
  const KvConfig config = this->config(stream_.get());
  const Script script(config.shape, 400, seed_);
  KvCache cache(config);
  KvSequence sequence = cache.new_sequence();
  std::vector<float> outputs;
  take(sequence, script, Phase::prefill, 128, outputs);
  take(sequence, script, Phase::decode, 1, outputs);
  const StepArrays arrays(script, sequence.length(), 1);
  std::atomic<bool> open = false;
  {
    KvStep step = sequence.begin_step(Phase::decode, 1);
    const auto wait = [](void* gate) {
      while (!static_cast<std::atomic<bool>*>(gate)->load()) std::this_thread::yield();
    };
    ASSERT_EQ(cudaLaunchHostFunc(stream_.get(), wait, &open), cudaSuccess);
    // Whatever happens, the stream goes on some time.
    std::promise<void> issued;
    std::atomic<bool> in_time = false;
    std::thread opener([&open, &in_time, done = issued.get_future()] {
      in_time = done.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
      open = true;
    });
    arrays.issue(step);
    EXPECT_FALSE(open.load()) << "a call waited for the stream";
    issued.set_value();
    opener.join();
    EXPECT_TRUE(in_time.load());
    step.end();
  }
  EXPECT_EQ(sequence.length(), 130);
}

TEST_F(CallerStream, WhatIsBadIsFoundAtTheEndAndOthersGoOn) {
  const KvConfig config = this->config(stream_.get());
  const Script good(config.shape, 400, seed_);
  Script bad = good;
  bad.damage_key(1, 2, std::numeric_limits<float>::quiet_NaN());
  KvCache cache(config);
  KvSequence damaged = cache.new_sequence();
  const StepArrays arrays(bad, 0, 4);
  KvStep step = damaged.begin_step(Phase::prefill, 4);
  arrays.issue(step);
  try {
    step.end();
    FAIL() << "a NaN went unseen";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::numeric);
    EXPECT_NE(std::string(error.what()).find("keys of layer 1"), std::string::npos) << error.what();
  }
  KvSequence other = cache.new_sequence();
  std::vector<float> outputs;
  take(other, good, Phase::prefill, 128, outputs);
  EXPECT_EQ(other.length(), 128);
}

TEST_F(CallerStream, OfAnotherDeviceIsRefused) {
  int devices = 0;
  ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
  if (devices < 2) GTEST_SKIP() << "one device";
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const StreamOwner foreign = make_stream();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  try {
    const KvCache cache(config(foreign.get()));
    FAIL() << "it was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
  }
}

}  // namespace
}  // namespace sluice::cuda
