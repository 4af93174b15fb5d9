// Sessions that cannot be saved or loaded, or are damaged: each is refused with its reason, what
// was saved before stays, and what loads is whole.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/saved_session.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/small_disk.h"
#include "tests/support/small_sessions.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::config_of;
using testing::contents;
using testing::expect_error;
using testing::go_on;
using ::testing::HasSubstr;
using testing::kSaved;
using testing::number_from;
using testing::options_for;
using testing::put;
using testing::Random;
using testing::random_tokens;
using testing::RandomCheckpoint;
using testing::rows_files;
using testing::SavedSessions;
using testing::TempDir;
using testing::text_of;

namespace fs = std::filesystem;

std::size_t below(Random& random, std::size_t end) {
  return static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(end) - 1));
}

void replace_in(const fs::path& path, const std::string& from, const std::string& to) {
  std::string text = text_of(path);
  const std::size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from << " in " << text;
  text.replace(at, from.size(), to);
  put(path, text);
}

// A session that is refused stays as it was saved.
void expect_refused(Engine& engine, const fs::path& directory, ErrorCode code,
                    const std::string& text) {
  const auto before = contents(directory);
  expect_error(code, text, [&] { engine.load_session(directory, options_for(engine, "dense")); });
  EXPECT_EQ(contents(directory), before);
}

TEST_F(SavedSessions, RefuseOtherModelsRowsAndVersions) {
  Engine engine = Engine::open(config_of(model_));
  save(engine);
  const RandomCheckpoint other_model(2);
  Engine other = Engine::open(config_of(other_model));
  expect_refused(other, directory(), ErrorCode::usage, "of another model");
  Session session = other.new_session(options_for(other, "dense"));
  session.prefill(random_tokens(5, 1));
  const auto before = contents(directory());
  expect_error(ErrorCode::usage, "of another model", [&] { session.save(directory()); });
  EXPECT_EQ(contents(directory()), before);
  EngineConfig config = config_of(model_);
  config.kv_dtype = DType::f16;
  Engine f16 = Engine::open(config);
  expect_refused(f16, directory(), ErrorCode::usage, "set `kv_dtype`");
  replace_in(manifest(), "\"version\": 1", "\"version\": 2");
  expect_refused(engine, directory(), ErrorCode::unsupported, "format version 2");
}

TEST_F(SavedSessions, RefuseManifestsThatWereEdited) {
  Engine engine = Engine::open(config_of(model_));
  save(engine);
  const std::string good = text_of(manifest());
  const std::string name = rows().filename().string();
  const std::string size = std::to_string(fs::file_size(rows()));
  const auto with = [&](const std::string& from, const std::string& to, const std::string& what,
                        ErrorCode code = ErrorCode::corrupt) {
    put(manifest(), good);
    replace_in(manifest(), from, to);
    SCOPED_TRACE(from + " -> " + to);
    expect_refused(engine, directory(), code, what);
  };
  with("\"tokens\": 700", "\"tokens\": 699", "lacks a section");
  with("\"tokens\": 700", "\"tokens\": 0", "no room");
  with("\"tokens\": 700", "\"tokens\": -1", "tokens is ");
  with("\"tokens\": 700", "\"tokens\": 1e30", "tokens is ");
  with("\"tokens\": 700", "\"tokens\": 4611686018427387904", "no room");
  with("\"tokens\": 700", "\"tokens\": 99999999999999999999999", "tokens is ");
  with("\"tokens\": 700", "\"tokens\": \"700\"", "tokens is ");
  with("\"tokens\": 700,", "", "tokens is missing");
  with("\"tokens\": 700", "\"tokens\": 700, \"tokens\": 1", "twice");
  with("\"layers\": 3", "\"layers\": 2147483647", "3 layers");
  with("\"head_dim\": 32", "\"head_dim\": 31", "head_dim 31");
  with("\"row_bytes\": 128", "\"row_bytes\": 64", "rows of 64 bytes", ErrorCode::unsupported);
  with("\"bytes\": " + size, "\"bytes\": 1", "its manifest says 1");
  with(name, "../../etc/passwd", "none of its names");
  with(name, "..", "none of its names");
  with(name, "/etc/passwd", "none of its names");
  with(name, "manifest.json", "none of its names");
  with(name, "rows-0000000000000000.bin", "no such file", ErrorCode::not_found);
  with("\"sums\": \"", "\"sums\": \"0", "not the one that its manifest names");
  with("sluice session", "another thing", "is not the manifest");
  with("{", "[", "is not JSON");
  put(manifest(), "");
  expect_refused(engine, directory(), ErrorCode::corrupt, "is not JSON");
  put(manifest(), std::string(70 << 10, ' '));
  expect_refused(engine, directory(), ErrorCode::corrupt, "cannot be the manifest");
  put(manifest(), std::string(60 << 10, '['));
  expect_refused(engine, directory(), ErrorCode::corrupt, "nested deeper");
  // None of them may be saved over either, because nobody knows what it is.
  Session session = engine.new_session(options_for(engine, "dense"));
  session.prefill(random_tokens(5, 1));
  expect_error(ErrorCode::corrupt, "nested deeper", [&] { session.save(directory()); });
  put(manifest(), good);
  engine.load_session(directory(), options_for(engine, "dense"));
}

