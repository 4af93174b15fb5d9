// Sequences of calls that break caches of other programs: whatever came before, a session answers
// as a fresh one that is given its tokens.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"
#include "tests/support/small_sessions.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::copy_of;
using testing::expect_error;
using testing::go_on;
using testing::options_for;
using testing::Random;
using testing::random_tokens;
using testing::RandomCheckpoint;

namespace fs = std::filesystem;

using Tokens = std::vector<TokenId>;

// Logits have a deviation of 1, and sums in f32 whose order differs are all that may differ.
constexpr double kTolerance = 2e-3;

struct Setting {
  std::string policy;
  bool capped = false;
  bool on_disk = false;
};

void PrintTo(const Setting& s, std::ostream* out) {
  *out << s.policy << (s.capped ? ", capped" : "") << (s.on_disk ? ", on disk" : "");
}

class Sequences : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    EngineConfig config = testing::config_of(model_);
    config.compute = DType::f32;
    config.kv_dtype = DType::f32;
    if (GetParam().on_disk) {
      const auto disk = testing::disk_directory();
      if (!disk) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
      config.disk = DiskConfig{{*disk}, {}};
    }
    engine_.emplace(Engine::open(config));
  }

  SessionOptions options(int sequences) {
    SessionOptions options = options_for(*engine_, GetParam().policy, sequences);
    if (GetParam().capped) options = testing::tightly(*engine_, options, GetParam().on_disk);
    return options;
  }

  // The logits after the last of `decoded`, of a session that was never anything else.
  std::vector<float> fresh(std::span<const TokenId> prompt, std::span<const TokenId> decoded) {
    Session session = engine_->new_session(options_for(*engine_, GetParam().policy));
    std::vector<float> logits = copy_of(session.prefill(prompt));
    for (const TokenId token : decoded) logits = copy_of(session.decode(token));
    return logits;
  }
  void expect_fresh(std::span<const float> logits, std::span<const TokenId> prompt,
                    std::span<const TokenId> decoded) {
    EXPECT_LE(testing::largest_difference(copy_of(logits), fresh(prompt, decoded)), kTolerance);
  }

  const std::uint64_t seed_ = testing::seed(31);
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
  RandomCheckpoint model_{1};
  std::optional<Engine> engine_;
};

// The page that is given up goes to the other session, and the one after it is a new one.
TEST_P(Sequences, TruncateToWholePagesStepAnotherGoOn) {
  const Tokens prompt = random_tokens(500, seed_);
  const Tokens others = random_tokens(300, seed_ + 1);
  const Tokens more = random_tokens(140, seed_ + 2);
  for (const std::int64_t pages : {3, 2, 1}) {
    SCOPED_TRACE(std::to_string(pages) + " pages");
    const std::int64_t length = pages * kPageTokens;
    Session session = engine_->new_session(options(2));
    Session other = session.sibling();
    session.prefill(prompt);
    other.prefill(std::span(others).first(100));
    session.truncate(length);
    std::vector<float> of_other;
    for (const TokenId token : std::span(others).subspan(100)) {
      of_other = copy_of(other.decode(token));
    }
    std::vector<float> logits;
    for (const TokenId token : more) logits = copy_of(session.decode(token));
    const auto kept = std::span(prompt).first(static_cast<std::size_t>(length));
    expect_fresh(logits, kept, more);
    expect_fresh(of_other, std::span(others).first(100), std::span(others).subspan(100));
  }
}

TEST_P(Sequences, AHundredTimesAHundredStepsAndATruncation) {
  Random random(seed_);
  const Tokens prompt = random_tokens(300, seed_);
  Session session = engine_->new_session(options(1));
  session.prefill(prompt);
  Tokens decoded;
  const int rounds = GetParam().on_disk ? 30 : 100;  // a disk is slow
  for (int round = 0; round < rounds; ++round) {
    std::vector<float> logits;
    for (const TokenId token : random_tokens(100, seed_ + 1 + static_cast<std::uint64_t>(round))) {
      decoded.push_back(token);
      logits = copy_of(session.decode(token));
    }
    if (round % 10 == 9) {
      SCOPED_TRACE("round " + std::to_string(round));
      expect_fresh(logits, prompt, decoded);
      if (HasFailure()) return;
    }
    // Cuts within a page and at its end, and now and then nothing at all.
    const auto most = static_cast<std::int64_t>(decoded.size());
    const std::int64_t left = random.integer(0, 3) == 0 ? 84 : random.integer(0, 150);
    decoded.resize(static_cast<std::size_t>(std::min(left, most)));
    session.truncate(300 + static_cast<std::int64_t>(decoded.size()));
  }
}

