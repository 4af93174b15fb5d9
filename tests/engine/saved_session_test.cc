// Sessions that are saved and loaded go on as if they had not been.
#include "engine/saved_session.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine_impl.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/far_backend.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"
#include "tests/support/small_disk.h"
#include "tests/support/small_sessions.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::config_of;
using testing::copy_of;
using testing::expect_error;
using testing::go_on;
using ::testing::HasSubstr;
using testing::options_for;
using testing::Random;
using testing::random_tokens;
using testing::RandomCheckpoint;
using testing::TempDir;
using testing::tightly;

namespace fs = std::filesystem;

constexpr std::int64_t kContext = testing::kSmallContext;
constexpr int kSaved = 700;  // tokens: five pages and a part
constexpr int kMore = 40;

std::size_t below(Random& random, std::size_t end) {
  return static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(end) - 1));
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void put(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
}

std::vector<fs::path> rows_files(const fs::path& directory) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename().string().starts_with("rows-")) files.push_back(entry.path());
  }
  return files;
}

std::map<std::string, std::string> contents(const fs::path& directory) {
  std::map<std::string, std::string> all;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    all[entry.path().filename().string()] = text_of(entry.path());
  }
  return all;
}

void replace_in(const fs::path& path, const std::string& from, const std::string& to) {
  std::string text = text_of(path);
  const std::size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from << " in " << text;
  text.replace(at, from.size(), to);
  put(path, text);
}

// Of the environment.
std::int64_t number_from(const char* name, std::int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : otherwise;
}

class SavedSessions : public ::testing::Test {
 protected:
  fs::path directory() const { return temp_.path() / "session"; }
  fs::path manifest() const { return directory() / "manifest.json"; }
  fs::path rows() const { return rows_files(directory()).at(0); }

  // Saves a session of kSaved tokens.
  void save(Engine& engine, const std::string& note = {}, std::uint64_t seed = 1) const {
    Session session = engine.new_session(options_for(engine, "dense"));
    session.prefill(random_tokens(kSaved, seed));
    session.save(directory(), note);
  }

  void expect_refused(Engine& engine, ErrorCode code, const std::string& text) const {
    const auto before = contents(directory());
    expect_error(code, text,
                 [&] { engine.load_session(directory(), options_for(engine, "dense")); });
    EXPECT_EQ(contents(directory()), before);
  }

  TempDir temp_;
  RandomCheckpoint model_{1};
};

struct Setting {
  std::string policy;
  bool capped = false;
  bool on_disk = false;
  RowFormat rows = DType::bf16;
  bool far = false;  // activations in memory of the device's own, as on a GPU
};

void PrintTo(const Setting& s, std::ostream* out) {
  *out << s.policy << (s.capped ? ", capped" : "") << (s.on_disk ? ", on disk" : "") << ", "
       << to_string(s.rows) << (s.far ? ", on a far device" : "");
}

class SavedSessionsUnder : public SavedSessions, public ::testing::WithParamInterface<Setting> {
 protected:
  std::optional<Engine> open() const {
    EngineConfig config = config_of(model_);
    config.kv_dtype = GetParam().rows;
    if (GetParam().on_disk) {
      const auto disk = testing::disk_directory();
      if (!disk) return std::nullopt;
      config.disk = DiskConfig{{*disk}, {}};
    }
    if (!GetParam().far) return Engine::open(config);
    config.host_attention = 0.0;
    return Engine::Impl::open(config, [](DType weights) {
      const cpu::CpuOptions options = {1, DType::f32, weights, MemoryAccount::kNoCap,
                                       MemoryAccount::kNoCap};
      return std::make_unique<testing::FarBackend>(options);
    });
  }
};

