// A body of /v1/chat/completions if it has "messages", of /v1/completions otherwise. What is
// accepted are requests within the server's limits, for which the answer can be written.
#include "sluice/constraint.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/small_engine.h"
#include "tools/serve/completion.h"

namespace sluice::fuzz {
namespace {

constexpr std::int64_t kContext = 512;
constexpr std::int64_t kMostTokens = 64;
constexpr int kMostChoices = 4;

tools::ServedModel served() {
  static const Constraints constraints(small_engine().tokenizer());
  tools::ServedModel model;
  model.engine = &small_engine();
  model.chat = &small_chat();
  model.constraints = &constraints;
  model.name = "small";
  model.context = kContext;
  model.most_tokens = kMostTokens;
  model.most_choices = kMostChoices;
  return model;
}

void hold_request(const Request& request) {
  const SamplingParams& sampling = request.sampling;
  require(sampling.max_tokens >= 0 && sampling.max_tokens <= kMostTokens, "max_tokens are allowed");
  require(request.choices >= 1 && request.choices <= kMostChoices, "choices are allowed");
  require(request.logprobs.value_or(0) >= 0 && request.logprobs.value_or(0) <= 20,
          "logprobs are allowed");
  require(!request.constraint || !request.ignore_eos, "a constraint may end the answer");
  for (const std::string& stop : sampling.stop) {
    require(!invalid_utf8_at(stop), "stop strings are UTF-8");
  }
}

std::string hold(const tools::Completion& completion) {
  require(!completion.requests.empty(), "there is a request");
  for (const Request& request : completion.requests) hold_request(request);
  const Request& first = completion.requests.front();
  tools::ChoiceWriter writer(completion, small_engine().tokenizer(), 0);
  nlohmann::json answer = tools::envelope(completion, completion.streams);
  answer["choices"].push_back(
      writer.part("x", {{65, -1.0f, {{66, -2.0f}}}}, FinishReason::max_tokens, completion.streams));
  require(!answer.dump().empty(), "the answer can be written");
  std::string text = completion.is_chat ? "chat" : "text";
  if (completion.requests.size() > 1) text += " prompts";
  if (completion.choices > 1) text += " choices";
  if (completion.echo) text += " echo";
  if (completion.logprobs) text += " logprobs";
  if (completion.streams) text += completion.streams_usage ? " usage" : " stream";
  if (first.constraint) text += " constraint";
  if (first.policy) text += " policy";
  if (!first.sampling.stop.empty()) text += " stop";
  if (!first.rules.bias.empty()) text += " bias";
  return text;
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& /*folder*/) {
  const bool is_chat = input.find("\"messages\"") != std::string_view::npos;
  return answer_of(
      {ErrorCode::usage, ErrorCode::prompt, ErrorCode::tokenizer, ErrorCode::not_found,
       ErrorCode::unsupported},
      [&] {
        return is_chat ? tools::read_chat(input, served())
                       : tools::read_completion(input, served());
      },
      hold);
}

}  // namespace sluice::fuzz
