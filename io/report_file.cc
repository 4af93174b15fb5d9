#include "io/report_file.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <span>
#include <string_view>
#include <system_error>

#include "io/file.h"
#include "sluice/errors.h"
#include "sluice/version.h"

namespace sluice {
namespace {

// Beginning of a report without white space, so that a reformatted one is still recognised.
constexpr std::string_view kMark = R"({"written_by":"sluice)";
constexpr std::uint64_t kMostRead = 256;

std::string beginning_of(const File& file) {
  std::string text(static_cast<std::size_t>(std::min(file.size(), kMostRead)), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  std::erase_if(text, [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; });
  return text;
}

}  // namespace

std::string report_beginning() {
  return std::string("{\n  \"written_by\": \"sluice ") + kVersion + "\",";
}

bool may_become_report(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return true;
  try {
    const File file = File::open(path);
    return file.size() == 0 || beginning_of(file).starts_with(kMark);
  } catch (const Error&) {
    return false;
  }
}

void require_may_become_report(const std::filesystem::path& path) {
  if (may_become_report(path)) return;
  throw Error(ErrorCode::usage,
              path.string() +
                  ": is a file that is there already and no report of sluice, and writing would "
                  "overwrite it; choose another file, or give `force` to replace it");
}

}  // namespace sluice
