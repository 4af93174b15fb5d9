// JSON schemas for property tests: random ones, random documents that are valid under them, and a
// validator that is written from the standard and knows nothing of grammars.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "tests/support/random.h"

namespace sluice::testing {

using OrderedJson = nlohmann::ordered_json;

// Characters (code points) of valid UTF-8.
inline std::size_t characters(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

// Source: JSON Schema 2020-12, "Validation", for the keywords that random_schema() uses.
class SchemaOracle {
 public:
  explicit SchemaOracle(const OrderedJson& root) : root_(root) {}

  bool is_valid(const OrderedJson& value) const { return is_valid(root_, value); }

  bool is_valid(const OrderedJson& schema, const OrderedJson& value) const {
    if (schema.is_boolean()) return schema.get<bool>();
    for (const auto& [key, rule] : schema.items()) {
      if (!holds(schema, key, rule, value)) return false;
    }
    return true;
  }

 private:
  static bool is_type(const OrderedJson& type, const OrderedJson& value) {
    if (type.is_array()) {
      return std::any_of(type.begin(), type.end(),
                         [&](const OrderedJson& one) { return is_type(one, value); });
    }
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    return type == value.type_name();
  }

  bool holds(const OrderedJson& schema, const std::string& key, const OrderedJson& rule,
             const OrderedJson& value) const {
    if (key == "type") return is_type(rule, value);
    if (key == "const") return value == rule;
    if (key == "enum") return std::find(rule.begin(), rule.end(), value) != rule.end();
    if (key == "$ref") {
      return is_valid(root_.at(OrderedJson::json_pointer(rule.get<std::string>().substr(1))),
                      value);
    }
    if (key == "anyOf") {
      return std::any_of(rule.begin(), rule.end(),
                         [&](const OrderedJson& one) { return is_valid(one, value); });
    }
    if (value.is_string()) return string_holds(key, rule, value.get<std::string>());
    if (value.is_array()) return array_holds(key, rule, value);
    if (value.is_object()) return object_holds(schema, key, rule, value);
    return true;
  }

  static bool string_holds(const std::string& key, const OrderedJson& rule,
                           const std::string& text) {
    if (key == "minLength") return characters(text) >= rule.get<std::size_t>();
    if (key == "maxLength") return characters(text) <= rule.get<std::size_t>();
    if (key == "pattern") return std::regex_search(text, std::regex(rule.get<std::string>()));
    return true;
  }

  bool array_holds(const std::string& key, const OrderedJson& rule,
                   const OrderedJson& value) const {
    if (key == "minItems") return value.size() >= rule.get<std::size_t>();
    if (key == "maxItems") return value.size() <= rule.get<std::size_t>();
    if (key != "items") return true;
    return std::all_of(value.begin(), value.end(),
                       [&](const OrderedJson& item) { return is_valid(rule, item); });
  }

  bool object_holds(const OrderedJson& schema, const std::string& key, const OrderedJson& rule,
                    const OrderedJson& value) const {
    const OrderedJson properties = schema.value("properties", OrderedJson::object());
    for (const auto& [name, inner] : value.items()) {
      const bool is_known = properties.contains(name);
      if (key == "properties" && is_known && !is_valid(rule.at(name), inner)) return false;
      if (key == "additionalProperties" && !is_known && !is_valid(rule, inner)) return false;
    }
    if (key != "required") return true;
    return std::all_of(rule.begin(), rule.end(), [&](const OrderedJson& name) {
      return value.contains(name.get<std::string>());
    });
  }

  OrderedJson root_;
};

// Random schemas, and random documents with their properties in order.
class SchemaMaker {
 public:
  explicit SchemaMaker(std::uint64_t seed) : random_(seed) {}

  // Has two definitions; one is a recursive list.
  OrderedJson schema() {
    OrderedJson root = node(3);
    if (!root.is_object()) root = {{"anyOf", OrderedJson::array({root, {{"type", "null"}}})}};
    root["$defs"]["leaf"] = {{"type", "string"}, {"maxLength", 6}};
    root["$defs"]["tree"] = {
        {"type", "object"},
        {"properties",
         {{"value", {{"$ref", "#/$defs/leaf"}}},
          {"next", {{"type", "array"}, {"items", {{"$ref", "#/$defs/tree"}}}, {"maxItems", 2}}}}},
        {"required", {"value"}},
        {"additionalProperties", false}};
    return root;
  }

  // Valid under `schema`, a part of `root`.
  OrderedJson document(const OrderedJson& root, const OrderedJson& schema, int depth = 0) {
    if (schema.is_boolean()) return any(depth);
    if (schema.contains("$ref")) {
      const auto name = schema["$ref"].get<std::string>();
      return document(root, root.at(OrderedJson::json_pointer(name.substr(1))), depth + 1);
    }
    if (schema.contains("anyOf")) return document(root, one_of(schema["anyOf"]), depth);
    if (schema.contains("const")) return schema["const"];
    if (schema.contains("enum")) return one_of(schema["enum"]);
    if (!schema.contains("type")) return any(depth);
    const OrderedJson& types = schema["type"];
    return typed(root, schema, types.is_array() ? one_of(types) : types, depth);
  }

  bool chance(int percent) { return random_.integer(1, 100) <= percent; }
  std::int64_t number(std::int64_t low, std::int64_t high) { return random_.integer(low, high); }
  Random& random() { return random_; }

  std::string text(std::int64_t least, std::int64_t most) {
    static const std::vector<std::string> kCharacters = {
        "a", "b", "Z", "0", " ", "\"",     "\\",     "/",      "\n",         "\t", "\x01", "\x7f",
        "{", "}", "[", ",", ":", "\u00e9", "\u20ac", "\u4e2d", "\U0001F600", "e",  "t",    "n"};
    std::string text;
    for (std::int64_t left = number(least, most); left > 0; --left) text += pick(kCharacters);
    return text;
  }

 private:
  const std::string& pick(const std::vector<std::string>& list) {
    return list[static_cast<std::size_t>(number(0, std::ssize(list) - 1))];
  }
  OrderedJson one_of(const OrderedJson& list) {
    return list[static_cast<std::size_t>(number(0, static_cast<std::int64_t>(list.size()) - 1))];
  }

  OrderedJson node(int depth) {
    if (depth == 0) return leaf();
    switch (number(0, 7)) {
      case 0:
      case 1:
      case 2:
        return object(depth);
      case 3:
        return array(depth);
      case 4:
        return {{"anyOf", OrderedJson::array({node(depth - 1), node(depth - 1)})}};
      case 5:
        return {{"$ref", chance(50) ? "#/$defs/tree" : "#/$defs/leaf"}};
      default:
        return leaf();
    }
  }

  OrderedJson leaf() {
    switch (number(0, 8)) {
      case 0:
        return {{"type", "integer"}};
      case 1:
        return {{"type", "number"}};
      case 2:
        return {{"type", "boolean"}};
      case 3:
        return {{"type", OrderedJson::array({"null", "integer"})}};
      case 4:
        return {{"enum", OrderedJson::array({"red", "a\"b", 3, nullptr, {{"k", {1, 2}}}})}};
      case 5:
        return {{"const", text(0, 4)}};
      case 6:
        return {{"type", "string"}, {"pattern", pick(patterns())}};
      case 7: {
        const std::int64_t least = number(0, 4);
        return {{"type", "string"}, {"minLength", least}, {"maxLength", least + number(0, 5)}};
      }
      default:
        return {{"type", "string"}};
    }
  }

  // Those that example_of() has texts for.
  static const std::vector<std::string>& patterns() {
    static const std::vector<std::string> kPatterns = {"^[a-c]{2,4}$", "^x+(y|z)?$", "ab",
                                                       "^\"\\\\?$"};
    return kPatterns;
  }
  std::string example_of(const std::string& pattern) {
    if (pattern == patterns()[0]) return pick({"ab", "cca", "abcb"});
    if (pattern == patterns()[1]) return pick({"x", "xxxy", "xz"});
    if (pattern == patterns()[2]) return text(0, 3) + "ab" + text(0, 3);
    return pick({"\"", "\"\\"});
  }

  OrderedJson object(int depth) {
    OrderedJson schema = {{"type", "object"}};
    OrderedJson required = OrderedJson::array();
    for (std::int64_t left = number(0, 4); left > 0; --left) {
      const std::string name = pick({"name", "na", "age", "b\"c", "\u00e9t\u00e9", "x", "zz", ""});
      schema["properties"][name] = node(depth - 1);
      if (chance(50)) required.push_back(name);
    }
    if (!required.empty() || chance(20)) schema["required"] = required;
    if (chance(60)) {
      schema["additionalProperties"] = false;
    } else if (chance(50)) {
      schema["additionalProperties"] = leaf();
    }
    return schema;
  }

  OrderedJson array(int depth) {
    OrderedJson schema = {{"type", "array"}};
    if (chance(80)) schema["items"] = node(depth - 1);
    const std::int64_t least = number(0, 2);
    if (chance(50)) schema["minItems"] = least;
    if (chance(70)) schema["maxItems"] = least + number(0, 3);
    return schema;
  }

  OrderedJson any(int depth) {
    switch (number(0, depth > 4 ? 3 : 5)) {
      case 0:
        return number(-1000, 1000);
      case 1:
        return static_cast<double>(number(-1000, 1000)) / 8.0;
      case 2:
        return text(0, 6);
      case 3:
        return chance(50) ? OrderedJson(nullptr) : OrderedJson(chance(50));
      case 4: {
        OrderedJson list = OrderedJson::array();
        for (std::int64_t left = number(0, 3); left > 0; --left) list.push_back(any(depth + 1));
        return list;
      }
      default: {
        OrderedJson members = OrderedJson::object();
        for (std::int64_t left = number(0, 3); left > 0; --left) {
          members[text(0, 4)] = any(depth + 1);
        }
        return members;
      }
    }
  }

  OrderedJson typed(const OrderedJson& root, const OrderedJson& schema, const OrderedJson& type,
                    int depth) {
    if (type == "integer") return number(-100000, 100000);
    if (type == "number") return static_cast<double>(number(-100000, 100000)) / 64.0;
    if (type == "boolean") return chance(50);
    if (type == "null") return nullptr;
    if (type == "string") {
      if (schema.contains("pattern")) return example_of(schema["pattern"]);
      const auto least = schema.value("minLength", std::int64_t{0});
      return text(least, schema.value("maxLength", least + 5));
    }
    if (type == "array") {
      const auto least = schema.value("minItems", std::int64_t{0});
      const auto most = schema.value("maxItems", least + 2);
      OrderedJson list = OrderedJson::array();
      for (std::int64_t left = depth > 6 ? least : number(least, most); left > 0; --left) {
        list.push_back(document(root, schema.value("items", OrderedJson(true)), depth + 1));
      }
      return list;
    }
    return members(root, schema, depth);
  }

  OrderedJson members(const OrderedJson& root, const OrderedJson& schema, int depth) {
    OrderedJson value = OrderedJson::object();
    const OrderedJson required = schema.value("required", OrderedJson::array());
    const OrderedJson properties = schema.value("properties", OrderedJson::object());
    for (const auto& [name, inner] : properties.items()) {
      const bool is_required =
          std::find(required.begin(), required.end(), OrderedJson(name)) != required.end();
      const bool is_wanted = is_required || (depth < 6 && chance(60));
      if (is_wanted) value[name] = document(root, inner, depth + 1);
    }
    const OrderedJson more = schema.value("additionalProperties", OrderedJson(true));
    const bool is_closed = more.is_boolean() && !more.get<bool>();
    for (std::int64_t left = is_closed ? 0 : number(0, 2); left > 0; --left) {
      const std::string name = pick({"n", "nam", "names", "b\"", "q", "\u00e9t", "\n"});
      if (!properties.contains(name)) value[name] = document(root, more, depth + 1);
    }
    return value;
  }

  Random random_;
};

}  // namespace sluice::testing
