#include "io/json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "io/file.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

// Goes through a document before it is built. (The parser's own callback takes quadratic time.)
class Guard : public nlohmann::json_sax<Json> {
 public:
  Guard(const std::filesystem::path& path, std::size_t bytes) : path_(&path), bytes_(bytes) {}

  bool null() override { return count(); }
  bool boolean(bool) override { return count(); }
  bool number_integer(number_integer_t) override { return count(); }
  bool number_unsigned(number_unsigned_t) override { return count(); }
  bool number_float(number_float_t, const string_t&) override { return count(); }
  bool string(string_t&) override { return count(); }
  bool binary(binary_t&) override { return count(); }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& key) override {
    if (!keys_.back().insert(key).second) refuse("has the key " + in_quotes(key) + " twice");
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    if (dynamic_cast<const Json::parse_error*>(&error) == nullptr) {
      refuse("has a number that no type can hold");
    }
    refuse("is not JSON: " + json_fault(position, bytes_));
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::corrupt, path_->string() + ": " + what + "; download it again");
  }

 private:
  bool count() {
    if (++values_ > kMaxJsonValues) {
      refuse("has more than " + std::to_string(kMaxJsonValues) + " values");
    }
    return true;
  }
  bool open() {
    if (keys_.size() >= static_cast<std::size_t>(kMaxJsonDepth)) {
      refuse("is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels");
    }
    keys_.emplace_back();
    return count();
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::filesystem::path* path_;
  std::size_t bytes_;
  std::vector<std::set<std::string>>
      keys_;  // of the objects, and none of the arrays, that are open
  int values_ = 0;
};

}  // namespace

Json read_json_file(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const std::string text = read_text_file(path, max_bytes);
  require_not_lfs_pointer(path, text);
  Guard guard(path, text.size());
  if (text.find('\0') != std::string::npos) guard.refuse("is not JSON: it has a NUL byte");
  Json::sax_parse(text, &guard);
  return Json::parse(text);
}

}  // namespace sluice
