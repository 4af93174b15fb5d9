// Sessions behind a disk, whose pages stay in the saved file until they are wanted.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/small_sessions.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::config_of;
using testing::expect_error;
using testing::go_on;
using testing::kMore;
using testing::options_for;
using testing::put;
using testing::random_tokens;
using testing::rows_files;
using testing::SavedSessions;
using testing::text_of;
using testing::tightly;

namespace fs = std::filesystem;

class AttachedSessions : public SavedSessions {
 protected:
  static constexpr std::int64_t kLong = 6000;

  void SetUp() override {
    const auto disk = testing::disk_directory();
    if (!disk) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
    EngineConfig config = config_of(model_);
    config.disk = DiskConfig{{*disk}, {}};
    engine_.emplace(Engine::open(config));
  }

  SessionOptions options(const std::string& policy) {
    return tightly(*engine_, options_for(*engine_, policy, 2), true);
  }
  // Saves a session under this policy, and returns what follows it.
  std::vector<std::vector<float>> save_long(const SessionOptions& options) {
    Session session = engine_->new_session(options);
    session.prefill(tokens_);
    session.save(directory());
    return go_on(session, more_);
  }
  // Bytes that this process has read from files so far, but for those that io_uring read.
  static std::optional<std::uint64_t> bytes_read() {
    std::ifstream io("/proc/self/io");
    std::string name;
    std::uint64_t bytes = 0;
    while (io >> name >> bytes) {
      if (name == "rchar:") return bytes;
    }
    return std::nullopt;
  }

  std::optional<Engine> engine_;
  const std::vector<TokenId> tokens_ = random_tokens(kLong, 2);
  const std::vector<TokenId> more_ = random_tokens(kMore, 3);
};

// The first token comes before all bytes are read. Of so few tokens the newest pages, which are
// read when loading, are a large part.
TEST_F(AttachedSessions, ReadWhatTheFirstTokenWants) {
  // Streaming has no index; that of Quest is a sixteenth of the rows, that of INT4 an eighth.
  for (const auto& [policy, most] : {std::pair("select=streaming sinks=4 recent=64", 0.15),
                                     {"select=quest prune=top_k(4)", 0.20},
                                     {"select=int4 prune=top_k(4)", 0.30}}) {
    SCOPED_TRACE(policy);
    const SessionOptions options = this->options(policy);
    const auto expected = save_long(options);
    const auto before = bytes_read();
    if (!before) GTEST_SKIP() << "no /proc/self/io";
    const double all = static_cast<double>(fs::file_size(rows()));
    std::optional<Session> loaded(engine_->load_session(directory(), options));
    loaded->decode(more_[0]);
    const double share = static_cast<double>(*bytes_read() - *before) / all;
    std::printf("%s: %.1f %% of the bytes before the first token\n", policy, 100 * share);
    EXPECT_LT(share, most);
    EXPECT_EQ(loaded->ledger().tokens(Phase::prefill), 0u);
    loaded.reset();
    Session again = engine_->load_session(directory(), options);
    EXPECT_EQ(go_on(again, more_), expected);
  }
}

TEST_F(AttachedSessions, BytesThatChangedEndTheSessionThatWantsThem) {
  for (const std::string policy : {"dense", "select=int4 prune=top_k(400)"}) {
    SCOPED_TRACE(policy);
    const SessionOptions options = this->options(policy);
    const auto expected = save_long(options);
    const std::string good = text_of(rows());
    std::optional<Session> ended(engine_->load_session(directory(), options));
    Session& loaded = *ended;
    // In every sector of the middle of the file, whatever is wanted of it.
    std::string bad = good;
    for (std::size_t at = good.size() / 4; at < good.size() * 3 / 4; at += 1000) bad[at] ^= 1;
    put(rows(), bad);
    expect_error(ErrorCode::corrupt, "does not have the bytes", [&] { go_on(loaded, more_); });
    EXPECT_THROW(loaded.decode(1), Error);
    EXPECT_THROW(loaded.fork(), Error);
    loaded.recompute();
    loaded.truncate(kLong);
    EXPECT_EQ(go_on(loaded, more_), expected);
    ended.reset();
    put(rows(), good);
    Session again = engine_->load_session(directory(), options);
    EXPECT_EQ(go_on(again, more_), expected);
  }
}

