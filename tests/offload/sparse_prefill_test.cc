// Prefill among important tokens: what every token attends to, against fp64, whatever the pieces in
// which a prompt comes and the memory that there is for rows; and what the ledger says of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/step/kv_prompt.h"
#include "offload/step/solo_step.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/counting_backend.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"
#include "tests/support/script_oracle.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::Device;
using testing::NamedBackend;
using testing::Script;
using testing::Sees;
using testing::upload;

constexpr std::int64_t kBlock = 512;
constexpr std::int64_t kEarlier = 300;
constexpr std::int64_t kPrompt = 1900;
constexpr std::int64_t kContext = kEarlier + kPrompt;

using Masks = std::vector<std::vector<std::uint8_t>>;  // [layers][context]

// A script in a backend's memory.
class Arrays {
 public:
  Arrays(Device& device, const Script& script, std::size_t layer)
      : q_(upload(device, copied(script.q(layer, 0), script.query_width()))),
        k_(upload(device, copied(script.k(layer, 0), script.key_width()))),
        v_(upload(device, copied(script.v(layer, 0), script.key_width()))),
        out_(upload(device, std::vector<float>(
                                static_cast<std::size_t>(kContext * script.query_width()), 77.0f))),
        lse_(upload(device, std::vector<float>(
                                static_cast<std::size_t>(kContext * script.shape().query_heads)))),
        query_width_(script.query_width()),
        key_width_(script.key_width()) {
    device.synchronize();
  }
  NewRows rows(std::int64_t at) const {
    return {k_.floats() + at * key_width_, v_.floats() + at * key_width_, key_width_};
  }
  Queries queries(std::int64_t at) const {
    return {q_.floats() + at * query_width_, query_width_, out_.floats() + at * query_width_,
            lse_.floats()};
  }
  const Buffer& out() const { return out_; }

 private:
  static std::vector<float> copied(const float* from, std::int64_t width) {
    return {from, from + kContext * width};
  }

  Buffer q_;
  Buffer k_;
  Buffer v_;
  Buffer out_;
  Buffer lse_;
  std::int64_t query_width_;
  std::int64_t key_width_;
};

// The first tokens densely.
void prefill_earlier(Device& device, KvSession& session, const Script& script) {
  while (session.length() < kEarlier) {
    const std::int64_t at = session.length();
    SoloStep step(session, Phase::prefill, std::min(kEarlier - at, session.plan().chunk));
    for (int layer = 0; layer < script.shape().layers; ++layer) {
      const Arrays arrays(device, script, static_cast<std::size_t>(layer));
      step.append(layer, arrays.rows(at));
      step.attend(layer, arrays.queries(at));
      session.pool()->queue().synchronize();
    }
    step.end();
  }
}

// The attention output of all layers, [layers][context, query_heads, head_dim].
std::vector<std::vector<float>> prefill(Device& device, KvSession& session, const Script& script,
                                        Masks* masks = nullptr) {
  const std::int64_t before = session.length();
  std::vector<std::vector<float>> result;
  KvPrompt prompt(session, kPrompt);
  for (int layer = 0; layer < script.shape().layers; ++layer) {
    const Arrays arrays(device, script, static_cast<std::size_t>(layer));
    const auto for_pieces = [&](const auto& body) {
      const std::int64_t chunk = session.plan().chunk;
      for (std::int64_t first = 0; first < kPrompt; first += chunk) {
        prompt.take(first, std::min(chunk, kPrompt - first));
        body(before + first);
      }
    };
    for_pieces([&](std::int64_t at) {
      prompt.append(layer, arrays.rows(at));
      prompt.collect(arrays.queries(at));
    });
    prompt.choose(layer);
    const std::span<const std::uint8_t> listed = session.pool()->important()->listed();
    if (masks != nullptr) masks->emplace_back(listed.begin(), listed.end());
    for_pieces([&](std::int64_t at) { prompt.attend(layer, arrays.queries(at)); });
    session.pool()->queue().synchronize();
    result.push_back(testing::download<float>(device, arrays.out()));
  }
  prompt.end();
  return result;
}

