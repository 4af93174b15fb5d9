// Typed access to an object of a JSON file, with errors that name the file and the key.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace sluice {

// A number as Python's json module writes it: "0.5", "NaN", "-Infinity".
std::string json_text(double number);
// For messages: "a string", "an array", "a fraction", "NaN".
std::string json_kind(const nlohmann::json& value);

// A view: the JSON value and the path must outlive it. Accessors throw Error{corrupt} if the key is
// missing (unless there is a fallback), has the wrong type or lies outside the bounds given. A key
// that is null counts as missing.
class JsonObject {
 public:
  // Throws Error{corrupt} if `value` is not an object. Messages put `prefix` before every key and
  // end with `remedy`, what to do about a file that is corrupt.
  JsonObject(const nlohmann::json& value, const std::filesystem::path& file,
             std::string prefix = {}, std::string remedy = "download the file again or correct it");

  bool contains(const char* key) const;  // perhaps as null
  bool has(const char* key) const;       // and not null
  const nlohmann::json& value(const char* key) const;
  JsonObject object(const char* key) const;

  std::int64_t integer(const char* key, std::int64_t least, std::int64_t most,
                       std::optional<std::int64_t> fallback = {}) const;
  double number(const char* key, double least, double most,
                std::optional<double> fallback = {}) const;
  bool boolean(const char* key, bool fallback) const;
  std::string string(const char* key, std::optional<std::string> fallback = {}) const;

  // "<file>: <key> <what>; <remedy>"
  [[noreturn]] void corrupt(const std::string& key, const std::string& what) const;
  [[noreturn]] void unsupported(const std::string& key, const std::string& what) const;

 private:
  const nlohmann::json* value_;
  const std::filesystem::path* file_;
  std::string prefix_;
  std::string remedy_;
};

}  // namespace sluice
