// Typed access to the fields of a request's JSON body.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace sluice::tools {

// Parses a body: one JSON object, nested at most 32 deep. Throws Error{usage}.
nlohmann::json parse_body(std::string_view text);

// A view of a body. A null field counts as missing. Accessors throw Error{usage}, which names the
// field and what was there instead.
class Fields {
 public:
  explicit Fields(const nlohmann::json& body) : body_(&body) {}

  // Throws unless every field is one of `names` or `more`.
  void require_known(std::initializer_list<std::string_view> names,
                     std::span<const std::string_view> more = {}) const;

  const nlohmann::json* find(const char* name) const;  // null: missing
  std::int64_t integer(const char* name, std::int64_t least, std::int64_t most,
                       std::int64_t fallback) const;
  double number(const char* name, double fallback) const;
  bool boolean(const char* name, bool fallback) const;
  std::optional<std::string> string(const char* name) const;

 private:
  const nlohmann::json* body_;
};

[[noreturn]] void refuse(const std::string& message);

}  // namespace sluice::tools