TEST_P(SavedSessionsUnder, GoOnAsIfTheyHadNeverEnded) {
  std::optional<Engine> engine = open();
  if (!engine) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
  const bool forks = GetParam().policy.find("zipvl") == std::string::npos;
  SessionOptions options = options_for(*engine, GetParam().policy, forks ? 2 : 1);
  if (GetParam().capped) options = tightly(*engine, options, GetParam().on_disk);
  const std::vector<TokenId> tokens = random_tokens(kSaved, 2);
  const std::vector<TokenId> more = random_tokens(kMore, 3);
  std::vector<std::vector<float>> expected;
  {
    Session session = engine->new_session(options);
    ASSERT_EQ(session.plan().on_disk, GetParam().on_disk);
    if (GetParam().capped) {
      ASSERT_LT(session.plan().resident_tokens, kSaved);
    }
    session.prefill(std::span(tokens).first(kSaved - 30));
    session.decode_known(std::span(tokens).last(30), {});
    session.save(directory(), "a note");
    expected = go_on(session, more);
  }
  const SavedSession saved = engine->saved_session(directory());
  EXPECT_EQ(saved.tokens, tokens);
  EXPECT_EQ(saved.note, "a note");

  Session loaded = engine->load_session(directory(), options);
  EXPECT_EQ(loaded.length(), kSaved);
  EXPECT_TRUE(std::ranges::equal(loaded.tokens(), tokens));
  // No token was computed and no row attended, scored or estimated. Resident pages come from disk.
  const Ledger& ledger = loaded.ledger();
  for (const Phase phase : {Phase::prefill, Phase::decode, Phase::correction}) {
    EXPECT_EQ(ledger.tokens(phase), 0u);
    for (const Tier from : {Tier::device, Tier::host, Tier::disk}) {
      for (const Tier to : {Tier::device, Tier::host, Tier::disk}) {
        for (const Cause cause : {Cause::hit, Cause::miss, Cause::index_read, Cause::value_read}) {
          const bool is_resident = GetParam().on_disk && cause == Cause::miss && from != to;
          if (is_resident) continue;
          EXPECT_EQ(ledger.total(phase, from, to, cause), Traffic()) << to_string(cause);
        }
      }
    }
  }
  std::optional<Session> fork;
  if (forks) fork = loaded.fork();
  EXPECT_EQ(go_on(loaded, more), expected);
  if (fork) {
    EXPECT_EQ(go_on(*fork, more), expected) << "a fork of a loaded session";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Settings, SavedSessionsUnder,
    ::testing::Values(Setting{"dense"}, Setting{"values"}, Setting{"sparq"},
                      Setting{"tidaldecode dense=0 anchors=1 correct=16"}, Setting{"quest"},
                      Setting{"dense prefill=pages(0.5)"}, Setting{"dense prefill=zipvl(0.9)"},
                      Setting{"dense", true}, Setting{"values", true}, Setting{"sparq", true},
                      Setting{"dense", true, true}, Setting{"values", true, true},
                      Setting{"sparq", true, true}, Setting{"values", false, false, DType::f32},
                      Setting{"compact"}, Setting{"compact", true, true},
                      Setting{"compact", true, true, DType::bf16, true},
                      Setting{"dense", false, false, DType::f16},
                      Setting{"dense", true, false, DType::bf16, true},
                      Setting{"values", true, false, DType::f32, true},
                      Setting{"sparq", true, true, DType::bf16, true},
                      Setting{"dense", false, false, RowCode::int8},
                      Setting{"values", true, false, RowCode::int8},
                      Setting{"sparq", true, true, RowCode::int8},
                      Setting{"values", true, false, RowCode::int8, true},
                      Setting{"values", true, true, RowCode::k8v4},
                      Setting{"dense", true, false, RowCode::k8v4, true}));

class SavedSessionsOn : public SavedSessions,
                        public ::testing::WithParamInterface<
                            std::tuple<std::string, std::pair<std::string, RowFormat>>> {};

TEST_P(SavedSessionsOn, EveryDeviceGoOn) {
  const auto& [device, kind] = GetParam();
  const auto& [policy, rows] = kind;
  if (testing::skips(device)) return;
  EngineConfig config = testing::config_for(device);
  config.kv_dtype = rows;
  Engine engine = Engine::open(config);
  const std::vector<TokenId> book = testing::book_tokens(engine, 1500);
  SessionOptions options = options_for(engine, policy);
  options.context = 2000;
  Session session = engine.new_session(options);
  session.prefill(std::span(book).first(1400));
  session.save(directory());
  Session loaded = engine.load_session(directory(), options);
  // A GPU may sum in another order where other rows are resident.
  const double tolerance = device == "cpu" ? 0.0 : 0.3;
  for (const TokenId token : std::span(book).subspan(1400, 20)) {
    const std::vector<float> expected = copy_of(session.decode(token));
    EXPECT_LE(testing::largest_difference(copy_of(loaded.decode(token)), expected), tolerance);
  }
}

std::string name_of_device(const ::testing::TestParamInfo<SavedSessionsOn::ParamType>& info) {
  const auto& [device, kind] = info.param;
  return device + "_" + kind.first + "_" + to_string(kind.second);
}

INSTANTIATE_TEST_SUITE_P(Devices, SavedSessionsOn,
                         ::testing::Combine(::testing::ValuesIn(testing::devices()),
                                            ::testing::Values(std::pair("dense", DType::bf16),
                                                              std::pair("values", DType::bf16),
                                                              std::pair("compact", DType::bf16),
                                                              std::pair("values", RowCode::int8),
                                                              std::pair("values", RowCode::k8v4))),
                         name_of_device);

TEST_F(SavedSessions, LoadUnderAnotherPolicyAndCap) {
  EngineConfig config = config_of(model_);
  Engine engine = Engine::open(config);
  save(engine);
  config.chunk = 48;  // pages are loaded in parts
  Engine other = Engine::open(config);
  const std::vector<TokenId> more = random_tokens(kMore, 3);
  for (const std::string policy : {"values", "dense"}) {
    const SessionOptions options = tightly(other, options_for(other, policy), false);
    Session fresh = other.new_session(options);
    fresh.prefill(random_tokens(kSaved, 1));
    Session loaded = other.load_session(directory(), options);
    std::vector<float> all, expected;
    for (const auto& logits : go_on(loaded, more))
      all.insert(all.end(), logits.begin(), logits.end());
    for (const auto& logits : go_on(fresh, more)) {
      expected.insert(expected.end(), logits.begin(), logits.end());
    }
    // Chunks of another length round rows differently.
    EXPECT_LT(testing::largest_difference(all, expected), 0.1) << policy;
  }
}

// Several of them, and one a second time.
TEST_F(SavedSessions, LoadIntoOneMemory) {
  Engine engine = Engine::open(config_of(model_));
  SessionOptions options = options_for(engine, "values", 5);
  options.loads = true;
  const std::vector<TokenId> more = random_tokens(kMore, 3);
  std::vector<std::vector<std::vector<float>>> expected;
  for (const std::uint64_t seed : {1, 2}) {
    Session session = engine.new_session(options);
    session.prefill(random_tokens(kSaved, seed));
    session.save(temp_.path() / std::to_string(seed));
    expected.push_back(go_on(session, more));
  }
  EngineConfig config = config_of(model_);
  config.host_memory = engine.plan(options).host_bytes();
  Engine capped = Engine::open(config);
  Session root = capped.new_session(options);
  std::vector<Session> sessions;
  for (const std::uint64_t seed : {2, 1, 2}) {
    sessions.push_back(root.sibling());
    sessions.back().load(temp_.path() / std::to_string(seed));
    EXPECT_EQ(sessions.back().length(), kSaved);
    EXPECT_EQ(go_on(sessions.back(), more), expected[seed - 1]);
  }
  EXPECT_LE(capped.memory().host_peak, *config.host_memory);
  expect_error(ErrorCode::usage, "a session with tokens",
               [&] { sessions.front().load(temp_.path() / "1"); });
  EXPECT_EQ(sessions.front().length(), kSaved + kMore);
  Session last = root.sibling();
  expect_error(ErrorCode::not_found, "check the path", [&] { last.load(temp_.path() / "3"); });
  options.context = kSaved - 1;
  Session small = engine.new_session(options);
  expect_error(ErrorCode::prompt, "raise `context`", [&] { small.load(temp_.path() / "1"); });
}

TEST_F(SavedSessions, LogitsAfterTheLastTokenComeFromDecodingItAgain) {
  Engine engine = Engine::open(config_of(model_));
  const std::vector<TokenId> tokens = random_tokens(kSaved, 1);
  Session session = engine.new_session(options_for(engine, "dense"));
  session.prefill(std::span(tokens).first(kSaved - 1));
  const std::vector<float> expected = copy_of(session.decode(tokens.back()));
  session.save(directory());
  Session loaded = engine.load_session(directory(), options_for(engine, "dense"));
  loaded.truncate(loaded.length() - 1);
  EXPECT_EQ(copy_of(loaded.decode(tokens.back())), expected);
}

// Sizes at which the last page is empty, whole or has one token.
TEST_F(SavedSessions, OfEveryLengthAroundAPage) {
  Engine engine = Engine::open(config_of(model_));
  const std::vector<TokenId> more = random_tokens(3, 3);
  for (const int length : {1, 127, 128, 129, 256}) {
    const SessionOptions options = options_for(engine, "values");
    Session session = engine.new_session(options);
    session.prefill(random_tokens(static_cast<std::size_t>(length), 5));
    session.save(directory());
    Session loaded = engine.load_session(directory(), options);
    EXPECT_EQ(go_on(loaded, more), go_on(session, more)) << length;
    EXPECT_EQ(rows_files(directory()).size(), 1u);
  }
}

// A session that was truncated and decoded in between has the rows of its newest tokens.
TEST_F(SavedSessions, KeepWhatTheyBecameLast) {
  Engine engine = Engine::open(config_of(model_));
  const SessionOptions options = options_for(engine, "values", 3);
  Session session = engine.new_session(options);
  session.prefill(random_tokens(400, 1));
  Session fork = session.fork();
  session.truncate(256);
  session.prefill(random_tokens(10, 8));
  fork.decode(7);
  fork.save(directory());
  const std::vector<TokenId> more = random_tokens(kMore, 3);
  Session loaded = engine.load_session(directory(), options);
  EXPECT_EQ(loaded.length(), 401);
  EXPECT_EQ(go_on(loaded, more), go_on(fork, more));
  session.save(directory());
  Session again = engine.load_session(directory(), options);
  EXPECT_EQ(again.length(), 266);
  EXPECT_EQ(go_on(again, more), go_on(session, more));
}

TEST_F(SavedSessions, FilesAreForThisUserAlone) {
  Engine engine = Engine::open(config_of(model_));
  const mode_t before = ::umask(0);
  save(engine);
  ::umask(before);
  for (const fs::path& path : {directory(), manifest(), rows()}) {
    EXPECT_EQ(fs::status(path).permissions() & (fs::perms::group_all | fs::perms::others_all),
              fs::perms::none)
        << path;
  }
}

TEST_F(SavedSessions, RefuseOtherModelsRowsAndVersions) {
  Engine engine = Engine::open(config_of(model_));
  save(engine);
  const RandomCheckpoint other_model(2);
  Engine other = Engine::open(config_of(other_model));
  expect_refused(other, ErrorCode::usage, "of another model");
  Session session = other.new_session(options_for(other, "dense"));
  session.prefill(random_tokens(5, 1));
  const auto before = contents(directory());
  expect_error(ErrorCode::usage, "of another model", [&] { session.save(directory()); });
  EXPECT_EQ(contents(directory()), before);
  EngineConfig config = config_of(model_);
  config.kv_dtype = DType::f16;
  Engine f16 = Engine::open(config);
  expect_refused(f16, ErrorCode::usage, "set `kv_dtype`");
  replace_in(manifest(), "\"version\": 1", "\"version\": 2");
  expect_refused(engine, ErrorCode::unsupported, "format version 2");
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
    expect_refused(engine, code, what);
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
  expect_refused(engine, ErrorCode::corrupt, "is not JSON");
  put(manifest(), std::string(70 << 10, ' '));
  expect_refused(engine, ErrorCode::corrupt, "cannot be the manifest");
  put(manifest(), std::string(60 << 10, '['));
  expect_refused(engine, ErrorCode::corrupt, "nested deeper");
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
    expect_refused(engine, code, what);
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
  expect_refused(int8, ErrorCode::usage, differs);
  expect_error(ErrorCode::usage, differs, [&] { int8.saved_session(directory()); });
  save(int8);
  expect_refused(bf16, ErrorCode::usage, "rows of 'int8', and this engine keeps bf16");
  EXPECT_EQ(int8.load_session(directory(), options_for(int8, "dense")).length(), kSaved);
  config.kv_dtype = RowCode::k8v4;
  Engine k8v4 = Engine::open(config);
  expect_refused(k8v4, ErrorCode::usage, "rows of 'int8', and this engine keeps k8v4");
  save(k8v4);
  expect_refused(int8, ErrorCode::usage, "rows of 'k8v4', and this engine keeps int8");
}

TEST_F(SavedSessions, RefuseEvictedTokensByName) {
  Engine engine = Engine::open(config_of(model_));
  Session session = engine.new_session(options_for(engine, "dense prefill=zipvl(0.5,evict)"));
  session.prefill(random_tokens(300, 1));
  expect_error(ErrorCode::usage, "evict", [&] { session.save(directory()); });
  EXPECT_FALSE(fs::exists(manifest()));
}

// The device's cap leaves nothing for the buffers that loading takes.
TEST_F(SavedSessions, LoadWithinTheCapOnHostMemoryOrNotAtAll) {
  EngineConfig config = config_of(model_);
  Engine engine = Engine::open(config);
  save(engine);
  const SessionOptions options = options_for(engine, "values");
  config.host_memory = engine.plan(options).host_bytes();
  Engine exact = Engine::open(config);
  exact.plan(options);
  expect_error(ErrorCode::memory, "host_memory", [&] { exact.load_session(directory(), options); });
  *config.host_memory += std::uint64_t{64} << 10;
  Engine roomy = Engine::open(config);
  Session loaded = roomy.load_session(directory(), options);
  EXPECT_LE(roomy.memory().host_peak, *config.host_memory);
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

TEST_F(SavedSessions, TellASecondProcess) {
  Engine engine = Engine::open(config_of(model_));
  save(engine);
  Session session = engine.new_session(options_for(engine, "dense"));
  session.prefill(random_tokens(5, 1));
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  // A process that saves has an exclusive lock, one that loads a shared one.
  for (const int how : {LOCK_EX, LOCK_SH}) {
    const pid_t child = ::fork();
    if (child == 0) {
      const int locked = ::open(directory().c_str(), O_RDONLY | O_DIRECTORY);
      const char ok = ::flock(locked, how) == 0 ? 'y' : 'n';
      const bool told = ::write(ready[1], &ok, 1) == 1;
      ::pause();
      ::_exit(told ? 0 : 1);
    }
    char ok = 'n';
    ASSERT_EQ(::read(ready[0], &ok, 1), 1);
    ASSERT_EQ(ok, 'y');
    expect_error(ErrorCode::io, "is in use", [&] { session.save(directory()); });
    if (how == LOCK_EX) {
      expect_error(ErrorCode::io, "is in use", [&] { engine.saved_session(directory()); });
    } else {
      engine.load_session(directory(), options_for(engine, "dense"));
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    engine.load_session(directory(), options_for(engine, "dense"));
  }
  ::close(ready[0]);
  ::close(ready[1]);
}

// What a child does when it is killed; of one letter.
constexpr const char* kPrompt = "p";
constexpr const char* kSave = "s";
constexpr const char* kDecode = "d";

// A file from which the parent reads what its child does. It is never empty for long.
class Progress {
 public:
  explicit Progress(const fs::path& path)
      : file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) {}
  void now(const char* what) const {
    if (::pwrite(file_, what, 1, 0) != 1) ::_exit(3);
  }

 private:
  int file_;  // until the process ends
};

// What kills found, by what the child was doing.
struct Kills {
  std::int64_t of_saves = 0;  // of a child that only saves
  std::map<std::string, std::int64_t> of_spills;
  std::int64_t leftovers = 0;  // times that a save had left a file behind
  std::int64_t none = 0;       // times that nothing had been saved yet

  void print(std::uint64_t seed) {
    const auto number = [](std::int64_t count) { return static_cast<long long>(count); };
    std::printf(
        "SLUICE_SEED=%llu: %lld kills of a process that saves; of one that spills rows, too, %lld "
        "in a prompt, %lld in decode, %lld in a save; %lld left files of a save behind, %lld came "
        "before any save\n",
        static_cast<unsigned long long>(seed), number(of_saves), number(of_spills[kPrompt]),
        number(of_spills[kDecode]), number(of_spills[kSave]), number(leftovers), number(none));
  }
};

// A child saves two sessions in turn until it is killed. Every second one also spills rows to disk,
// in prompts and in decode steps, if there is a disk here. Whatever is saved then loads whole, and
// no spilled row is left.
class KilledProcesses : public SavedSessions {
 protected:
  fs::path progress() const { return temp_.path() / "progress"; }

  // Prepares a directory for spilled rows, and the caps of a child that spills.
  void find_disk() {
    const auto disk = testing::disk_directory();
    if (!disk) return;
    spilled_.emplace(*disk);
    EngineConfig config = config_of(model_);
    config.disk = DiskConfig{{spilled_->path()}, {}};
    const Engine engine = Engine::open(config);
    const SessionOptions options = tightly(engine, options_for(engine, "values"), true);
    caps_ = std::to_string(*options.device_memory) + " " + std::to_string(*options.host_memory) +
            " " + spilled_->path().string();
  }

  pid_t start(bool spills) const {
    const std::string program = fs::read_symlink("/proc/self/exe").string();
    const pid_t child = ::fork();
    if (child != 0) return child;
    // Another program image, because threads do not survive a fork.
    ::setenv("SLUICE_SAVE_TO", directory().c_str(), 1);
    ::setenv("SLUICE_SAVE_FROM", model_.path().c_str(), 1);
    if (spills) ::setenv("SLUICE_SAVE_UNDER", caps_.c_str(), 1);
    const int none = ::open("/dev/null", O_WRONLY);
    ::dup2(none, STDOUT_FILENO);
    ::execl(program.c_str(), program.c_str(), "--gtest_also_run_disabled_tests",
            "--gtest_filter=SavingProcess.DISABLED_SavesForEver", nullptr);
    ::_exit(1);
  }

  // Kills a child some time after it began its work, and returns what it did.
  std::string kill_one(bool spills, std::int64_t most_microseconds) {
    const pid_t child = start(spills);
    for (int wait = 0; wait < 12000 && text_of(progress()).empty(); ++wait) ::usleep(5000);
    ::usleep(static_cast<useconds_t>(random_.integer(0, most_microseconds)));
    ::kill(child, SIGKILL);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << status;
    const std::string what = text_of(progress());
    EXPECT_EQ(what.size(), 1u) << "the child did not begin";
    fs::remove(progress());
    return what;
  }

  void expect_whole(Engine& engine) {
    if (!fs::exists(manifest())) {
      ++kills_.none;
      return;
    }
    kills_.leftovers += contents(directory()).size() > 2 ? 1 : 0;
    Session loaded = engine.load_session(directory(), options_for(engine, "dense"));
    const std::string note = engine.saved_session(directory()).note;
    EXPECT_EQ(loaded.length(), lengths_[note]) << note;
    loaded.decode(1);
    loaded.save(directory(), "after");
    lengths_["after"] = loaded.length();
    EXPECT_EQ(contents(directory()).size(), 2u) << "a leftover of a killed save";
    EXPECT_EQ(engine.saved_session(directory()).tokens.size(),
              static_cast<std::size_t>(loaded.length()));
  }

  const std::uint64_t seed_ = testing::seed(std::random_device()());
  Random random_{seed_};
  std::optional<TempDir> spilled_;
  std::string caps_;
  std::map<std::string, std::int64_t> lengths_ = {{"long", kSaved}, {"short", kSaved / 2}};
  Kills kills_;
};

TEST_F(KilledProcesses, LeaveWhatWasSavedAndNoSpilledRow) {
  const std::int64_t kills = number_from("SLUICE_KILLS", 30);
  SCOPED_TRACE(testing::seed_message(seed_));
  find_disk();
  Engine engine = Engine::open(config_of(model_));
  for (std::int64_t kill = 0; kill < kills && !HasFailure(); ++kill) {
    const bool spills = kill % 2 == 1 && spilled_;
    // A few saves, or a prompt, a save and some decode steps.
    const std::string what = kill_one(spills, spills ? 120'000 : 30'000);
    ++(spills ? kills_.of_spills[what] : kills_.of_saves);
    if (spilled_) {
      EXPECT_TRUE(fs::is_empty(spilled_->path())) << "spilled rows were left";
    }
    expect_whole(engine);
  }
  kills_.print(seed_);
  EXPECT_LT(kills_.none, kills);
  if (!spilled_ || kills < 300) return;
  for (const char* const what : {kPrompt, kDecode, kSave}) {
    EXPECT_GT(kills_.of_spills[what], 0) << what;
  }
}

// Writes rows to disk and saves them, until the process is killed. `caps`: of the device and of
// host memory, and the disk's directory.
[[noreturn]] void spill_and_save(EngineConfig config, const std::string& caps, const fs::path& to,
                                 const fs::path& progress) {
  std::istringstream text(caps);
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  std::string disk;
  text >> device >> host >> disk;
  config.chunk = 128;
  config.disk = DiskConfig{{disk}, {}};
  Engine engine = Engine::open(config);
  SessionOptions options = options_for(engine, "values");
  options.context = 20 * kContext;
  options.device_memory = device;
  options.host_memory = host;
  const Progress file(progress);
  while (true) {
    for (const bool is_long : {true, false}) {
      file.now(kPrompt);
      Session session = engine.new_session(options);
      session.prefill(random_tokens(is_long ? kSaved : kSaved / 2, is_long ? 1 : 2));
      file.now(kSave);
      session.save(to, is_long ? "long" : "short");
      file.now(kDecode);
      for (const TokenId token : random_tokens(200, 3)) session.decode(token);
      // The parent sees that the process ended by itself.
      if (session.ledger().crossed(Tier::host, Tier::disk).rows == 0) ::_exit(4);
    }
  }
}

// The child of the test above.
TEST(SavingProcess, DISABLED_SavesForEver) {
  const char* const to = std::getenv("SLUICE_SAVE_TO");
  const char* const from = std::getenv("SLUICE_SAVE_FROM");
  if (to == nullptr || from == nullptr) GTEST_SKIP() << "a test starts this one";
  const fs::path progress = fs::path(to).parent_path() / "progress";
  EngineConfig config;
  config.model = from;
  config.threads = 1;
  const char* const caps = std::getenv("SLUICE_SAVE_UNDER");
  if (caps != nullptr) spill_and_save(config, caps, to, progress);
  Engine engine = Engine::open(config);
  Session longer = engine.new_session(kContext);
  longer.prefill(random_tokens(kSaved, 1));
  Session shorter = engine.new_session(kContext);
  shorter.prefill(random_tokens(kSaved / 2, 2));
  const Progress file(progress);
  file.now(kSave);
  while (true) {
    longer.save(to, "long");
    shorter.save(to, "short");
  }
}

// Sessions behind a disk, whose pages stay in the file until they are wanted.
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
