// What stands beside a checkpoint's tokenizer.json: the chat template, the tokens that it may refer
// to, and whether texts begin with one.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace sluice {

struct ChatSource {
  std::filesystem::path file;
  std::string text;  // UTF-8
  // By the names that templates have for them: "bos_token", "eos_token" and so on.
  std::vector<std::pair<std::string, std::string>> tokens;
};

// From chat_template.jinja, chat_template.json or tokenizer_config.json, the first that has one,
// and the tokens from tokenizer_config.json or special_tokens_map.json. Throws Error{unsupported}
// if none has a template, Error{corrupt} for files that are broken.
ChatSource read_chat_source(const std::filesystem::path& checkpoint);

// Whether a text to continue begins with the BOS token, for a tokenizer.json that does not say:
// yes, unless tokenizer_config.json has "add_bos_token": false or "bos_token": null. Throws
// Error{corrupt} for a file that is broken.
bool prompts_begin_with_bos(const std::filesystem::path& checkpoint);

}  // namespace sluice
