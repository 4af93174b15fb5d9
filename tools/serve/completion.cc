#include "tools/serve/completion.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <random>
#include <utility>

#include "lib/text.h"
#include "sluice/errors.h"
#include "tools/serve/constraint_field.h"
#include "tools/serve/fields.h"

namespace sluice::tools {
namespace {

constexpr int kMostPriority = 100;
constexpr std::size_t kMostPrompts = 128;
constexpr std::size_t kMostStops = 16;

std::string new_id(const char* prefix) {
  thread_local std::mt19937_64 random(std::random_device{}());
  std::array<char, 17> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + 16, random(), 16).ptr;
  return prefix + std::string(digits.data(), end);
}

std::vector<std::string> read_stops(const Fields& fields) {
  const nlohmann::json* const stop = fields.find("stop");
  if (stop == nullptr) return {};
  if (stop->is_string()) return {stop->get<std::string>()};
  if (!stop->is_array() || stop->size() > kMostStops ||
      !std::all_of(stop->begin(), stop->end(), [](const auto& one) { return one.is_string(); })) {
    refuse("`stop` must be a string or an array of up to 16 strings");
  }
  return stop->get<std::vector<std::string>>();
}

std::vector<LogitBias> read_bias(const Fields& fields) {
  const nlohmann::json* const bias = fields.find("logit_bias");
  if (bias == nullptr) return {};
  if (!bias->is_object()) refuse("`logit_bias` must be an object of token ids and numbers");
  std::vector<LogitBias> all;
  for (const auto& [key, value] : bias->items()) {
    LogitBias one;
    const auto [stop, status] = std::from_chars(key.data(), key.data() + key.size(), one.token);
    if (status != std::errc{} || stop != key.data() + key.size() || !value.is_number()) {
      refuse("`logit_bias` must be an object of token ids and numbers");
    }
    one.bias = value.get<double>();
    all.push_back(one);
  }
  return all;
}

// Fields that both kinds have.
Request read_request(const Fields& fields, std::string_view body, const ServedModel& served,
                     Completion& completion) {
  Request request;
  completion.model = fields.string("model").value_or(served.name);
  if (completion.model != served.name) {
    throw Error(ErrorCode::not_found, "there is no model " + in_quotes(completion.model) +
                                          "; this server has " + in_quotes(served.name));
  }
  SamplingParams& sampling = request.sampling;
  sampling.temperature = fields.number("temperature", 1.0);
  sampling.top_p = fields.number("top_p", 1.0);
  sampling.min_p = fields.number("min_p", 0.0);
  sampling.top_k = static_cast<int>(fields.integer("top_k", 0, INT32_MAX, 0));
  sampling.repetition_penalty = fields.number("repetition_penalty", 1.0);
  sampling.stop = read_stops(fields);
  const bool has_seed = fields.find("seed") != nullptr;
  sampling.seed = has_seed
                      ? static_cast<std::uint64_t>(fields.integer("seed", INT64_MIN, INT64_MAX, 0))
                      : std::uint64_t{std::random_device{}()};
  request.rules.presence_penalty = fields.number("presence_penalty", 0.0);
  request.rules.frequency_penalty = fields.number("frequency_penalty", 0.0);
  request.rules.bias = read_bias(fields);
  request.ignore_eos = fields.boolean("ignore_eos", false);
  request.constraint = read_constraint(fields, body, *served.constraints);
  if (request.constraint && request.ignore_eos) {
    refuse("`ignore_eos` cannot be used beside `response_format`, `regex` or `grammar`");
  }
  request.priority = static_cast<int>(fields.integer("priority", -kMostPriority, kMostPriority, 0));
  if (const auto policy = fields.string("policy")) {
    request.policy = served.engine->policy(*policy);
  }
  completion.choices = static_cast<int>(fields.integer("n", 1, served.most_choices, 1));
  request.choices = completion.choices;
  static_cast<void>(fields.string("user"));  // a string, of the client's own
  completion.streams = fields.boolean("stream", false);
  if (const nlohmann::json* const options = fields.find("stream_options")) {
    if (!options->is_object()) refuse("`stream_options` must be an object");
    if (!completion.streams) refuse("`stream_options` is for a `stream`");
    const Fields known(*options);
    known.require_known({"include_usage"});
    completion.streams_usage = known.boolean("include_usage", false);
  }
  completion.created = std::chrono::duration_cast<std::chrono::seconds>(
                           std::chrono::system_clock::now().time_since_epoch())
                           .count();
  if (served.most_time.count() > 0) {
    request.deadline = std::chrono::steady_clock::now() + served.most_time;
  }
  return request;
}

// The most tokens of an answer if the request does not say.
int room_for(const ServedModel& served, const Request& request) {
  const std::int64_t room = served.context - std::ssize(request.prompt) + 1;
  return static_cast<int>(std::clamp<std::int64_t>(room, 1, served.most_tokens));
}

// One token id of a prompt. Its range is checked with the prompt.
TokenId read_id(const nlohmann::json& value) {
  if (!value.is_number_integer()) refuse("`prompt`: token ids must be whole numbers");
  const bool is_huge = value.is_number_unsigned() && value.get<std::uint64_t>() > INT32_MAX;
  const std::int64_t id = is_huge ? INT64_MAX : value.get<std::int64_t>();
  if (id < INT32_MIN || id > INT32_MAX) {
    refuse("`prompt`: token id " + value.dump() + " is outside every vocabulary");
  }
  return static_cast<TokenId>(id);
}

std::vector<TokenId> read_ids(const nlohmann::json& list) {
  std::vector<TokenId> ids;
  for (const nlohmann::json& value : list) ids.push_back(read_id(value));
  return ids;
}

// A string, token ids, or an array of either.
std::vector<std::vector<TokenId>> read_prompts(const nlohmann::json* prompt, const Engine& engine) {
  if (prompt == nullptr) refuse("`prompt` is missing");
  const auto one = [&](const nlohmann::json& value) {
    if (value.is_string()) return engine.encode_prompt(value.get<std::string>());
    if (value.is_array()) return read_ids(value);
    refuse("`prompt` must be a string, an array of token ids, or an array of either");
  };
  const bool several = prompt->is_array() && !prompt->empty() && !prompt->front().is_number();
  if (!several) return {one(*prompt)};
  if (prompt->size() > kMostPrompts) refuse("`prompt`: more than 128 prompts");
  std::vector<std::vector<TokenId>> prompts;
  for (const nlohmann::json& value : *prompt) prompts.push_back(one(value));
  return prompts;
}

std::string read_content(const nlohmann::json& message) {
  const Fields fields(message);
  const nlohmann::json* const content = fields.find("content");
  if (content == nullptr) refuse("`messages`: a message has no `content`");
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) refuse("`messages`: `content` must be a string or an array of parts");
  std::string text;
  for (const nlohmann::json& part : *content) {
    if (!part.is_object() || Fields(part).string("type").value_or("") != "text") {
      refuse("`messages`: only parts of the type text are understood");
    }
    text += Fields(part).string("text").value_or("");
  }
  return text;
}

