#include "tools/serve/fields.h"

#include <algorithm>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::tools {
namespace {

constexpr int kMostDepth = 32;

[[noreturn]] void refuse_type(const char* name, const char* wanted, const nlohmann::json& given) {
  refuse("`" + std::string(name) + "` must be " + wanted + ", not of type " + given.type_name());
}

}  // namespace

void refuse(const std::string& message) { throw Error(ErrorCode::usage, message); }

nlohmann::json parse_body(std::string_view text) {
  // Called before the parser nests deeper.
  const auto shallow = [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    if (depth > kMostDepth) refuse("the body is nested more than 32 deep");
    return true;
  };
  nlohmann::json body;
  try {
    body = nlohmann::json::parse(text, shallow);
  } catch (const nlohmann::json::parse_error& error) {
    refuse("the body is not JSON: " + json_fault(error.byte, text.size()));
  } catch (const nlohmann::json::out_of_range&) {
    refuse("a number of the body is too large");
  }
  if (!body.is_object()) refuse("the body must be a JSON object");
  return body;
}

void Fields::require_known(std::initializer_list<std::string_view> names,
                           std::span<const std::string_view> more) const {
  const auto has = [](const auto& list, const std::string& key) {
    return std::find(list.begin(), list.end(), key) != list.end();
  };
  for (const auto& [key, value] : body_->items()) {
    if (!has(names, key) && !has(more, key)) {
      refuse(in_quotes(key) + " is no field of this request");
    }
  }
}

const nlohmann::json* Fields::find(const char* name) const {
  const auto found = body_->find(name);
  return found == body_->end() || found->is_null() ? nullptr : &*found;
}

std::int64_t Fields::integer(const char* name, std::int64_t least, std::int64_t most,
                             std::int64_t fallback) const {
  const nlohmann::json* const value = find(name);
  if (value == nullptr) return fallback;
  if (!value->is_number_integer()) refuse_type(name, "a whole number", *value);
  const bool is_huge = value->is_number_unsigned() &&
                       value->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX);
  const std::int64_t number = is_huge ? INT64_MAX : value->get<std::int64_t>();
  if (is_huge || number < least || number > most) {
    refuse("`" + std::string(name) + "` must be " + std::to_string(least) + " to " +
           std::to_string(most));
  }
  return number;
}

double Fields::number(const char* name, double fallback) const {
  const nlohmann::json* const value = find(name);
  if (value == nullptr) return fallback;
  if (!value->is_number()) refuse_type(name, "a number", *value);
  return value->get<double>();
}

bool Fields::boolean(const char* name, bool fallback) const {
  const nlohmann::json* const value = find(name);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) refuse_type(name, "true or false", *value);
  return value->get<bool>();
}

std::optional<std::string> Fields::string(const char* name) const {
  const nlohmann::json* const value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse_type(name, "a string", *value);
  return value->get<std::string>();
}

}  // namespace sluice::tools
