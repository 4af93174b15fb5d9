#include "model/tokenizer_config.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "io/file.h"
#include "io/json.h"
#include "model/json_object.h"
#include "model/utf8.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxFile = std::uint64_t{16} << 20;   // tokenizer_config.json lists tokens
constexpr std::size_t kMaxTemplate = std::size_t{128} << 10;  // those in use have up to 20 KiB

[[noreturn]] void throw_broken(const std::filesystem::path& file, const std::string& what) {
  throw Error(ErrorCode::corrupt,
              file.string() + ": " + what + "; take the file of the checkpoint unchanged");
}

// A token is written as its text, or as an object that has it as "content". Empty: there is none.
std::string token_of(const Json& token, const char* key, const std::filesystem::path& file) {
  if (token.is_null()) return {};
  const Json* text = &token;
  if (text->is_object() && text->contains("content")) text = &text->at("content");
  if (!text->is_string()) throw_broken(file, std::string(key) + " is no token");
  return text->get<std::string>();
}

// A template is a string, or the one that is called "default" in a list of them.
std::optional<std::string> template_of(const Json& value, const std::filesystem::path& file) {
  if (value.is_null()) return std::nullopt;
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) throw_broken(file, "chat_template is neither a string nor a list");
  for (const Json& entry : value) {
    if (!entry.is_object() || !entry.contains("name") || !entry.contains("template") ||
        !entry["template"].is_string()) {
      throw_broken(file, "chat_template has an entry without name and template");
    }
    if (entry["name"] == "default") return entry["template"].get<std::string>();
  }
  throw Error(ErrorCode::unsupported,
              file.string() + ": chat_template has no entry called 'default'");
}

Json read_object(const std::filesystem::path& file) {
  Json json = read_json_file(file, kMaxFile);
  if (!json.is_object()) throw_broken(file, "is no JSON object");
  return json;
}

// What the first of two files says about each token.
void read_tokens(const Json& config, const std::filesystem::path& config_file,
                 const std::filesystem::path& map_file, ChatSource& source) {
  const Json map = file_exists(map_file) ? read_object(map_file) : Json::object();
  for (const char* key : {"bos_token", "eos_token", "unk_token", "pad_token"}) {
    const bool in_config = config.contains(key);
    if (!in_config && !map.contains(key)) continue;
    std::string text =
        in_config ? token_of(config[key], key, config_file) : token_of(map[key], key, map_file);
    if (!text.empty()) source.tokens.emplace_back(key, std::move(text));
  }
}

}  // namespace

// The order is that of transformers.
ChatSource read_chat_source(const std::filesystem::path& checkpoint) {
  ChatSource source;
  Json config = Json::object();
  const std::filesystem::path config_file = checkpoint / "tokenizer_config.json";
  if (file_exists(config_file)) config = read_object(config_file);
  read_tokens(config, config_file, checkpoint / "special_tokens_map.json", source);
  std::optional<std::string> text;
  source.file = checkpoint / "chat_template.jinja";
  if (file_exists(source.file)) text = read_text_file(source.file, kMaxTemplate);
  for (const char* name : {"chat_template.json", "tokenizer_config.json"}) {
    if (text) break;
    source.file = checkpoint / name;
    if (!file_exists(source.file)) continue;
    const Json json = name == config_file.filename() ? config : read_object(source.file);
    text = template_of(json.value("chat_template", Json()), source.file);
  }
  if (!text) {
    throw Error(ErrorCode::unsupported,
                checkpoint.string() +
                    ": this checkpoint has no chat template, so nothing says how a conversation is "
                    "written for it; give generate a prompt to continue instead");
  }
  if (text->size() > kMaxTemplate)
    throw_broken(source.file, "chat_template is larger than 128 KiB");
  if (const auto offset = find_invalid_utf8(*text)) {
    throw_broken(source.file, "chat_template is not UTF-8 at offset " + std::to_string(*offset));
  }
  source.text = *std::move(text);
  return source;
}

bool prompts_begin_with_bos(const std::filesystem::path& checkpoint) {
  const std::filesystem::path file = checkpoint / "tokenizer_config.json";
  if (!file_exists(file)) return true;
  const Json json = read_object(file);
  const JsonObject config(json, file);
  const bool has_none = config.contains("bos_token") && !config.has("bos_token");
  return config.boolean("add_bos_token", true) && !has_none;
}

}  // namespace sluice
