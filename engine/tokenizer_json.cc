#include <limits>
#include <nlohmann/json.hpp>

#include "engine/tokenizer_spec.h"
#include "engine/utf8.h"

namespace sluice {

using Json = nlohmann::json;

void throw_broken(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::tokenizer,
              where + ": " + what + "; take the tokenizer.json of the checkpoint unchanged");
}

void throw_unsupported(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::unsupported,
              where + ": " + what + " is not supported; Sluice reads byte-level BPE tokenizers");
}

const Json& member(const Json& object, const char* key) {
  static const Json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

bool flag_of(const Json& object, const char* key, bool otherwise, const std::string& where) {
  const Json& value = member(object, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) throw_broken(where + "." + key, "is neither true nor false");
  return value.get<bool>();
}

const std::string& string_of(const Json& object, const char* key, const std::string& where) {
  const Json& value = member(object, key);
  if (!value.is_string()) throw_broken(where, std::string("has no '") + key + "'");
  return value.get_ref<const std::string&>();
}

std::optional<TokenId> id_of(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto id = value.get<std::uint64_t>();
  if (id > static_cast<std::uint64_t>(std::numeric_limits<TokenId>::max())) return std::nullopt;
  return static_cast<TokenId>(id);
}

std::string as_json(std::string_view text) {
  constexpr std::size_t kLongest = 96;
  const std::string cut = text.size() > kLongest ? "..." : "";
  return Json(to_valid_utf8(text.substr(0, kLongest)) + cut).dump();
}

}  // namespace sluice
