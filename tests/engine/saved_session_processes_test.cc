// Saved sessions and other processes: those of other users cannot read them, a second one is told
// that they are in use, and one that is killed leaves them whole.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <string>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/small_sessions.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::config_of;
using testing::contents;
using testing::expect_error;
using testing::kSaved;
using testing::number_from;
using testing::options_for;
using testing::Random;
using testing::random_tokens;
using testing::SavedSessions;
using testing::TempDir;
using testing::text_of;
using testing::tightly;

namespace fs = std::filesystem;

constexpr std::int64_t kContext = testing::kSmallContext;

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

}  // namespace
}  // namespace sluice