// Forks share all but the last page, which each goes on in.
TEST_P(Sequences, ForksOffAPageBoundaryInOneBatch) {
  const Tokens prompt = random_tokens(301, seed_);
  const std::vector<std::size_t> lengths = {301, 301, 290, 257, 256, 255};
  std::vector<Session> sessions;
  sessions.push_back(engine_->new_session(options(static_cast<int>(lengths.size()))));
  sessions.front().prefill(prompt);
  while (sessions.size() < lengths.size()) sessions.push_back(sessions.front().fork());
  std::vector<Tokens> tokens;
  std::vector<std::vector<float>> logits(lengths.size());
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    sessions[i].truncate(static_cast<std::int64_t>(lengths[i]));
    tokens.push_back(random_tokens(140, seed_ + 1 + i));
  }
  for (std::size_t step = 0; step < tokens[0].size(); ++step) {
    std::vector<StepToken> batch;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      batch.push_back({&sessions[i], tokens[i][step]});
    }
    const std::vector<StepResult> results = engine_->step(batch);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      ASSERT_FALSE(results[i].error) << results[i].error->what();
      logits[i] = copy_of(results[i].logits);
    }
  }
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    SCOPED_TRACE("fork " + std::to_string(i));
    expect_fresh(logits[i], std::span(prompt).first(lengths[i]), tokens[i]);
  }
}

// What a load had taken when it failed is given back.
TEST_P(Sequences, AFailedLoadThenAFreshSession) {
  const testing::TempDir temp;
  const fs::path saved = temp.path() / "session";
  const Tokens prompt = random_tokens(700, seed_);
  const Tokens more = random_tokens(40, seed_ + 1);
  const SessionOptions options = this->options(1);
  std::vector<std::vector<float>> expected;
  {
    Session session = engine_->new_session(options);
    session.prefill(prompt);
    session.save(saved);
    expected = go_on(session, more);
  }
  fs::path rows;
  for (const fs::directory_entry& entry : fs::directory_iterator(saved)) {
    if (entry.path().extension() == ".bin") rows = entry.path();
  }
  const std::uint64_t size = fs::file_size(rows);
  const std::uint64_t host = engine_->memory().host_bytes;
  const std::uint64_t device = engine_->memory().device_bytes;
  // From the tokens at the file's beginning to the rows of the last page.
  std::size_t failed = 0;
  for (const std::uint64_t at : {size / 100, size / 4, size / 2, size - size / 50}) {
    const auto flip = [&] {
      std::fstream file(rows, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(static_cast<std::streamoff>(at));
      const int byte = file.get();
      file.seekp(static_cast<std::streamoff>(at));
      file.put(static_cast<char>(byte ^ 0x10));
    };
    flip();
    try {
      Session loaded = engine_->load_session(saved, options);
      // Behind a disk rows are first read where they are wanted.
      go_on(loaded, more);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
      ++failed;
    }
    flip();
    EXPECT_EQ(engine_->memory().host_bytes, host);
    EXPECT_EQ(engine_->memory().device_bytes, device);
    Session session = engine_->new_session(options);
    session.prefill(prompt);
    EXPECT_EQ(go_on(session, more), expected) << "after a load that failed at byte " << at;
  }
  // The last byte may be of the index, which is not read where rows are.
  EXPECT_GE(failed, GetParam().on_disk ? 1u : 3u);
  Session loaded = engine_->load_session(saved, options);
  EXPECT_EQ(go_on(loaded, more), expected);
}

INSTANTIATE_TEST_SUITE_P(Settings, Sequences,
                         ::testing::Values(Setting{"dense"}, Setting{"values"}, Setting{"quest"},
                                           Setting{"dense", true}, Setting{"values", true},
                                           Setting{"sparq", true}, Setting{"dense", true, true},
                                           Setting{"values", true, true}));

}  // namespace
}  // namespace sluice
