#include "engine/constrain/json_schema.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/constrain/json_text.h"
#include "engine/constrain/pattern.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::constrain {
namespace {

using Json = nlohmann::ordered_json;
using Names = std::span<const std::string_view>;

constexpr std::size_t kMostSchemaBytes = 1 << 20;
constexpr int kMostSchemaDepth = 64;
// Names of objects and values. Also bounds the search for a name in an object, which is linear.
constexpr int kMostValues = 20'000;
constexpr int kMostNames = 5'000;

constexpr auto kAnnotations = std::to_array<std::string_view>(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
     "$comment", "$schema", "$defs", "definitions"});
constexpr auto kObjectKeys =
    std::to_array<std::string_view>({"properties", "required", "additionalProperties"});
constexpr auto kArrayKeys = std::to_array<std::string_view>({"items", "minItems", "maxItems"});
constexpr auto kStringKeys = std::to_array<std::string_view>({"pattern", "minLength", "maxLength"});
constexpr auto kOtherKeys =
    std::to_array<std::string_view>({"type", "enum", "const", "anyOf", "allOf", "$ref"});
constexpr auto kTypes = std::to_array<std::string_view>(
    {"object", "array", "string", "integer", "number", "boolean", "null"});

bool has(Names names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Names keys_of(std::string_view type) {
  if (type == "object") return kObjectKeys;
  if (type == "array") return kArrayKeys;
  if (type == "string") return kStringKeys;
  return {};
}

[[noreturn]] void fail(ErrorCode code, const std::string& place, const std::string& what) {
  throw Error(code, "JSON schema: " + what + " at " + one_line(place));
}
[[noreturn]] void broken(const std::string& place, const std::string& what) {
  fail(ErrorCode::usage, place, what);
}
[[noreturn]] void refuse(const std::string& place, const std::string& what) {
  fail(ErrorCode::unsupported, place, what);
}

// One step of a JSON pointer (RFC 6901).
std::string step(std::string_view name) {
  std::string text = "/";
  for (const char c : name) {
    if (c == '~') {
      text += "~0";
    } else if (c == '/') {
      text += "~1";
    } else {
      text += c;
    }
  }
  return text;
}

Json parse(std::string_view text) {
  if (text.size() > kMostSchemaBytes) {
    throw Error(ErrorCode::usage, "JSON schema: it has " + std::to_string(text.size()) +
                                      " bytes; the most are " + std::to_string(kMostSchemaBytes));
  }
  int values = 0;
  int names = 0;
  const auto limit = [&](int depth, Json::parse_event_t event, Json&) {
    if (depth > kMostSchemaDepth) {
      throw Error(ErrorCode::usage, "JSON schema: it is nested more than 64 deep");
    }
    if (event == Json::parse_event_t::key) ++names;
    if (++values > kMostValues || names > kMostNames) {
      throw Error(ErrorCode::usage, "JSON schema: it has more than 5000 names or 20000 values");
    }
    return true;
  };
  try {
    return Json::parse(text, limit);
  } catch (const Json::parse_error& error) {
    throw Error(ErrorCode::usage,
                "JSON schema: it is not JSON: " + json_fault(error.byte, text.size()));
  } catch (const Json::exception& error) {  // a number beyond a double
    throw Error(ErrorCode::usage, "JSON schema: it is not JSON: " + one_line(error.what()));
  }
}

std::string_view type_of(const Json& value) {
  if (value.is_object()) return "object";
  if (value.is_array()) return "array";
  if (value.is_string()) return "string";
  if (value.is_boolean()) return "boolean";
  if (value.is_null()) return "null";
  return value.is_number_integer() ? "integer" : "number";
}

class Compiler {
 public:
  Compiler(const Json& root, Grammar& grammar) : root_(&root), grammar_(&grammar), text_(grammar) {}

  void run() {
    const NodeId value = schema(*root_, "#");
    while (!pending_.empty()) {
      const auto [name, place] = std::move(pending_.back());
      pending_.pop_back();
      grammar_->define(rules_.at(name), schema(find(name, place), name));
    }
    grammar_->finish(grammar_->sequence({text_.space(), value}), "JSON schema: it");
  }

 private:
  // The node of a schema that stands at `place`, a JSON pointer.
  NodeId schema(const Json& schema, const std::string& place) {
    if (schema.is_boolean()) {
      return schema.get<bool>() ? text_.any_value() : grammar_->choice({});
    }
    if (!schema.is_object()) broken(place, "a schema must be an object, true or false");
    if (schema.contains("$ref")) return reference(schema, place);
    if (schema.contains("anyOf")) return any_of(schema, place);
    if (schema.contains("allOf")) return all_of(schema, place);
    if (schema.contains("const") || schema.contains("enum")) return constants(schema, place);
    return typed(schema, place);
  }

  // Refuses keywords other than annotations and `known`; `where` says where others are not allowed.
  static void require_keys(const Json& schema, Names known, const std::string& where,
                           const std::string& place) {
    for (const auto& [key, value] : schema.items()) {
      const bool is_id = key == "$id" && place == "#";
      if (is_id || has(kAnnotations, key) || has(known, key)) continue;
      const bool is_handled = has(kObjectKeys, key) || has(kArrayKeys, key) ||
                              has(kStringKeys, key) || has(kOtherKeys, key);
      refuse(place, "the keyword " + in_quotes(key) + " is not supported" +
                        (is_handled ? " " + where : std::string()));
    }
  }

  NodeId reference(const Json& schema, const std::string& place) {
    static constexpr auto kKeys = std::to_array<std::string_view>({"$ref"});
    require_keys(schema, kKeys, "beside '$ref'", place);
    const Json& target = schema["$ref"];
    if (!target.is_string()) broken(place, "`$ref` must be a string");
    const auto name = target.get<std::string>();
    const auto known = rules_.find(name);
    if (known != rules_.end()) return known->second;
    if (name != "#" && !name.starts_with("#/")) {
      refuse(place, "`$ref` to " + in_quotes(name) +
                        ", outside of the schema, is not supported; only #/ and what follows is");
    }
    pending_.emplace_back(name, place);
    return rules_[name] = grammar_->rule();
  }

  const Json& find(const std::string& name, const std::string& place) const {
    try {
      return root_->at(Json::json_pointer(name.substr(1)));
    } catch (const Json::exception&) {
      broken(place, "`$ref` names " + in_quotes(name) + ", which is not there");
    }
  }

  // A list of schemas that is not empty.
  static const Json& list(const Json& schema, const char* key, const std::string& place) {
    const Json& list = schema[key];
    if (!list.is_array() || list.empty()) {
      broken(place, "`" + std::string(key) + "` must be an array that is not empty");
    }
    return list;
  }

  NodeId any_of(const Json& schema, const std::string& place) {
    static constexpr auto kKeys = std::to_array<std::string_view>({"anyOf"});
    require_keys(schema, kKeys, "beside 'anyOf'", place);
    std::vector<NodeId> ways;
    for (const Json& one : list(schema, "anyOf", place)) {
      ways.push_back(this->schema(one, place + "/anyOf/" + std::to_string(ways.size())));
    }
    return grammar_->choice(ways);
  }

  NodeId all_of(const Json& schema, const std::string& place) {
    static constexpr auto kKeys = std::to_array<std::string_view>({"allOf"});
    require_keys(schema, kKeys, "beside 'allOf'", place);
    const Json& all = list(schema, "allOf", place);
    if (all.size() > 1) refuse(place, "`allOf` of several schemas is not supported");
    return this->schema(all.front(), place + "/allOf/0");
  }

  NodeId constants(const Json& schema, const std::string& place) {
    static constexpr auto kConst = std::to_array<std::string_view>({"const", "type"});
    static constexpr auto kEnum = std::to_array<std::string_view>({"enum", "type"});
    const bool is_const = schema.contains("const");
    require_keys(schema, is_const ? Names(kConst) : Names(kEnum),
                 is_const ? "beside 'const'" : "beside 'enum'", place);
    const std::vector<std::string_view> types = types_of(schema, place);
    const auto fits = [&](const Json& value) {
      const std::string_view type = type_of(value);
      return has(types, type) || (type == "integer" && has(types, "number"));
    };
    std::vector<NodeId> ways;
    const auto add = [&](const Json& value) {
      if (fits(value)) ways.push_back(text_.constant(value));
    };
    if (is_const) {
      add(schema["const"]);
    } else {
      for (const Json& value : list(schema, "enum", place)) add(value);
    }
    return grammar_->choice(ways);
  }

  // All types if none is named.
  static std::vector<std::string_view> types_of(const Json& schema, const std::string& place) {
    if (!schema.contains("type")) return {kTypes.begin(), kTypes.end()};
    const Json& type = schema["type"];
    std::vector<std::string_view> types;
    const auto add = [&](const Json& one) {
      const auto* const name = one.is_string() ? one.get_ptr<const std::string*>() : nullptr;
      if (name == nullptr || !has(kTypes, *name)) {
        broken(place,
               "`type` must be one or several of object, array, string, integer, number, boolean "
               "and null");
      }
      types.emplace_back(*name);
    };
    if (type.is_array() && !type.empty()) {
      for (const Json& one : type) add(one);
    } else {
      add(type);
    }
    return types;
  }

  NodeId typed(const Json& schema, const std::string& place) {
    std::vector<std::string_view> known = {"type"};
    const std::vector<std::string_view> types = types_of(schema, place);
    if (schema.contains("type")) {
      for (const std::string_view type : types) {
        known.insert(known.end(), keys_of(type).begin(), keys_of(type).end());
      }
    }
    require_keys(schema, known, schema.contains("type") ? "for this type" : "without `type`",
                 place);
    if (!schema.contains("type")) return text_.any_value();
    std::vector<NodeId> ways;
    for (const std::string_view type : types) ways.push_back(value_of(type, schema, place));
    return ways.size() == 1 ? ways.front() : grammar_->choice(ways);
  }

  NodeId value_of(std::string_view type, const Json& schema, const std::string& place) {
    if (type == "object") return object(schema, place);
    if (type == "array") return array(schema, place);
    if (type == "string") return string(schema, place);
    if (type == "integer") return text_.integer();
    if (type == "number") return text_.number();
    return type == "boolean" ? text_.boolean() : text_.null();
  }

  // `key`, a number of things, within its bounds.
  static std::int32_t count(const Json& schema, const char* key, std::int32_t fallback,
                            const std::string& place) {
    if (!schema.contains(key)) return fallback;
    const Json& value = schema[key];
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() <= kMostRepeats;
    if (!fits) {
      broken(place, "`" + std::string(key) + "` must be a whole number from 0 to " +
                        std::to_string(kMostRepeats));
    }
    return value.get<std::int32_t>();
  }

  NodeId string(const Json& schema, const std::string& place) {
    const std::int32_t least = count(schema, "minLength", 0, place);
    const std::int32_t most = count(schema, "maxLength", kUnbounded, place);
    if (!schema.contains("pattern")) {
      return least > most ? grammar_->choice({}) : text_.string(least, most);
    }
    if (schema.contains("minLength") || schema.contains("maxLength")) {
      refuse(place, "`pattern` beside `minLength` or `maxLength` is not supported");
    }
    const Json& pattern = schema["pattern"];
    if (!pattern.is_string()) broken(place, "`pattern` must be a string");
    const NodeId quote = grammar_->bytes("\"");
    try {
      const NodeId body = compile_pattern(
          pattern.get<std::string>(), Match::part,
          [&](const CodeSet& characters) { return text_.written(characters); }, *grammar_);
      return grammar_->sequence({quote, body, quote});
    } catch (const Error& error) {
      fail(error.code(), place, error.what());
    }
  }

  NodeId array(const Json& schema, const std::string& place) {
    const std::int32_t least = count(schema, "minItems", 0, place);
    const std::int32_t most = count(schema, "maxItems", kUnbounded, place);
    const NodeId item = schema.contains("items") ? this->schema(schema["items"], place + "/items")
                                                 : text_.any_value();
    return least > most ? grammar_->choice({}) : text_.array(item, least, most);
  }

  static std::vector<std::string> required(const Json& schema, const std::string& place) {
    if (!schema.contains("required")) return {};
    const Json& names = schema["required"];
    const auto is_string = [](const Json& name) { return name.is_string(); };
    if (!names.is_array() || !std::all_of(names.begin(), names.end(), is_string)) {
      broken(place, "`required` must be an array of strings");
    }
    return names.get<std::vector<std::string>>();
  }

  NodeId object(const Json& schema, const std::string& place) {
    static const Json kNone = Json::object();
    const Json& properties = schema.contains("properties") ? schema["properties"] : kNone;
    if (!properties.is_object()) broken(place, "`properties` must be an object");
    std::vector<std::string> wanted = required(schema, place);
    std::optional<NodeId> more = text_.any_value();
    if (schema.contains("additionalProperties")) {
      const Json& others = schema["additionalProperties"];
      const bool is_closed = others.is_boolean() && !others.get<bool>();
      more = is_closed ? std::nullopt
                       : std::optional(this->schema(others, place + "/additionalProperties"));
    }
    std::vector<std::string> names;
    std::vector<Member> members;
    std::sort(wanted.begin(), wanted.end());
    for (const auto& [name, inner] : properties.items()) {
      const NodeId value = this->schema(inner, place + "/properties" + step(name));
      names.push_back(name);
      members.push_back(
          {text_.member(name, value), std::binary_search(wanted.begin(), wanted.end(), name)});
    }
    // Required names without a schema of their own.
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    for (const std::string& name : wanted) {
      if (properties.contains(name)) continue;
      const NodeId value = more ? *more : grammar_->choice({});
      names.push_back(name);
      members.push_back({text_.member(name, value), true});
    }
    if (more) more = text_.other_member(names, *more);
    return text_.object(members, more);
  }

  const Json* root_;
  Grammar* grammar_;
  JsonText text_;
  std::map<std::string, NodeId> rules_;  // of references
  // References that are not compiled yet, and where they stand: not at once, because a chain of
  // them may be long.
  std::vector<std::pair<std::string, std::string>> pending_;
};

}  // namespace

void compile_json_schema(std::string_view schema, Grammar& grammar) {
  const Json root = parse(schema);
  Compiler(root, grammar).run();
}

void compile_json_object(Grammar& grammar) {
  JsonText text(grammar);
  grammar.finish(grammar.sequence({text.space(), text.any_object()}), "JSON");
}

}  // namespace sluice::constrain
