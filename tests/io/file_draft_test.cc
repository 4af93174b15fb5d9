#include "io/file_draft.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <span>
#include <vector>

#include "tests/io/test_files.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::TempDir;

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  return names;
}

TEST(ReplaceFile, PutsTheTextInPlaceAndLeavesNothingElse) {
  const TempDir dir;
  const std::filesystem::path path = dir.path() / "a";
  require_replaceable(path);
  EXPECT_THAT(names_in(dir.path()), ::testing::IsEmpty());
  replace_file(path, "one");
  replace_file(path, std::string(1 << 20, 'x'));
  EXPECT_EQ(testing::read_bytes(path), std::string(1 << 20, 'x'));
  EXPECT_THAT(names_in(dir.path()), ::testing::ElementsAre("a"));
}

TEST(ReplaceFile, KeepsThePermissions) {
  const TempDir dir;
  const std::filesystem::path path = dir.write("a", "secret");
  constexpr auto kOwn = std::filesystem::perms::owner_read | std::filesystem::perms::owner_write;
  std::filesystem::permissions(path, kOwn);
  replace_file(path, "new");
  EXPECT_EQ(std::filesystem::status(path).permissions(), kOwn);
}

TEST(FileDraft, ThatIsNotPutInPlaceIsGone) {
  const TempDir dir;
  const std::filesystem::path path = dir.write("a", "before");
  {
    FileDraft draft(path);
    draft.write(std::string(1 << 20, 'x'));
    EXPECT_THAT(names_in(dir.path()), ::testing::SizeIs(2));
  }
  EXPECT_EQ(testing::read_bytes(path), "before");
  EXPECT_THAT(names_in(dir.path()), ::testing::ElementsAre("a"));
}

TEST(FileDraft, MayHaveNoNameUntilItIsInPlace) {
  const TempDir dir;
  const int descriptor = ::open(dir.path().c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600);
  if (descriptor < 0) GTEST_SKIP() << "the file system has no files without names";
  ::close(descriptor);
  const std::filesystem::path path = dir.write("a", "before");
  {
    FileDraft draft(path, FileDraft::Name::none);
    draft.write("given up");
    EXPECT_THAT(names_in(dir.path()), ::testing::ElementsAre("a"));
  }
  EXPECT_EQ(testing::read_bytes(path), "before");
  FileDraft draft(path, FileDraft::Name::none);
  draft.write("after");
  draft.put_in_place();
  EXPECT_EQ(testing::read_bytes(path), "after");
  EXPECT_THAT(names_in(dir.path()), ::testing::ElementsAre("a"));
}

TEST(FileDraft, TakesItsPartsInAnyOrder) {
  const TempDir dir;
  const std::filesystem::path path = dir.write("a", "before");
  {
    FileDraft draft(path);
    draft.reserve(6);
    draft.write_at(4, std::as_bytes(std::span("ef", 2)));
    draft.write_at(0, std::as_bytes(std::span("abcd", 4)));
    EXPECT_EQ(testing::read_bytes(path), "before");
    draft.put_in_place();
  }
  EXPECT_EQ(testing::read_bytes(path), "abcdef");
  EXPECT_THAT(names_in(dir.path()), ::testing::ElementsAre("a"));
}

TEST(FileDraft, RefusesWhatThereIsNoRoomFor) {
  const TempDir dir;
  const auto reserve_and_write = [&](std::uint64_t reserved, std::uint64_t at) {
    FileDraft draft(dir.path() / "a");
    draft.reserve(reserved);
    draft.write_at(at, std::as_bytes(std::span("abcd", 4)));
  };
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit small = before;
  small.rlim_cur = 4096;
  std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  reserve_and_write(4096, 4092);
  expect_error(ErrorCode::io, "cannot be written", [&] { reserve_and_write(4097, 0); });
  expect_error(ErrorCode::io, "cannot be written", [&] { reserve_and_write(4096, 4096); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_THAT(names_in(dir.path()), ::testing::IsEmpty());
}

TEST(ReplaceFile, NeitherFollowsLinksNorWaits) {
  const TempDir dir;
  const std::filesystem::path victim = dir.write("victim", "precious");
  for (const char* name : {"a", "a.new"}) {
    std::filesystem::create_symlink(victim, dir.path() / name);
  }
  replace_file(dir.path() / "a", "text");
  EXPECT_EQ(testing::read_bytes(victim), "precious");
  EXPECT_EQ(testing::read_bytes(dir.path() / "a"), "text");
  const std::filesystem::path fifo = dir.path() / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  replace_file(fifo, "text");
  EXPECT_EQ(testing::read_bytes(fifo), "text");
}

TEST(ReplaceFile, WhatCannotBeWrittenIsAnIoErrorAndLeavesNothing) {
  const TempDir dir;
  expect_error(ErrorCode::io, "nowhere/a: cannot be written",
               [&] { require_replaceable(dir.path() / "nowhere" / "a"); });
  std::filesystem::create_directory(dir.path() / "folder");
  expect_error(ErrorCode::io, "folder: cannot be written",
               [&] { replace_file(dir.path() / "folder", "text"); });
  EXPECT_THAT(names_in(dir.path()), ::testing::ElementsAre("folder"));
}

}  // namespace
}  // namespace sluice
