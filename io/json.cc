#include "io/json.h"

#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/file.h"
#include "lib/process_limits.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

struct Constant {
  std::string_view name;
  double value;
};
// JSON has none of these, but Python's json module writes and reads them.
constexpr std::array<Constant, 3> kConstants = {{
    {"NaN", std::numeric_limits<double>::quiet_NaN()},
    {"Infinity", std::numeric_limits<double>::infinity()},
    {"-Infinity", -std::numeric_limits<double>::infinity()},
}};

// A string of a document that stands for a constant.
struct Replaced {
  std::size_t string;  // its number in the document, keys included
  std::size_t byte;    // where it begins, from 1 on
  double value;
};

// The first quote from `at` on that no backslash escapes, or the end.
std::size_t end_of_string(std::string_view text, std::size_t at) {
  while (at < text.size() && text[at] != '"') at += text[at] == '\\' ? 2 : 1;
  return at;
}

// Puts a string of the same length in place of every constant, so that the parser takes it and
// positions stay what they are.
std::vector<Replaced> replace_constants(std::string& text) {
  std::vector<Replaced> replaced;
  std::size_t strings = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '"') {
      ++strings;
      at = end_of_string(text, at + 1);
      continue;
    }
    if (text[at] != 'N' && text[at] != 'I' && text[at] != '-') continue;
    for (const auto& [name, value] : kConstants) {
      if (text.compare(at, name.size(), name) != 0) continue;
      replaced.push_back({strings++, at + 1, value});
      if (replaced.size() > static_cast<std::size_t>(kMaxJsonValues)) return replaced;
      text[at] = text[at + name.size() - 1] = '"';
      at += name.size() - 1;
      break;
    }
  }
  return replaced;
}

// Builds a document, and refuses it as soon as it is past a limit.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(const std::filesystem::path& path, std::string_view remedy, std::size_t bytes,
          std::vector<Replaced> constants)
      : path_(&path), remedy_(remedy), bytes_(bytes), constants_(std::move(constants)) {}

  Json finish() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool binary(binary_t& value) override { return put(std::move(value)); }
  bool string(string_t& value) override {
    const Replaced* const constant = next_constant();
    return constant != nullptr ? put(constant->value) : put(std::move(value));
  }

  bool key(string_t& key) override {
    if (const Replaced* const constant = next_constant()) {
      refuse("is not JSON: " + json_fault(constant->byte, bytes_));
    }
    const auto [entry, is_new] =
        open_.back()->get_ref<Json::object_t&>().try_emplace(std::move(key));
    if (!is_new) refuse("has the key " + in_quotes(entry->first) + " twice");
    member_ = &entry->second;
    return true;
  }

  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    if (dynamic_cast<const Json::parse_error*>(&error) == nullptr) {
      refuse("has a number that no type can hold");
    }
    refuse("is not JSON: " + json_fault(position, bytes_));
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::corrupt, path_->string() + ": " + what + "; " + std::string(remedy_));
  }

 private:
  // The replacement of the document's next string; null: the string itself.
  const Replaced* next_constant() {
    const bool is_one = done_ < constants_.size() && constants_[done_].string == strings_;
    ++strings_;
    return is_one ? &constants_[done_++] : nullptr;
  }

  // The address of a new value, which does not move while it is open.
  Json* place(Json value) {
    if (++values_ > kMaxJsonValues) {
      refuse("has more than " + std::to_string(kMaxJsonValues) + " values");
    }
    Json* to = open_.empty() ? &root_ : member_;
    if (!open_.empty() && open_.back()->is_array()) {
      auto& array = open_.back()->get_ref<Json::array_t&>();
      to = &array.emplace_back();
    }
    *to = std::move(value);
    return to;
  }
  bool put(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (open_.size() >= static_cast<std::size_t>(kMaxJsonDepth)) {
      refuse("is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels");
    }
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::filesystem::path* path_;
  std::string_view remedy_;
  std::size_t bytes_;
  std::vector<Replaced> constants_;
  std::size_t done_ = 0;     // of the constants
  std::size_t strings_ = 0;  // seen until now
  int values_ = 0;
  Json root_;
  std::vector<Json*> open_;  // objects and arrays
  Json* member_ = nullptr;   // whose value comes next
};

}  // namespace

Json parse_json(std::string text, const std::filesystem::path& path, std::string_view remedy) {
  std::vector<Replaced> constants = replace_constants(text);
  Builder builder(path, remedy, text.size(), std::move(constants));
  if (text.find('\0') != std::string::npos) builder.refuse("is not JSON: it has a NUL byte");
  Json::sax_parse(text, &builder);
  return builder.finish();
}

Json read_json_file(const std::filesystem::path& path, std::uint64_t max_bytes,
                    std::string_view remedy) {
  std::string text = read_text_file(path, max_bytes);
  require_not_lfs_pointer(path, text);
  // Values take a multiple of their text, and where memory runs out a nlohmann::json that is
  // destroyed ends the process.
  constexpr std::size_t kMostPerByte = 32;
  if (text.size() > (std::size_t{64} << 10)) {
    require_memory(kMostPerByte * text.size(), Counted::all, path.string() + " needs",
                   "raise the limit");
  }
  return parse_json(std::move(text), path, remedy);
}

std::string dump_json(const nlohmann::json& json, int indent) {
  return json.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace sluice
