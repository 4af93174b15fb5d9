#include "engine/tokenizer_config.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "engine/special_tokens.h"
#include "engine/utf8.h"
#include "io/file.h"
#include "io/json.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxConfigFile = std::uint64_t{16}
                                         << 20;               // tokenizer_config.json lists tokens
constexpr std::size_t kMaxTemplate = std::size_t{128} << 10;  // those in use have up to 20 KiB

[[noreturn]] void throw_broken_config(const std::filesystem::path& file, const std::string& what) {
  throw Error(ErrorCode::corrupt,
              file.string() + ": " + what + "; take the file of the checkpoint unchanged");
}

// A template is a string, or the one that is called "default" in a list of them.
std::optional<std::string> template_of(const Json& value, const std::filesystem::path& file) {
  if (value.is_null()) return std::nullopt;
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) throw_broken_config(file, "chat_template is neither a string nor a list");
  for (const Json& entry : value) {
    if (!entry.is_object() || !entry.contains("name") || !entry.contains("template") ||
        !entry["template"].is_string()) {
      throw_broken_config(file, "chat_template has an entry without name and template");
    }
    if (entry["name"] == "default") return entry["template"].get<std::string>();
  }
  throw Error(ErrorCode::unsupported,
              file.string() + ": chat_template has no entry called 'default'");
}

Json read_object(const std::filesystem::path& file) {
  Json json = read_json_file(file, kMaxConfigFile);
  if (!json.is_object()) throw_broken_config(file, "is no JSON object");
  return json;
}

}  // namespace

// The order is that of transformers.
ChatSource read_chat_source(const std::filesystem::path& checkpoint) {
  ChatSource source;
  Json config = Json::object();
  const std::filesystem::path config_file = checkpoint / "tokenizer_config.json";
  if (file_exists(config_file)) config = read_object(config_file);
  source.tokens = read_token_names(checkpoint);
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
  if (!text) throw_no_chat_template(checkpoint);
  source.text = *std::move(text);
  check_chat_template(source);
  return source;
}

void check_chat_template(const ChatSource& source) {
  if (source.text.size() > kMaxTemplate) {
    throw_broken_config(source.file, "chat_template is larger than 128 KiB");
  }
  if (const auto offset = find_invalid_utf8(source.text)) {
    throw_broken_config(source.file,
                        "chat_template is not UTF-8 at offset " + std::to_string(*offset));
  }
}

void throw_no_chat_template(const std::filesystem::path& checkpoint) {
  throw Error(ErrorCode::unsupported,
              checkpoint.string() +
                  ": this checkpoint has no chat template, so nothing says how a conversation is "
                  "written for it; give generate a prompt to continue instead");
}

}  // namespace sluice
