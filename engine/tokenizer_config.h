// The chat template of a checkpoint, and the tokens that it may refer to.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace sluice {

struct ChatSource {
  std::filesystem::path file;
  std::string text;  // UTF-8
  // (name in templates, text): "bos_token", "eos_token" and so on.
  std::vector<std::pair<std::string, std::string>> tokens;
};

// Reads the template from the first of chat_template.jinja, chat_template.json and
// tokenizer_config.json that has one, and the tokens as read_special_tokens() does. Throws
// Error{unsupported} if none has a template, Error{corrupt} for files that are broken, and what
// read_special_tokens() throws.
ChatSource read_chat_source(const std::filesystem::path& checkpoint);

// Throws Error{corrupt} if the template is larger than any in use, or no UTF-8.
void check_chat_template(const ChatSource& source);
// Throws the error of a checkpoint without a chat template.
[[noreturn]] void throw_no_chat_template(const std::filesystem::path& checkpoint);

}  // namespace sluice