TEST_F(SavedSessions, RefuseRowsThatWereTruncatedSwappedOrEdited) {
  Engine engine = Engine::open(config_of(model_));
  save(engine);
  const fs::path path = rows();
  const std::string good = text_of(path);
  const auto refused = [&](const std::string& bytes, ErrorCode code, const std::string& what) {
    put(path, bytes);
    expect_refused(engine, directory(), code, what);
  };
  refused("", ErrorCode::corrupt, "has 0 bytes");
  refused(good.substr(0, good.size() - 1), ErrorCode::corrupt, "its manifest says");
  refused(good + "x", ErrorCode::corrupt, "its manifest says");
  const KvShape shape = engine.info().kv;
  const SavedLayout layout(shape, kSaved, 0);
  std::string bytes = good;
  bytes[static_cast<std::size_t>(layout.sections()[2].offset + 100)] ^= 1;
  refused(bytes, ErrorCode::corrupt, "rows of layer 0 from token 0 on are damaged");
  // Two pieces of equal size that changed places.
  bytes = good;
  const std::size_t piece = layout.piece_bytes(0);
  const std::size_t from = static_cast<std::size_t>(layout.sections()[2].offset);
  std::swap_ranges(bytes.begin() + static_cast<std::ptrdiff_t>(from),
                   bytes.begin() + static_cast<std::ptrdiff_t>(from + piece),
                   bytes.begin() + static_cast<std::ptrdiff_t>(from + piece));
  refused(bytes, ErrorCode::corrupt, "damaged");
  bytes = good;
  bytes[static_cast<std::size_t>(layout.sections()[0].offset)] ^= 1;
  refused(bytes, ErrorCode::corrupt, "damaged tokens");
  // Another save's rows file under this one's name.
  TempDir temp;
  {
    Session session = engine.new_session(options_for(engine, "dense"));
    session.prefill(random_tokens(kSaved, 9));
    session.save(temp.path() / "other");
  }
  refused(text_of(rows_files(temp.path() / "other").at(0)), ErrorCode::corrupt,
          "not the one that its manifest names");
  put(path, good);
  engine.load_session(directory(), options_for(engine, "dense"));
}