struct Conversation {
  std::string system;
  std::vector<ChatTurn> turns;
};

// A system message first, if any; then users and assistants by turns, a user at last.
Conversation read_messages(const Fields& fields) {
  const nlohmann::json* const messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty()) {
    refuse("`messages` must be an array of at least one message");
  }
  Conversation talk;
  bool answers_next = false;
  for (const nlohmann::json& message : *messages) {
    if (!message.is_object()) refuse("`messages`: a message must be an object");
    const std::string role = Fields(message).string("role").value_or("");
    std::string content = read_content(message);
    if ((role == "system" || role == "developer") && &message == &messages->front()) {
      talk.system = std::move(content);
    } else if (role == "user" && !answers_next) {
      talk.turns.push_back({std::move(content), {}, {}});
      answers_next = true;
    } else if (role == "assistant" && answers_next) {
      talk.turns.back().answer = std::move(content);
      answers_next = false;
    } else {
      refuse(
          "`messages`: after an optional system message, user and assistant must take turns, "
          "not " +
          in_quotes(role) + " here");
    }
  }
  if (!answers_next) refuse("`messages`: the last message must be a user's");
  return talk;
}

nlohmann::json finite(float logprob) {
  // JSON has no infinity; the API gives -9999 for it.
  return std::isfinite(logprob) ? nlohmann::json(logprob) : nlohmann::json(-9999.0);
}

