#include "io/json.h"

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "io/file.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

// Watches the parser go through a document.
class Guard {
 public:
  explicit Guard(const std::filesystem::path& path) : path_(&path) {}

  void see(int depth, Json::parse_event_t event, const Json& parsed) {
    using Event = Json::parse_event_t;
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens && depth >= kMaxJsonDepth) {
      refuse("is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels");
    }
    if (event == Event::object_start) keys_.emplace_back();
    if (event == Event::object_end) keys_.pop_back();
    if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) refuse("has the key " + in_quotes(key) + " twice");
    }
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::corrupt, path_->string() + ": " + what + "; download it again");
  }

 private:
  const std::filesystem::path* path_;
  std::vector<std::set<std::string>> keys_;  // of the objects that are open
};

}  // namespace

Json read_json_file(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const std::string text = read_text_file(path, max_bytes);
  Guard guard(path);
  if (text.find('\0') != std::string::npos) guard.refuse("is not JSON: it has a NUL byte");
  try {
    return Json::parse(text, [&](int depth, Json::parse_event_t event, const Json& parsed) {
      guard.see(depth, event, parsed);
      return true;
    });
  } catch (const Json::parse_error& error) {
    guard.refuse("is not JSON: it breaks off at byte " + std::to_string(error.byte));
  } catch (const Json::exception&) {
    guard.refuse("has a number that no type can hold");
  }
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLongest = 96;
  std::string result = "'";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      result += c;
    } else {
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\x%02x", static_cast<unsigned>(byte));
      result += escaped.data();
    }
  }
  return result + (text.size() > kLongest ? "...'" : "'");
}

}  // namespace sluice