TEST_F(AttachedSessions, AFileThatIsTruncatedEndsTheSessionThatWantsItsRows) {
  for (const std::string policy : {"dense", "select=int4 prune=top_k(400)"}) {
    SCOPED_TRACE(policy);
    const SessionOptions options = this->options(policy);
    const auto expected = save_long(options);
    const std::string good = text_of(rows());
    std::optional<Session> ended(engine_->load_session(directory(), options));
    Session& loaded = *ended;
    fs::resize_file(rows(), good.size() / 3 + 1000);
    expect_error(ErrorCode::io, "", [&] { go_on(loaded, more_); });
    EXPECT_THROW(loaded.decode(1), Error);
    Session fresh = engine_->new_session(options);
    fresh.prefill(tokens_);
    EXPECT_EQ(go_on(fresh, more_), expected);
    loaded.recompute();
    loaded.truncate(kLong);
    EXPECT_EQ(go_on(loaded, more_), expected);
    ended.reset();
    put(rows(), good);
    Session again = engine_->load_session(directory(), options);
    EXPECT_EQ(go_on(again, more_), expected);
  }
}

// The file is kept open, so that the directory may get another session meanwhile.
TEST_F(AttachedSessions, CanBeSavedWhereTheyCameFrom) {
  const SessionOptions options = this->options("values");
  const auto expected = save_long(options);
  {
    Session loaded = engine_->load_session(directory(), options);
    loaded.save(directory());
    EXPECT_EQ(rows_files(directory()).size(), 1u);
    EXPECT_EQ(go_on(loaded, more_), expected);
  }
  Session again = engine_->load_session(directory(), options);
  EXPECT_EQ(go_on(again, more_), expected);
}

// Cut within a page that was never read, and forked.
TEST_F(AttachedSessions, AreCutAndForked) {
  const auto cut = [&](Session& session) {
    std::vector<std::vector<std::vector<float>>> logits;
    for (const std::int64_t length : {3000, 2944, 500}) {
      session.truncate(length);
      logits.push_back(go_on(session, more_));
    }
    return logits;
  };
  for (const auto& [policy, more_memory] : {std::pair("dense", 0),
                                            {"dense", 4 << 20},
                                            {"values", 0},
                                            {"values", 8 << 20},
                                            {"select=quest prune=top_k(20)", 0}}) {
    SCOPED_TRACE(policy);
    SCOPED_TRACE(more_memory);
    SessionOptions options = this->options(policy);
    *options.host_memory += static_cast<std::uint64_t>(more_memory);
    const auto expected = save_long(options);
    std::vector<std::vector<std::vector<float>>> expected_cuts;
    {
      Session plain = engine_->new_session(options);
      EXPECT_GE(plain.plan().host_blocks, more_memory > 0 ? 1 : 0);
      EXPECT_LT(plain.plan().host_blocks, 2 * kLong / kPageTokens);
      plain.prefill(tokens_);
      expected_cuts = cut(plain);
    }
    Session loaded = engine_->load_session(directory(), options);
    Session fork = loaded.fork();
    EXPECT_EQ(cut(loaded), expected_cuts);
    EXPECT_EQ(go_on(fork, more_), expected);
  }
}

// All rows are read where the file has no index of this kind.
TEST_F(AttachedSessions, AreReadWholeUnderAnotherPolicy) {
  save_long(options("select=quest prune=top_k(20)"));
  const SessionOptions options = this->options("select=int4 prune=top_k(20)");
  const auto flat = [&](Session session) {
    std::vector<float> all;
    for (const auto& logits : go_on(session, more_)) {
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  };
  const std::vector<float> actual = flat(engine_->load_session(directory(), options));
  Session plain = engine_->new_session(options);
  plain.prefill(tokens_);
  EXPECT_LT(testing::largest_difference(actual, flat(std::move(plain))), 0.1);
}

}  // namespace
}  // namespace sluice