const char* reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::end_of_text:
    case FinishReason::stop_string:
      return "stop";
    case FinishReason::max_tokens:
    case FinishReason::deadline:
      return "length";
    case FinishReason::interrupted:
      return "abort";
  }
  return "stop";
}

// Fields that both kinds of completion take.
constexpr auto kCommonFields = std::to_array<std::string_view>({"model",
                                                                "temperature",
                                                                "top_p",
                                                                "min_p",
                                                                "top_k",
                                                                "repetition_penalty",
                                                                "stop",
                                                                "seed",
                                                                "presence_penalty",
                                                                "frequency_penalty",
                                                                "logit_bias",
                                                                "ignore_eos",
                                                                "priority",
                                                                "policy",
                                                                "n",
                                                                "stream",
                                                                "stream_options",
                                                                "logprobs",
                                                                "user",
                                                                "response_format",
                                                                "regex",
                                                                "grammar"});

}  // namespace

Completion read_completion(std::string_view body, const ServedModel& served) {
  const nlohmann::json json = parse_body(body);
  const Fields fields(json);
  fields.require_known({"prompt", "max_tokens", "best_of", "echo", "suffix"}, kCommonFields);
  Completion completion;
  completion.id = new_id("cmpl-");
  Request request = read_request(fields, body, served, completion);
  if (fields.find("suffix") != nullptr) refuse("`suffix` is not supported");
  if (fields.integer("best_of", 1, 1024, completion.choices) != completion.choices) {
    refuse("`best_of` must equal `n`");
  }
  completion.echo = fields.boolean("echo", false);
  request.sampling.max_tokens = static_cast<int>(fields.integer(
      "max_tokens", 0, served.most_tokens, std::min<std::int64_t>(16, served.most_tokens)));
  if (fields.find("logprobs") != nullptr) {
    completion.logprobs = true;
    request.logprobs = static_cast<int>(fields.integer("logprobs", 0, 20, 0));
    if (completion.echo) request.prompt_logprobs = request.logprobs;
  }
  for (std::vector<TokenId>& prompt : read_prompts(fields.find("prompt"), *served.engine)) {
    completion.requests.push_back(request);
    completion.requests.back().prompt = std::move(prompt);
  }
  return completion;
}

Completion read_chat(std::string_view body, const ServedModel& served) {
  const nlohmann::json json = parse_body(body);
  const Fields fields(json);
  fields.require_known({"messages", "max_tokens", "max_completion_tokens", "top_logprobs"},
                       kCommonFields);
  if (served.chat == nullptr) refuse("this checkpoint has no chat template; use /v1/completions");
  Completion completion;
  completion.is_chat = true;
  completion.id = new_id("chatcmpl-");
  Request request = read_request(fields, body, served, completion);
  const Conversation talk = read_messages(fields);
  request.prompt = served.chat->render(talk.system, talk.turns);
  request.end_tokens.assign(served.chat->end_tokens().begin(), served.chat->end_tokens().end());
  const bool is_new = fields.find("max_completion_tokens") != nullptr;
  request.sampling.max_tokens =
      static_cast<int>(fields.integer(is_new ? "max_completion_tokens" : "max_tokens", 1,
                                      served.most_tokens, room_for(served, request)));
  completion.logprobs = fields.boolean("logprobs", false);
  const auto top = static_cast<int>(fields.integer("top_logprobs", 0, 20, 0));
  if (completion.logprobs) request.logprobs = top;
  completion.requests.push_back(std::move(request));
  return completion;
}

std::string ChoiceWriter::text_of(TokenId id) const { return tokenizer_->decode({&id, 1}, true); }

// A token that begins within a character has that character's offset.
std::size_t ChoiceWriter::take_offset(TokenId id) {
  std::string bytes(tokenizer_->bytes(id));
  if (bytes.empty()) bytes = text_of(id);  // a special token
  const auto continues = [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xc0) == 0x80;
  };
  const bool is_within = !bytes.empty() && continues(bytes.front()) && characters_ > 0;
  const std::size_t offset = characters_ - (is_within ? 1 : 0);
  characters_ +=
      bytes.size() - static_cast<std::size_t>(std::count_if(bytes.begin(), bytes.end(), continues));
  return offset;
}

