#include "tools/serve/constraint_field.h"

#include <string>

#include "lib/text.h"

namespace sluice::tools {
namespace {

using Ordered = nlohmann::ordered_json;

constexpr int kMostNames = 5000;

// The field `response_format` with names in the order of the text, which is a body that
// parse_body() has read.
Ordered ordered_format(std::string_view text) {
  bool is_inside = false;
  int names = 0;
  const auto pick = [&](int depth, Ordered::parse_event_t event, Ordered& parsed) {
    if (event != Ordered::parse_event_t::key) return true;
    if (depth == 1) is_inside = parsed == "response_format";
    // Every name is compared with all that its object has already.
    if (is_inside && ++names > kMostNames) refuse("`response_format` has more than 5000 names");
    return is_inside || depth > 1;
  };
  return Ordered::parse(text, pick)["response_format"];
}

Constraint read_schema(const Fields& format, std::string_view text,
                       const Constraints& constraints) {
  const nlohmann::json* const given = format.find("json_schema");
  if (given == nullptr || !given->is_object()) {
    refuse("`response_format`: `json_schema` must be an object with a `schema`");
  }
  const Fields fields(*given);
  fields.require_known({"name", "description", "strict", "schema"});
  fields.string("name");
  fields.string("description");
  fields.boolean("strict", true);
  if (fields.find("schema") == nullptr) refuse("`response_format`: `schema` is missing");
  const Ordered ordered = ordered_format(text);
  return constraints.json_schema(ordered.at("json_schema").at("schema").dump());
}

std::optional<Constraint> read_format(const nlohmann::json& given, std::string_view text,
                                      const Constraints& constraints) {
  if (!given.is_object()) refuse("`response_format` must be an object");
  const Fields format(given);
  format.require_known({"type", "json_schema"});
  const std::string type = format.string("type").value_or("");
  if (type == "json_schema") return read_schema(format, text, constraints);
  if (format.find("json_schema") != nullptr) {
    refuse("`response_format`: `json_schema` wants the type json_schema");
  }
  if (type == "json_object") return constraints.json_object();
  if (type == "text") return std::nullopt;
  refuse("`response_format`: the type must be text, json_object or json_schema, not " +
         in_quotes(type));
}

}  // namespace

std::optional<Constraint> read_constraint(const Fields& fields, std::string_view text,
                                          const Constraints& constraints) {
  const nlohmann::json* const format = fields.find("response_format");
  const std::optional<std::string> regex = fields.string("regex");
  const std::optional<std::string> grammar = fields.string("grammar");
  const int given = (format != nullptr ? 1 : 0) + (regex ? 1 : 0) + (grammar ? 1 : 0);
  if (given > 1) {
    refuse("only one of `response_format`, `regex` and `grammar` can be given");
  }
  if (regex) return constraints.regex(*regex);
  if (grammar) return constraints.grammar(*grammar);
  if (format != nullptr) return read_format(*format, text, constraints);
  return std::nullopt;
}

}  // namespace sluice::tools