TEST_F(SavedSessions, RefuseLinksInPlaceOfFiles) {
  Engine engine = Engine::open(config_of(model_));
  save(engine);
  const fs::path path = rows();
  fs::rename(path, temp_.path() / "elsewhere");
  fs::create_symlink(temp_.path() / "elsewhere", path);
  expect_error(ErrorCode::corrupt, "is a link",
               [&] { engine.load_session(directory(), options_for(engine, "dense")); });
  fs::remove(path);
  fs::create_directory(path);
  expect_error(ErrorCode::not_found, "not a regular file",
               [&] { engine.load_session(directory(), options_for(engine, "dense")); });
  fs::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  expect_error(ErrorCode::not_found, "not a regular file",
               [&] { engine.load_session(directory(), options_for(engine, "dense")); });
  fs::remove(path);
  fs::rename(temp_.path() / "elsewhere", path);
  fs::rename(manifest(), temp_.path() / "elsewhere");
  fs::create_symlink(temp_.path() / "elsewhere", manifest());
  expect_error(ErrorCode::corrupt, "is a link",
               [&] { engine.load_session(directory(), options_for(engine, "dense")); });
  Session session = engine.new_session(options_for(engine, "dense"));
  session.prefill(random_tokens(5, 1));
  expect_error(ErrorCode::corrupt, "is a link", [&] { session.save(directory()); });
  EXPECT_TRUE(fs::is_symlink(manifest()));
}

TEST_F(SavedSessions, RefuseDirectoriesThatAreNone) {
  Engine engine = Engine::open(config_of(model_));
  const SessionOptions options = options_for(engine, "dense");
  const auto load = [&](const fs::path& path) { engine.load_session(path, options); };
  Session session = engine.new_session(options);
  expect_error(ErrorCode::usage, "no tokens yet", [&] { session.save(directory()); });
  session.prefill(random_tokens(5, 1));
  const fs::path file = temp_.write("file", "text");
  expect_error(ErrorCode::not_found, "cannot be opened", [&] { load(temp_.path() / "none"); });
  expect_error(ErrorCode::not_found, "cannot be opened", [&] { load(file); });
  expect_error(ErrorCode::not_found, "no saved session", [&] { load(temp_.path()); });
  expect_error(ErrorCode::usage, "'file'", [&] { session.save(temp_.path()); });
  expect_error(ErrorCode::not_found, "cannot be opened", [&] { session.save(file); });
  expect_error(ErrorCode::io, "cannot be written",
               [&] { session.save(temp_.path() / "none" / "session"); });
  expect_error(ErrorCode::usage, "may have 64",
               [&] { session.save(directory(), std::string((64 << 20) + 1, 'x')); });
  EXPECT_EQ(text_of(file), "text");
  session.save(directory().string() + "/");
  load(directory());
  SessionOptions small = options;
  small.context = 4;
  expect_error(ErrorCode::prompt, "has 5 tokens", [&] { engine.load_session(directory(), small); });
  if (::geteuid() == 0) return;
  fs::permissions(directory(), fs::perms::owner_read | fs::perms::owner_exec);
  expect_error(ErrorCode::io, "cannot be written", [&] { session.save(directory()); });
  expect_error(ErrorCode::io, "cannot be written", [&] { engine.require_savable(directory(), 5); });
  load(directory());
  fs::permissions(directory(), fs::perms::owner_all);
}

TEST_F(SavedSessions, RefuseRowsOfAnotherFormatByName) {
  EngineConfig config = config_of(model_);
  Engine bf16 = Engine::open(config);
  config.kv_dtype = RowCode::int8;
  Engine int8 = Engine::open(config);
  save(bf16);
  const std::string differs = "rows of 'bf16', and this engine keeps int8; set `kv_dtype`";
  expect_refused(int8, directory(), ErrorCode::usage, differs);
  expect_error(ErrorCode::usage, differs, [&] { int8.saved_session(directory()); });
  save(int8);
  expect_refused(bf16, directory(), ErrorCode::usage, "rows of 'int8', and this engine keeps bf16");
  EXPECT_EQ(int8.load_session(directory(), options_for(int8, "dense")).length(), kSaved);
  config.kv_dtype = RowCode::k8v4;
  Engine k8v4 = Engine::open(config);
  expect_refused(k8v4, directory(), ErrorCode::usage, "rows of 'int8', and this engine keeps k8v4");
  save(k8v4);
  expect_refused(int8, directory(), ErrorCode::usage, "rows of 'k8v4', and this engine keeps int8");
}