nlohmann::json ChoiceWriter::completion_logprobs(const std::vector<ScoredToken>& tokens) {
  nlohmann::json texts = nlohmann::json::array();
  nlohmann::json logprobs = nlohmann::json::array();
  nlohmann::json tops = nlohmann::json::array();
  nlohmann::json offsets = nlohmann::json::array();
  for (const ScoredToken& token : tokens) {
    const std::string text = text_of(token.token);
    const bool is_first = std::isnan(token.logprob);  // of the prompt: nothing stands before it
    offsets.push_back(take_offset(token.token));
    texts.push_back(text);
    logprobs.push_back(is_first ? nlohmann::json() : finite(token.logprob));
    nlohmann::json top = is_first ? nlohmann::json() : nlohmann::json::object();
    for (const TokenLogprob& one : token.top) top[text_of(one.token)] = finite(one.logprob);
    tops.push_back(std::move(top));
  }
  return {{"tokens", texts},
          {"token_logprobs", logprobs},
          {"top_logprobs", tops},
          {"text_offset", offsets}};
}

nlohmann::json ChoiceWriter::chat_logprobs(const std::vector<ScoredToken>& tokens) const {
  const auto entry = [&](TokenId id, float logprob) {
    const std::string text = text_of(id);
    nlohmann::json bytes = nlohmann::json::array();
    for (const char byte : tokenizer_->bytes(id)) bytes.push_back(static_cast<unsigned char>(byte));
    return nlohmann::json{{"token", text}, {"logprob", finite(logprob)}, {"bytes", bytes}};
  };
  nlohmann::json content = nlohmann::json::array();
  for (const ScoredToken& token : tokens) {
    nlohmann::json one = entry(token.token, token.logprob);
    one["top_logprobs"] = nlohmann::json::array();
    for (const TokenLogprob& top : token.top) {
      one["top_logprobs"].push_back(entry(top.token, top.logprob));
    }
    content.push_back(std::move(one));
  }
  return {{"content", content}};
}

nlohmann::json ChoiceWriter::part(const std::string& text, const std::vector<ScoredToken>& tokens,
                                  std::optional<FinishReason> reason, bool is_delta) {
  nlohmann::json choice = {{"index", index_}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
  if (reason) choice["finish_reason"] = reason_name(*reason);
  if (completion_->logprobs) {
    choice["logprobs"] = completion_->is_chat ? chat_logprobs(tokens) : completion_logprobs(tokens);
  }
  if (!completion_->is_chat) {
    choice["text"] = text;
    return choice;
  }
  nlohmann::json message = {{"content", text}};
  if (!std::exchange(has_begun_, true)) message["role"] = "assistant";
  choice[is_delta ? "delta" : "message"] = std::move(message);
  return choice;
}

nlohmann::json envelope(const Completion& completion, bool is_delta) {
  const char* const chat = is_delta ? "chat.completion.chunk" : "chat.completion";
  return {{"id", completion.id},
          {"object", completion.is_chat ? chat : "text_completion"},
          {"created", completion.created},
          {"model", completion.model},
          {"choices", nlohmann::json::array()}};
}

nlohmann::json usage_json(const std::vector<Usage>& usages) {
  Usage sum;
  for (const Usage& one : usages) {
    sum.prompt_tokens += one.prompt_tokens;
    sum.answer_tokens += one.answer_tokens;
    sum.reused_tokens += one.reused_tokens;
  }
  return {{"prompt_tokens", sum.prompt_tokens},
          {"completion_tokens", sum.answer_tokens},
          {"total_tokens", sum.prompt_tokens + sum.answer_tokens},
          {"prompt_tokens_details", {{"cached_tokens", sum.reused_tokens}}}};
}

nlohmann::json error_json(const std::string& message, const std::string& type,
                          std::string_view code) {
  nlohmann::json error = {
      {"message", message}, {"type", type}, {"param", nullptr}, {"code", nullptr}};
  if (!code.empty()) error["code"] = code;
  return {{"error", std::move(error)}};
}

}  // namespace sluice::tools