// Of every 7th token of the prompt, and those at the borders of blocks.
void expect_attention(const std::vector<std::vector<float>>& result, const Script& script,
                      double tolerance, const std::function<Sees(std::size_t layer)>& sees_in) {
  const KvShape& shape = script.shape();
  for (std::size_t layer = 0; layer < result.size(); ++layer) {
    const Sees sees = sees_in(layer);
    for (std::int64_t token = kEarlier; token < kContext; ++token) {
      if (token % 7 != 0 && (token + 1) % kBlock > 1) continue;
      for (int head = 0; head < shape.query_heads; ++head) {
        const std::vector<double> expected =
            testing::attention_of(script, layer, token, head, sees);
        const float* const got =
            result[layer].data() + token * script.query_width() + head * shape.head_dim;
        for (std::size_t c = 0; c < expected.size(); ++c) {
          ASSERT_NEAR(got[c], expected[c], tolerance)
              << "layer " << layer << " token " << token << " head " << head;
        }
      }
    }
  }
}

Sees evicting(const std::vector<std::uint8_t>& mask) {
  return [&](std::int64_t token, std::int64_t row) {
    const auto at = [&](std::int64_t t) { return mask[static_cast<std::size_t>(t)] != 0; };
    return at(token) && at(row);
  };
}

Sees demoting(const std::vector<std::uint8_t>& mask) {
  return [&](std::int64_t token, std::int64_t row) {
    return row >= token / kBlock * kBlock || mask[static_cast<std::size_t>(row)] != 0;
  };
}

Policy policy_of(double tau, bool evicts) {
  return parse_policy("select=dense prefill=zipvl(" + std::to_string(tau) +
                      (evicts ? ",evict)" : ")"));
}

// On a device of `info`, or under a cap.
KvPlan plan_for(const BackendInfo& info, const KvShape& shape, const Policy& policy,
                std::int64_t chunk, std::optional<std::uint64_t> cap) {
  return testing::plan_on(info, shape, kContext, chunk, cap, {&policy, 1});
}

std::uint64_t least_cap(const KvShape& shape, const Policy& policy, std::int64_t chunk) {
  return testing::least_cap([&](std::uint64_t cap) {
    testing::plan_of(shape, kContext, chunk, cap, true, {&policy, 1});
  });
}

class SparsePrefill : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { device_ = testing::make_or_skip(GetParam()); }

  bool is_gpu() const { return GetParam().name == "cuda"; }
  KvShape shape() const { return {2, 4, 2, 64, is_gpu() ? DType::bf16 : DType::f32}; }
  // A GPU rounds queries and weights to 8 bits, and values are of order one.
  double tolerance() const { return is_gpu() ? 0.03 : 2e-5; }

  // The prompt after earlier tokens, and the masks that it leaves, where it evicts.
  std::vector<std::vector<float>> run(const Policy& policy, std::int64_t chunk,
                                      std::optional<std::uint64_t> cap, Masks* masks = nullptr) {
    const KvPlan plan = plan_for(device_->info(), shape(), policy, chunk, cap);
    KvSession session = testing::session_of(*device_->backend, plan, {&policy, 1});
    prefill_earlier(*device_, session, script_);
    return prefill(*device_, session, script_, masks);
  }

  const std::uint64_t seed_ = testing::seed(20250719);
  Script script_{shape(), kContext, seed_};
  std::unique_ptr<Device> device_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(SparsePrefill, AttendsToWhatIsImportant) {
  for (const double tau : {0.3, 0.9, 1.0}) {
    SCOPED_TRACE(tau);
    Masks masks;
    const auto evicted = run(policy_of(tau, true), 700, std::nullopt, &masks);
    expect_attention(evicted, script_, tolerance(),
                     [&](std::size_t layer) { return evicting(masks[layer]); });
    const auto demoted = run(policy_of(tau, false), 700, std::nullopt);
    expect_attention(demoted, script_, tolerance(),
                     [&](std::size_t layer) { return demoting(masks[layer]); });
    for (const std::vector<std::uint8_t>& mask : masks) {
      const auto important = std::count(mask.begin() + kEarlier, mask.end(), 1);
      EXPECT_EQ(std::count(mask.begin(), mask.begin() + kEarlier, 1), kEarlier);
      EXPECT_EQ(std::count(mask.end() - 64, mask.end(), 1), 64);
      EXPECT_EQ(important == kPrompt, tau == 1.0) << important;
    }
  }
}

