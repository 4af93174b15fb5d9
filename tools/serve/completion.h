// Bodies of /v1/completions and /v1/chat/completions, and the objects that answer them.
// Source: OpenAI's API reference, "Completions" and "Chat".
#pragma once

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/batcher.h"
#include "sluice/chat.h"
#include "sluice/constraint.h"
#include "sluice/engine.h"

namespace sluice::tools {

// The context in which all requests are read.
struct ServedModel {
  Engine* engine = nullptr;
  const ChatFormat* chat = nullptr;  // null: the checkpoint has no template
  const Constraints* constraints = nullptr;
  std::string name;
  std::int64_t context = 0;
  std::int64_t most_tokens = 0;  // of an answer
  int most_choices = 1;
  std::chrono::seconds most_time{0};
};

struct Completion {
  bool is_chat = false;
  std::vector<Request> requests;  // one for each prompt
  int choices = 1;                // of each
  bool echo = false;              // the prompt's text stands before the answer
  bool logprobs = false;
  bool streams = false;
  bool streams_usage = false;
  std::string id;
  std::int64_t created = 0;
  std::string model;
};

// Throw Error{usage}, {prompt}, {tokenizer}, {not_found} or {unsupported} for what a body may not
// say.
Completion read_completion(std::string_view body, const ServedModel& served);
Completion read_chat(std::string_view body, const ServedModel& served);

// The text of one choice and its log probabilities, as they grow.
class ChoiceWriter {
 public:
  ChoiceWriter(const Completion& completion, const Tokenizer& tokenizer, int index)
      : completion_(&completion), tokenizer_(&tokenizer), index_(index) {}

  // The entry of `choices` for a part of the answer.
  nlohmann::json part(const std::string& text, const std::vector<ScoredToken>& tokens,
                      std::optional<FinishReason> reason, bool is_delta);

 private:
  nlohmann::json completion_logprobs(const std::vector<ScoredToken>& tokens);
  nlohmann::json chat_logprobs(const std::vector<ScoredToken>& tokens) const;
  std::string text_of(TokenId id) const;
  // The offset of the next token in the text, in characters.
  std::size_t take_offset(TokenId id);

  const Completion* completion_;
  const Tokenizer* tokenizer_;
  int index_;
  std::size_t characters_ = 0;  // that tokens so far have begun
  bool has_begun_ = false;
};

// The object around choices.
nlohmann::json envelope(const Completion& completion, bool is_delta);
nlohmann::json usage_json(const std::vector<Usage>& usages);
// `code` is null if empty.
nlohmann::json error_json(const std::string& message, const std::string& type,
                          std::string_view code);

}  // namespace sluice::tools
