// The chat template that stands beside a checkpoint's tokenizer.json, and the tokens that it may
// refer to.
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
// and the tokens as read_special_tokens() has them. Throws Error{unsupported} if none has a
// template, Error{corrupt} for files that are broken, and what read_special_tokens() throws.
ChatSource read_chat_source(const std::filesystem::path& checkpoint);

}  // namespace sluice
