// Queues of every backend: work of one beside that of others, and what is not to be asked of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/device.h"

namespace sluice {
namespace {

using testing::NamedBackend;

class QueueParity : public ::testing::TestWithParam<NamedBackend> {
 protected:
  static Matrix row(const Buffer& buffer) {
    const auto columns = static_cast<std::int64_t>(buffer.bytes() / sizeof(float));
    return {buffer.data(), DType::f32, 1, columns, columns};
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, QueueParity, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

// A value goes through eight queues in turn, and through each of them many times.
TEST_P(QueueParity, WaitForEachOther) {
  const auto device = testing::make_or_skip(GetParam());
  if (device == nullptr) return;
  std::vector<std::unique_ptr<Queue>> queues;
  std::vector<Buffer> values;
  const std::vector<float> first(1 << 16, 42.0f);
  values.push_back(upload(*device, first));
  for (int i = 0; i < 8; ++i) {
    queues.push_back(device->backend->make_queue({.computes = i % 2 == 0}));
    values.push_back(device->allocate(device->info().compute_tier, first.size() * sizeof(float)));
  }
  Queue* before = device->queue.get();
  for (int round = 0; round < 20; ++round) {
    for (std::size_t i = 0; i < queues.size(); ++i) {
      queues[i]->wait_for(*before);
      const CopyOp op = {values[i + 1].data(), values[i].data(), values[i].bytes()};
      queues[i]->copy({&op, 1});
      before = queues[i].get();
    }
    // Back to the start, as something else.
    device->queue->wait_for(*before);
    device->queue->run(CastParams{row(values.back()), row(values.front())});
    before = device->queue.get();
  }
  EXPECT_EQ(testing::download<float>(*device, values.front()), first);
}

// Rows of some sizes from places far apart, as selected rows are; what lies between them stays.
TEST_P(QueueParity, CopyTheSameInEveryWay) {
  const auto device = testing::make_or_skip(GetParam());
  if (device == nullptr) return;
  constexpr std::size_t kBytes = 1 << 20;
  const Buffer from = device->allocate(Tier::host, kBytes);
  for (std::size_t i = 0; i < kBytes; ++i)
    from.data()[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  for (const CopyWay way : {CopyWay::fastest, CopyWay::each, CopyWay::batched}) {
    const Buffer to = device->allocate(device->info().compute_tier, kBytes);
    std::vector<CopyOp> ops;
    std::vector<std::byte> expected(kBytes);
    for (std::size_t at = 0, bytes = 256; at + bytes < kBytes; at += 3 * bytes, bytes *= 2) {
      ops.push_back({to.data() + at, from.data() + kBytes - at - bytes, bytes});
      std::copy_n(ops.back().from, bytes, expected.data() + at);
    }
    ASSERT_GT(ops.size(), 5u);
    device->queue->run(CopyParams{ops, way});
    EXPECT_EQ(testing::download<std::byte>(*device, to), expected) << static_cast<int>(way);
  }
}

TEST_P(QueueParity, TakeMemoryOnlyWhileTheyLive) {
  const auto device = testing::make_or_skip(GetParam());
  if (device == nullptr) return;
  const std::uint64_t before = device->backend->account(Tier::device).used();
  {
    const auto copies = device->backend->make_queue({.computes = false});
    EXPECT_EQ(device->backend->account(Tier::device).used(), before);
    const auto computes = device->backend->make_queue();
    if (device->info().compute_tier == Tier::device) {
      EXPECT_GT(device->backend->account(Tier::device).used(), before);
    }
  }
  EXPECT_EQ(device->backend->account(Tier::device).used(), before);
}

TEST_P(QueueParity, SayThatTheirBackendHasEnded) {
  auto device = testing::make_or_skip(GetParam());
  if (device == nullptr) return;
  const std::unique_ptr<Queue> queue = std::move(device->queue);
  EXPECT_TRUE(queue->has_backend());
  device.reset();
  EXPECT_FALSE(queue->has_backend());
  const auto refuses = [&](const auto& work) {
    try {
      work();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage) << error.what();
    }
  };
  float x = 1.0f;
  const Matrix one = {&x, DType::f32, 1, 1, 1};
  if (GetParam().name != "reference") {  // its plain loops need no backend
    refuses([&] { queue->run(CastParams{one, one}); });
    refuses([&] { queue->run(SwigluParams{one, one}); });
  }
  refuses([&] { queue->synchronize(); });
  refuses([&] { static_cast<void>(queue->backend()); });
}

TEST_P(QueueParity, OnlyAGpuHasStreams) {
  const auto device = testing::make_or_skip(GetParam());
  if (device == nullptr || device->info().compute_tier == Tier::device) return;
  int anything = 0;
  EXPECT_THROW(device->backend->make_queue({.stream = &anything}), Error);
}

}  // namespace
}  // namespace sluice
