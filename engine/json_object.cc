#include "engine/json_object.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/json.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {

std::string json_text(double number) {
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number > 0.0 ? "Infinity" : "-Infinity";
  return digits(number);
}

std::string json_kind(const nlohmann::json& value) {
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    return std::isfinite(number) ? "a fraction" : json_text(number);
  }
  return value.is_array() || value.is_object() ? std::string("an ") + value.type_name()
                                               : std::string("a ") + value.type_name();
}

JsonObject::JsonObject(const nlohmann::json& value, const std::filesystem::path& file,
                       std::string prefix, std::string remedy)
    : value_(&value), file_(&file), prefix_(std::move(prefix)), remedy_(std::move(remedy)) {
  if (!value.is_object()) {
    const std::string name =
        prefix_.empty() ? "the document" : prefix_.substr(0, prefix_.size() - 1);
    throw Error(ErrorCode::corrupt, file.string() + ": " + name + " is " + json_kind(value) +
                                        ", not an object; " + remedy_);
  }
}

bool JsonObject::contains(const char* key) const { return value_->contains(key); }

bool JsonObject::has(const char* key) const {
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

const nlohmann::json& JsonObject::value(const char* key) const {
  if (!has(key)) corrupt(key, "is missing");
  return *value_->find(key);
}

JsonObject JsonObject::object(const char* key) const {
  return {value(key), *file_, prefix_ + key + ".", remedy_};
}

std::int64_t JsonObject::integer(const char* key, std::int64_t least, std::int64_t most,
                                 std::optional<std::int64_t> fallback) const {
  if (fallback && !has(key)) return *fallback;
  const nlohmann::json& number = value(key);
  if (!number.is_number_integer()) corrupt(key, "is " + json_kind(number) + ", not an integer");
  const bool too_large =
      number.is_number_unsigned() &&
      number.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()};
  const auto result = number.get<std::int64_t>();
  if (too_large || result < least || result > most) {
    corrupt(key, "is " + number.dump() + "; it must be " + std::to_string(least) + " to " +
                     std::to_string(most));
  }
  return result;
}

double JsonObject::number(const char* key, double least, double most,
                          std::optional<double> fallback) const {
  if (fallback && !has(key)) return *fallback;
  const nlohmann::json& number = value(key);
  if (!number.is_number()) corrupt(key, "is " + json_kind(number) + ", not a number");
  const auto result = number.get<double>();
  if (!(result >= least && result <= most)) {
    corrupt(key,
            "is " + json_text(result) + "; it must be " + digits(least) + " to " + digits(most));
  }
  return result;
}

bool JsonObject::boolean(const char* key, bool fallback) const {
  if (!has(key)) return fallback;
  const nlohmann::json& boolean = value(key);
  if (!boolean.is_boolean()) corrupt(key, "is " + json_kind(boolean) + ", not true or false");
  return boolean.get<bool>();
}

std::string JsonObject::string(const char* key, std::optional<std::string> fallback) const {
  if (fallback && !has(key)) return *fallback;
  const nlohmann::json& string = value(key);
  if (!string.is_string()) corrupt(key, "is " + json_kind(string) + ", not a string");
  return string.get<std::string>();
}

void JsonObject::corrupt(const std::string& key, const std::string& what) const {
  throw Error(ErrorCode::corrupt,
              file_->string() + ": " + prefix_ + key + " " + what + "; " + remedy_);
}

void JsonObject::unsupported(const std::string& key, const std::string& what) const {
  throw Error(ErrorCode::unsupported,
              file_->string() + ": " + prefix_ + key + " " + what + "; use another checkpoint");
}

}  // namespace sluice
