#include "io/report_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/io/test_files.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::TempDir;

TEST(ReportFile, TakesThePlaceOfReportsAndOfNothing) {
  const TempDir dir;
  EXPECT_TRUE(may_become_report(dir.path() / "absent"));
  EXPECT_TRUE(may_become_report(dir.write("empty", "")));
  const std::string report = report_beginning() + "\"tokens\": []}";
  EXPECT_TRUE(may_become_report(dir.write("report", report)));
  const nlohmann::ordered_json json = nlohmann::ordered_json::parse(report);
  EXPECT_TRUE(may_become_report(dir.write("compact", json.dump())));
  EXPECT_TRUE(may_become_report(dir.write("wide", json.dump(8))));
  EXPECT_NO_THROW(require_may_become_report(dir.path() / "report"));
}

TEST(ReportFile, TakesThePlaceOfNothingElse) {
  const TempDir dir;
  const std::string begun = report_beginning().substr(0, 10);
  for (const std::string& text : {std::string("x"), std::string("{}"), std::string("\n"), begun,
                                  std::string(R"({"written_by": "another"})"),
                                  std::string(R"({"tokens": [], "written_by": )"
                                              R"("sluice 1"})"),
                                  "x" + report_beginning(), std::string(1 << 20, ' ')}) {
    const std::filesystem::path path = dir.write("file", text);
    EXPECT_FALSE(may_become_report(path)) << text.substr(0, 80);
    expect_error(ErrorCode::usage, "would overwrite it", [&] { require_may_become_report(path); });
  }
}

TEST(ReportFile, LinksAreFollowed) {
  const TempDir dir;
  std::filesystem::create_symlink(dir.write("blob", "weights"), dir.path() / "link");
  EXPECT_FALSE(may_become_report(dir.path() / "link"));
  std::filesystem::create_symlink(dir.path() / "absent", dir.path() / "dangling");
  EXPECT_TRUE(may_become_report(dir.path() / "dangling"));
}

TEST(ReportFile, DevicesAndPipesAreNoFiles) {
  const TempDir dir;
  const std::filesystem::path pipe = dir.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), S_IRUSR | S_IWUSR), 0);
  for (const std::filesystem::path& path : {pipe, std::filesystem::path("/dev/null")}) {
    EXPECT_TRUE(may_become_report(path)) << path;
  }
}

}  // namespace
}  // namespace sluice
