#include "sluice/ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "sluice/errors.h"

namespace sluice {
namespace {

TEST(Ledger, TotalsAreKeptByPhaseLayerDirectionAndCause) {
  Ledger ledger(2);
  ledger.begin_step(Phase::prefill, 4);
  ledger.record(0, Tier::host, Tier::device, Cause::miss, {8, 800});
  ledger.record(0, Tier::host, Tier::device, Cause::miss, {2, 200});
  ledger.record(1, Tier::device, Tier::host, Cause::write_back, {4, 400});
  ledger.begin_step(Phase::decode, 1);
  ledger.record(1, Tier::host, Tier::device, Cause::miss, {1, 100});

  const Traffic prefill_misses{10, 1000};
  const Traffic decode_misses{1, 100};
  EXPECT_EQ(ledger.total(Phase::prefill, Tier::host, Tier::device, Cause::miss), prefill_misses);
  EXPECT_EQ(ledger.total(Phase::prefill, 1, Tier::host, Tier::device, Cause::miss), Traffic{});
  EXPECT_EQ(ledger.total(Phase::decode, 1, Tier::host, Tier::device, Cause::miss), decode_misses);
  EXPECT_EQ(ledger.crossed(Tier::host, Tier::device), (Traffic{11, 1100}));
  EXPECT_EQ(ledger.crossed(Tier::device, Tier::host), (Traffic{4, 400}));
  EXPECT_EQ(ledger.steps(Phase::prefill), 1u);
  EXPECT_EQ(ledger.tokens(Phase::prefill), 4u);
  ASSERT_EQ(ledger.history().size(), 2u);
  ASSERT_EQ(ledger.history().front().entries.size(), 2u) << "equal entries of a step are added up";
  EXPECT_EQ(ledger.history().front().entries[0].traffic, prefill_misses);
}

TEST(Ledger, HistoryIsBoundedAndTotalsAreNot) {
  Ledger ledger(1);
  const int steps = static_cast<int>(Ledger::kHistory) + 10;
  for (int i = 0; i < steps; ++i) {
    ledger.begin_step(Phase::decode, 1);
    ledger.record(0, Tier::device, Tier::device, Cause::hit, {1, 64});
  }
  EXPECT_EQ(ledger.history().size(), Ledger::kHistory);
  EXPECT_EQ(ledger.history().back().index, static_cast<std::uint64_t>(steps - 1));
  EXPECT_EQ(ledger.total(Phase::decode, Tier::device, Tier::device, Cause::hit).rows,
            static_cast<std::uint64_t>(steps));
}

TEST(Ledger, JsonSaysWhatTheTotalsSay) {
  Ledger ledger(2);
  ledger.begin_step(Phase::decode, 1);
  ledger.record(1, Tier::host, Tier::device, Cause::miss, {3, 384});
  const nlohmann::json json = nlohmann::json::parse(ledger.to_json());
  EXPECT_EQ(json["decode"]["steps"], 1);
  ASSERT_EQ(json["decode"]["totals"].size(), 1u);
  EXPECT_EQ(json["decode"]["totals"][0]["bytes"], 384);
  EXPECT_EQ(json["decode"]["totals"][0]["cause"], "miss");
  EXPECT_EQ(json["decode"]["layers"][0].size(), 0u);
  EXPECT_EQ(json["decode"]["layers"][1][0]["rows"], 3);
  EXPECT_EQ(json["history"][0]["entries"][0]["layer"], 1);
}

TEST(Ledger, TableShowsBytesPerToken) {
  Ledger ledger(1);
  ledger.begin_step(Phase::decode, 4);
  ledger.record(0, Tier::host, Tier::device, Cause::miss, {8, 4096});
  EXPECT_THAT(ledger.to_table(), ::testing::HasSubstr("host -> device"));
  EXPECT_THAT(ledger.to_table(), ::testing::HasSubstr("1024 B"));
}

TEST(Ledger, TokensOfAStepThatStoppedAreTakenBack) {
  Ledger ledger(1);
  ledger.begin_step(Phase::prefill, 5);
  ledger.begin_step(Phase::prefill, 7);
  ledger.record(0, Tier::device, Tier::host, Cause::write_back, {3, 300});
  ledger.drop_tokens();
  EXPECT_EQ(ledger.tokens(Phase::prefill), 5u);
  EXPECT_EQ(ledger.history().back().tokens, 0);
  EXPECT_EQ(ledger.crossed(Tier::device, Tier::host).bytes, 300u);
}

TEST(Ledger, HasNoOtherLayersThanItsOwn) {
  const Ledger ledger(2);
  for (const int layer : {-1, 2}) {
    EXPECT_THROW(ledger.total(Phase::decode, layer, Tier::host, Tier::host, Cause::hit), Error);
  }
  EXPECT_THROW(Ledger(0), Error);
}

TEST(LedgerDeathTest, RefusesEntriesOutsideAStepOrLayer) {
  Ledger ledger(1);
  EXPECT_DEATH(ledger.record(0, Tier::host, Tier::host, Cause::hit, {1, 1}), "outside a step");
  ledger.begin_step(Phase::decode, 1);
  EXPECT_DEATH(ledger.record(1, Tier::host, Tier::host, Cause::hit, {1, 1}), "layer");
}

}  // namespace
}  // namespace sluice