TEST_F(SavedSessions, RefuseEvictedTokensByName) {
  Engine engine = Engine::open(config_of(model_));
  Session session = engine.new_session(options_for(engine, "dense prefill=zipvl(0.5,evict)"));
  session.prefill(random_tokens(300, 1));
  expect_error(ErrorCode::usage, "evict", [&] { session.save(directory()); });
  EXPECT_FALSE(fs::exists(manifest()));
}

TEST_F(SavedSessions, KeepTheOldOneWhenSavingFails) {
  Engine engine = Engine::open(config_of(model_));
  save(engine, "old");
  Session session = engine.new_session(options_for(engine, "dense"));
  session.prefill(random_tokens(kSaved, 7));
  const auto before = contents(directory());
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small = {100000, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error(ErrorCode::io, "RLIMIT_FSIZE", [&] { session.save(directory(), "new"); });
  expect_error(ErrorCode::io, "RLIMIT_FSIZE", [&] { engine.require_savable(directory(), kSaved); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_EQ(contents(directory()), before);
  expect_error(ErrorCode::io, "left; make room",
               [&] { engine.require_savable(directory(), std::int64_t{1} << 42); });
  EXPECT_EQ(engine.saved_session(directory()).note, "old");
  session.save(directory(), "new");
  EXPECT_EQ(engine.saved_session(directory()).note, "new");
}

// A disk that is full in its blocks, and one that is full in its inodes.
TEST_F(SavedSessions, KeepTheOldOneOnAFullDisk) {
  const auto parent = testing::disk_directory();
  if (!parent) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
  const testing::SmallDisk disk(*parent);
  if (!disk.mounted()) GTEST_SKIP() << "no loop device can be mounted here";
  Engine engine = Engine::open(config_of(model_));
  Session session = engine.new_session(options_for(engine, "dense"));
  session.prefill(random_tokens(kSaved, 1));
  const fs::path saved = disk.path() / "session";
  session.save(saved, "old");
  const std::uint64_t bytes = fs::file_size(rows_files(saved).at(0));
  const auto refused = [&] {
    const auto before = contents(saved);
    const auto free = fs::space(saved).available;
    expect_error(ErrorCode::io, saved.string(), [&] { session.save(saved, "new"); });
    EXPECT_EQ(contents(saved), before);
    EXPECT_EQ(fs::space(saved).available, free);
  };
  // From less than the rows take, one block at a time to what the rows, the manifest and the file
  // system's own blocks take.
  constexpr std::uint64_t kBlock = 4096;
  const fs::path filler = disk.path() / "filler";
  int refusals = 0;
  for (std::uint64_t free = bytes / kBlock * kBlock;; free += kBlock) {
    ASSERT_LT(free, 2 * bytes) << "never saved";
    fs::remove(filler);
    const std::uint64_t taken = fs::space(saved).available - free;
    const int file = ::open(filler.c_str(), O_WRONLY | O_CREAT, 0600);
    ASSERT_EQ(::fallocate(file, 0, 0, static_cast<off_t>(taken)), 0);
    ::close(file);
    try {
      session.save(saved, "new");
      break;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
      EXPECT_EQ(engine.saved_session(saved).note, "old");
      EXPECT_EQ(contents(saved).size(), 2u);
      ++refusals;
    }
  }
  EXPECT_GT(refusals, 0);
  EXPECT_EQ(engine.saved_session(saved).note, "new");
  fs::remove(filler);
  std::vector<fs::path> files;
  while (true) {
    files.push_back(disk.path() / std::to_string(files.size()));
    const int file = ::open(files.back().c_str(), O_WRONLY | O_CREAT, 0600);
    if (file < 0) break;
    ::close(file);
  }
  ASSERT_EQ(errno, ENOSPC);
  refused();
  for (const fs::path& file : files) fs::remove(file);
  session.save(saved, "newest");
  EXPECT_EQ(engine.load_session(saved, options_for(engine, "dense")).length(), kSaved);
}

// Whatever the moment, what loads is whole.
TEST_F(SavedSessions, TruncatedWhileTheyAreLoaded) {
  const std::uint64_t seed = testing::seed(std::random_device()());
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  Engine engine = Engine::open(config_of(model_));
  save(engine);
  const SessionOptions options = options_for(engine, "dense");
  const std::vector<TokenId> more = random_tokens(4, 3);
  std::vector<std::vector<float>> expected;
  {
    Session session = engine.load_session(directory(), options);
    expected = go_on(session, more);
  }
  const std::string good = text_of(rows());
  int refused = 0;
  for (int round = 0; round < 40; ++round) {
    std::jthread cuts([&, wait = random.integer(0, 2000), size = below(random, good.size())] {
      ::usleep(static_cast<useconds_t>(wait));
      fs::resize_file(rows(), size);
    });
    try {
      Session session = engine.load_session(directory(), options);
      EXPECT_EQ(go_on(session, more), expected);
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::corrupt || error.code() == ErrorCode::io)
          << error.what();
      ++refused;
    }
    cuts.join();
    put(rows(), good);
  }
  EXPECT_GT(refused, 0);
  Session session = engine.load_session(directory(), options);
  EXPECT_EQ(go_on(session, more), expected);
}

// Random damage to the manifest and the rows file.
TEST_F(SavedSessions, NeverCrashNorLieWhenBytesFlip) {
  const std::int64_t rounds = number_from("SLUICE_FLIPS", 300);
  const std::uint64_t seed = testing::seed(std::random_device()());
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  Engine engine = Engine::open(config_of(model_));
  const SessionOptions options = options_for(engine, "dense");
  std::vector<std::vector<float>> expected;
  const std::vector<TokenId> more = random_tokens(4, 3);
  {
    Session session = engine.new_session(options);
    session.prefill(random_tokens(300, 1));
    session.save(directory(), "the note of this session");
    expected = go_on(session, more);
  }
  const fs::path rows_path = rows();
  const std::string good_manifest = text_of(manifest());
  const std::string good_rows = text_of(rows_path);
  // Of the rows file mostly its beginning and its end, which have structure.
  const std::size_t head = 1600;
  int harmless = 0;
  for (std::int64_t round = 0; round < rounds; ++round) {
    std::string manifest_bytes = good_manifest;
    std::string rows_bytes = good_rows;
    const std::size_t flips = 1 + below(random, 3);
    for (std::size_t i = 0; i < flips; ++i) {
      const std::size_t kind = below(random, 4);
      std::string& bytes = kind == 0 ? manifest_bytes : rows_bytes;
      const std::size_t at = kind == 1   ? below(random, head)
                             : kind == 2 ? bytes.size() - 1 - below(random, 200)
                                         : below(random, bytes.size());
      bytes[at] = static_cast<char>(bytes[at] ^ static_cast<char>(1u << below(random, 8)));
    }
    put(manifest(), manifest_bytes);
    put(rows_path, rows_bytes);
    try {
      Session loaded = engine.load_session(directory(), options);
      EXPECT_EQ(go_on(loaded, more), expected) << "round " << round;
      ++harmless;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
      EXPECT_NE(error.code(), ErrorCode::internal) << error.what();
    }
  }
  std::printf("%lld rounds, %d without effect\n", static_cast<long long>(rounds), harmless);
  put(manifest(), good_manifest);
  put(rows_path, good_rows);
  Session loaded = engine.load_session(directory(), options);
  EXPECT_EQ(go_on(loaded, more), expected);
}

}  // namespace
}  // namespace sluice