// Neither the pieces nor where the rows are, nor how many of them are brought together, matter.
TEST_P(SparsePrefill, IsTheSameInAnyPiecesUnderAnyCap) {
  for (const bool evicts : {false, true}) {
    const Policy policy = policy_of(0.97, evicts);
    const auto expected = run(policy, 512, std::nullopt);
    for (const std::int64_t chunk : {37, 128, 1300}) {
      const std::uint64_t least = least_cap(shape(), policy, chunk);
      for (const std::uint64_t more : {0, 1 << 20, 1 << 23}) {
        SCOPED_TRACE(::testing::Message() << "evicts " << evicts << " chunk " << chunk << " cap "
                                          << least << " + " << more);
        const auto result = run(policy, chunk, least + more);
        for (std::size_t layer = 0; layer < expected.size(); ++layer) {
          EXPECT_LT(testing::largest_difference(expected[layer], result[layer]), tolerance());
        }
      }
    }
  }
}

TEST_P(SparsePrefill, NamesTheLayerOfANaN) {
  script_.damage_key(1, kEarlier + 40, std::nanf(""));
  for (const bool evicts : {false, true}) {
    try {
      run(policy_of(0.9, evicts), 512, std::nullopt);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::numeric);
      EXPECT_NE(std::string(error.what()).find("layer 1"), std::string::npos) << error.what();
    }
  }
}

std::vector<NamedBackend> fast_backends() {
  std::vector<NamedBackend> all = testing::backends_by_kind();
  all.erase(all.begin());  // the reference
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, SparsePrefill, ::testing::ValuesIn(fast_backends()),
                         testing::name_of);

class SparsePrefillLedger : public ::testing::Test {
 protected:
  const KvShape shape_{2, 4, 2, 8, DType::f32};
  const std::uint64_t seed_ = testing::seed(20250719);
  Script script_{shape_, kContext, seed_};
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_F(SparsePrefillLedger, CountsWhatCrosses) {
  for (const bool evicts : {false, true}) {
    const Policy policy = policy_of(0.97, evicts);
    const std::uint64_t least = least_cap(shape_, policy, 200);
    for (const std::uint64_t more : {0, 1 << 20}) {
      SCOPED_TRACE(::testing::Message()
                   << "evicts " << evicts << " cap " << least << " + " << more);
      auto owned = std::make_unique<CountingBackend>(MemoryAccount::kNoCap);
      const CountingBackend& counts = *owned;
      Device device(std::move(owned));
      const KvPlan plan = testing::plan_of(shape_, kContext, 200, least + more, true, {&policy, 1});
      KvSession session = testing::session_of(*device.backend, plan, {&policy, 1});
      prefill(device, session, script_);
      EXPECT_EQ(counts.host_to_device, session.ledger().crossed(Tier::host, Tier::device).bytes);
      EXPECT_EQ(counts.device_to_host, session.ledger().crossed(Tier::device, Tier::host).bytes);
      EXPECT_EQ(counts.host_rows_attended, 0u);
      // Staged rows are on the device.
      EXPECT_EQ(counts.host_to_device > 0, !evicts && plan.resident_tokens < kPrompt);
    }
  }
}

// Rows by pieces, as a dense prefill counts them.
TEST_F(SparsePrefillLedger, CountsWhatItAttendsTo) {
  const auto hits = [&](const Policy& policy, std::int64_t chunk = 256) {
    Device device(testing::cpu_backend(DType::f32).make());
    const KvPlan plan = plan_for(device.info(), shape_, policy, chunk, std::nullopt);
    KvSession session = testing::session_of(*device.backend, plan, {&policy, 1});
    if (policy.prefill.tau > 0.0) {
      prefill(device, session, script_);
    } else {
      script_.prefill(session, kPrompt);
    }
    return session.ledger().total(Phase::prefill, Tier::host, Tier::host, Cause::hit).rows;
  };
  const std::uint64_t dense = hits(Policy{});
  EXPECT_EQ(hits(policy_of(1.0, true)), dense);
  EXPECT_EQ(hits(policy_of(1.0, false)), dense);
  // Pieces of several blocks, and of more tokens than are packed at a time.
  for (const bool evict : {true, false}) {
    EXPECT_EQ(hits(policy_of(1.0, evict), 1300), hits(Policy{}, 1300)) << evict;
  }
  EXPECT_LT(hits(policy_of(0.5, false)), dense * 2 / 3);
  EXPECT_LT(hits(policy_of(0.5, true)), hits(policy_of(0.5, false)));
}

}  // namespace
}  // namespace sluice
