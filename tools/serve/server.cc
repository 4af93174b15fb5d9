#include "tools/serve/server.h"

#include <httplib.h>
#include <sys/resource.h>

#include <functional>
#include <thread>
#include <utility>

#include "io/json.h"
#include "lib/current_error.h"
#include "lib/process_limits.h"
#include "sluice/errors.h"
#include "sluice/version.h"
#include "tools/serve/fields.h"
#include "tools/serve/metrics.h"
#include "tools/serve/page.h"

namespace sluice::tools {
namespace {

using Json = nlohmann::json;

void set_json(httplib::Response& response, const Json& json) {
  response.set_content(dump_json(json), "application/json");
}

struct Fault {
  int status;
  const char* type;
  std::string_view code;  // of Sluice's error; empty for those of HTTP
};

Fault fault_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::usage:
    case ErrorCode::prompt:
    case ErrorCode::tokenizer:
    case ErrorCode::unsupported:
      return {400, "invalid_request_error", to_string(code)};
    case ErrorCode::not_found:
      return {404, "invalid_request_error", to_string(code)};
    case ErrorCode::memory:
      return {429, "rate_limit_error", to_string(code)};
    default:
      return {500, "server_error", to_string(code)};
  }
}

void set_error(httplib::Response& response, const Fault& fault, const std::string& message) {
  response.status = fault.status;
  set_json(response, error_json(message, fault.type, fault.code));
}

// Why a request's Content-Length is refused, or null. httplib would wait for as many bytes as it
// says, and without one until the connection ends.
const char* length_fault(const httplib::Request& request) {
  if (request.method != "POST" || request.has_header("Transfer-Encoding")) return nullptr;
  if (!request.has_header("Content-Length")) return "Content-Length is missing";
  constexpr std::size_t kMostDigits = 15;
  const std::string length = request.get_header_value("Content-Length");
  const bool is_number = !length.empty() && length.size() <= kMostDigits &&
                         length.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? nullptr : "Content-Length is no length";
}

// Lets httplib treat a form as any other body, because `curl -d` calls every body a form, and
// httplib refuses forms above 8 KiB.
void forget_form(const httplib::Request& request) {
  const std::string form = "application/x-www-form-urlencoded";
  if (request.get_header_value("Content-Type").rfind(form, 0) != 0) return;
  // httplib hands out its own request, which is not const, before it reads the body.
  const_cast<httplib::Request&>(request).headers.erase("Content-Type");
}

// Takes as long whatever is the first byte that differs.
bool is_same(const std::string& a, const std::string& b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const char other = b.empty() ? '\0' : b[i % b.size()];
    difference |= static_cast<unsigned char>(a[i] ^ other);
  }
  return difference == 0;
}

// The streams of a completion, read in the order of its prompts.
struct Answers {
  Completion completion;
  std::vector<Stream> streams;
  std::vector<ChoiceWriter> writers;  // by prompt, then choice
  std::size_t reading = 0;            // of the streams
  std::vector<bool> has_prompt;       // by choice: its part with the prompt was written

  std::vector<Usage> usages() const {
    std::vector<Usage> all;
    for (const Stream& stream : streams) all.push_back(stream.usage());
    return all;
  }
};

}  // namespace

struct HttpServer::Impl {
  ServerOptions options;
  ServedModel served;
  Batcher* batcher;
  httplib::Server http;
  std::atomic<bool> refuses = false;
  std::atomic<bool> has_ended = false;  // run()
  int port = 0;

  void set_up();
  bool is_allowed(const httplib::Request& request) const;
  // Answers with what `handle` does; errors become OpenAI's error object.
  httplib::Server::Handler guarded(
      std::function<void(const httplib::Request&, httplib::Response&)> handle) const;

  std::shared_ptr<Answers> submit(Completion completion) const;
  void answer(Completion completion, httplib::Response& response) const;
  void answer_whole(Answers& answers, httplib::Response& response) const;
  bool stream_next(Answers& answers, httplib::DataSink& sink) const;
  Json begin(Answers& answers, std::size_t index, const Stream& stream, bool is_delta) const;
  void list_models(httplib::Response& response) const;
  void tokenize(const std::string& body, httplib::Response& response) const;
  void detokenize(const std::string& body, httplib::Response& response) const;
};

std::shared_ptr<Answers> HttpServer::Impl::submit(Completion completion) const {
  auto answers = std::make_shared<Answers>();
  answers->completion = std::move(completion);
  const Completion& own = answers->completion;
  for (const Request& request : own.requests) answers->streams.push_back(batcher->submit(request));
  const int all = static_cast<int>(own.requests.size()) * own.choices;
  for (int i = 0; i < all; ++i) {
    answers->writers.emplace_back(own, served.engine->tokenizer(), i);
  }
  answers->has_prompt.resize(static_cast<std::size_t>(all));
  return answers;
}

// The prompt as the first part of a choice, if it is to be echoed; null otherwise.
Json HttpServer::Impl::begin(Answers& answers, std::size_t index, const Stream& stream,
                             bool is_delta) const {
  if (!answers.completion.echo || answers.has_prompt[index]) return nullptr;
  answers.has_prompt[index] = true;
  const auto prompt = index / static_cast<std::size_t>(answers.completion.choices);
  const std::string text =
      served.engine->tokenizer().decode(answers.completion.requests[prompt].prompt, true);
  return answers.writers[index].part(text, stream.prompt_scores(), std::nullopt, is_delta);
}

void HttpServer::Impl::answer_whole(Answers& answers, httplib::Response& response) const {
  const auto choices = static_cast<std::size_t>(answers.completion.choices);
  Json result = envelope(answers.completion, false);
  for (std::size_t i = 0; i < answers.streams.size(); ++i) {
    std::vector<std::string> texts(choices);
    std::vector<std::vector<ScoredToken>> tokens(choices);
    std::vector<std::optional<FinishReason>> reasons(choices);
    while (std::optional<Piece> piece = answers.streams[i].next()) {
      const auto choice = static_cast<std::size_t>(piece->choice);
      texts[choice] += piece->text;
      std::move(piece->tokens.begin(), piece->tokens.end(), std::back_inserter(tokens[choice]));
      if (piece->finish) reasons[choice] = piece->finish;
    }
    for (std::size_t choice = 0; choice < choices; ++choice) {
      if (answers.completion.echo) {
        const std::vector<ScoredToken> prompt = answers.streams[i].prompt_scores();
        tokens[choice].insert(tokens[choice].begin(), prompt.begin(), prompt.end());
        texts[choice].insert(
            0, served.engine->tokenizer().decode(answers.completion.requests[i].prompt, true));
      }
      result["choices"].push_back(answers.writers[i * choices + choice].part(
          texts[choice], tokens[choice], reasons[choice], false));
    }
  }
  result["usage"] = usage_json(answers.usages());
  set_json(response, result);
}

// Writes one event. Returns false if the client is gone, which ends the streams.
bool HttpServer::Impl::stream_next(Answers& answers, httplib::DataSink& sink) const {
  const auto send = [&](const std::string& data) {
    const std::string event = "data: " + data + "\n\n";
    return sink.write(event.data(), event.size());
  };
  const auto end = [&] {
    if (answers.completion.streams_usage) {
      Json last = envelope(answers.completion, true);
      last["usage"] = usage_json(answers.usages());
      if (!send(dump_json(last))) return false;
    }
    if (!send("[DONE]")) return false;
    sink.done();
    return true;
  };
  try {
    Stream& stream = answers.streams[answers.reading];
    const std::optional<Piece> piece = stream.next_within(std::chrono::milliseconds(500));
    if (!piece) {
      // A comment now and then finds out whether the client is still there.
      if (!stream.ended()) return sink.write(":\n\n", 3);
      return ++answers.reading < answers.streams.size() || end();
    }
    const std::size_t index =
        answers.reading * static_cast<std::size_t>(answers.completion.choices) +
        static_cast<std::size_t>(piece->choice);
    Json event = envelope(answers.completion, true);
    const Json prompt = begin(answers, index, stream, true);
    if (!prompt.is_null()) {
      event["choices"] = Json::array({prompt});
      if (!send(dump_json(event))) return false;
    }
    if (piece->text.empty() && !piece->finish && !answers.completion.logprobs) return true;
    event["choices"] =
        Json::array({answers.writers[index].part(piece->text, piece->tokens, piece->finish, true)});
    return send(dump_json(event));
  } catch (const Error& error) {
    const Fault fault = fault_of(error.code());
    send(dump_json(error_json(error.what(), fault.type, fault.code)));
    sink.done();
    return true;
  }
}

void HttpServer::Impl::answer(Completion completion, httplib::Response& response) const {
  const std::shared_ptr<Answers> answers = submit(std::move(completion));
  if (!answers->completion.streams) return answer_whole(*answers, response);
  response.set_header("Cache-Control", "no-cache");
  response.set_chunked_content_provider("text/event-stream",
                                        [this, answers](std::size_t, httplib::DataSink& sink) {
                                          return stream_next(*answers, sink);
                                        });
}

void HttpServer::Impl::list_models(httplib::Response& response) const {
  set_json(response, {{"object", "list"},
                      {"data", Json::array({{{"id", served.name},
                                             {"object", "model"},
                                             {"created", 0},
                                             {"owned_by", "sluice"},
                                             {"max_model_len", served.context},
                                             {"chat", served.chat != nullptr}}})}});
}

void HttpServer::Impl::tokenize(const std::string& body, httplib::Response& response) const {
  const Json json = parse_body(body);
  const Fields fields(json);
  fields.require_known({"model", "prompt", "add_special_tokens"});
  const std::optional<std::string> text = fields.string("prompt");
  if (!text) refuse("`prompt` is missing");
  const std::vector<TokenId> ids = fields.boolean("add_special_tokens", true)
                                       ? served.engine->encode_prompt(*text)
                                       : served.engine->tokenizer().encode(*text);
  set_json(response, {{"tokens", ids}, {"count", ids.size()}, {"max_model_len", served.context}});
}

void HttpServer::Impl::detokenize(const std::string& body, httplib::Response& response) const {
  const Json json = parse_body(body);
  const Fields fields(json);
  fields.require_known({"model", "tokens"});
  const Json* const tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) refuse("`tokens` must be an array of token ids");
  std::vector<TokenId> ids;
  for (const Json& token : *tokens) {
    const bool is_id =
        token.is_number_unsigned() &&
        token.get<std::uint64_t>() < static_cast<std::uint64_t>(served.engine->info().vocabulary);
    if (!is_id)
      refuse("`tokens` must be ids below " + std::to_string(served.engine->info().vocabulary));
    ids.push_back(token.get<TokenId>());
  }
  set_json(response, {{"prompt", served.engine->tokenizer().decode(ids, true)}});
}

bool HttpServer::Impl::is_allowed(const httplib::Request& request) const {
  const bool is_open = request.path == "/" || request.path == "/health";
  if (options.api_key.empty() || is_open) return true;
  return is_same(request.get_header_value("Authorization"), "Bearer " + options.api_key);
}

httplib::Server::Handler HttpServer::Impl::guarded(
    std::function<void(const httplib::Request&, httplib::Response&)> handle) const {
  return [this, handle = std::move(handle)](const httplib::Request& request,
                                            httplib::Response& response) {
    try {
      if (refuses)
        return set_error(response, {503, "server_error", ""}, "the server is shutting down");
      handle(request, response);
    } catch (...) {
      const Error error = current_error();
      set_error(response, fault_of(error.code()), error.what());
    }
  };
}

void HttpServer::Impl::set_up() {
  http.new_task_queue = [this] {
    return new httplib::ThreadPool(static_cast<std::size_t>(options.connections));
  };
  http.set_payload_max_length(options.most_body);
  http.set_read_timeout(options.patience);
  http.set_write_timeout(options.patience);
  http.set_keep_alive_timeout(5);
  http.set_pre_routing_handler(
      [this](const httplib::Request& request, httplib::Response& response) {
        if (!is_allowed(request)) {
          set_error(response, {401, "authentication_error", ""}, "the API key is missing or wrong");
          return httplib::Server::HandlerResponse::Handled;
        }
        if (const char* const fault = length_fault(request)) {
          set_error(response, {400, "invalid_request_error", ""}, fault);
          return httplib::Server::HandlerResponse::Handled;
        }
        forget_form(request);
        return httplib::Server::HandlerResponse::Unhandled;
      });
  http.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
    if (!response.body.empty()) return;
    std::string message = "the request is not understood";
    if (response.status == 404) message = "there is no " + request.method + " " + request.path;
    if (response.status == 413) message = "the body is too large";
    set_error(response, {response.status, "invalid_request_error", ""}, message);
  });
  using Req = httplib::Request;
  using Res = httplib::Response;
  http.Post("/v1/completions", guarded([this](const Req& request, Res& response) {
              answer(read_completion(request.body, served), response);
            }));
  http.Post("/v1/chat/completions", guarded([this](const Req& request, Res& response) {
              answer(read_chat(request.body, served), response);
            }));
  http.Get("/v1/models", guarded([this](const Req&, Res& response) { list_models(response); }));
  http.Post("/tokenize", guarded([this](const Req& request, Res& response) {
              tokenize(request.body, response);
            }));
  http.Post("/detokenize", guarded([this](const Req& request, Res& response) {
              detokenize(request.body, response);
            }));
  http.Get("/stats", guarded([this](const Req&, Res& response) {
             set_json(response, stats_json(batcher->stats(), served.engine->memory()));
           }));
  http.Get("/metrics", [this](const Req&, Res& response) {
    response.set_content(metrics_text(batcher->stats(), served.engine->memory()),
                         "text/plain; version=0.0.4");
  });
  http.Get("/health", guarded([](const Req&, Res& response) {
             set_json(response, {{"status", "ok"}, {"version", kVersion}});
           }));
  http.Get("/", [](const Req&, Res& response) {
    response.set_content(kPage, "text/html; charset=utf-8");
  });
}

namespace {

// httplib ends the process where a thread of its pool cannot be started.
void require_thread_room(int connections) {
  rlimit stack = {};
  constexpr rlim_t kUsual = rlim_t{8} << 20;
  const bool is_known = ::getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur != RLIM_INFINITY;
  const auto threads = static_cast<std::uint64_t>(connections);
  require_memory(threads * (is_known ? stack.rlim_cur : kUsual), Counted::reserved,
                 "the threads of " + std::to_string(connections) + " `connections` need",
                 "have fewer, or raise the limit");
}

}  // namespace

HttpServer::HttpServer(const ServerOptions& options, const ServedModel& served, Batcher& batcher)
    : impl_(std::make_unique<Impl>()) {
  require_thread_room(options.connections);
  impl_->options = options;
  impl_->served = served;
  impl_->batcher = &batcher;
  impl_->set_up();
  if (options.port == 0) {
    impl_->port = impl_->http.bind_to_any_port(options.host);
  } else if (impl_->http.bind_to_port(options.host, options.port)) {
    impl_->port = options.port;
  }
  if (impl_->port <= 0) {
    throw Error(ErrorCode::io, "cannot listen on " + options.host + " port " +
                                   std::to_string(options.port) +
                                   "; another program may have the port, or the address is none "
                                   "of this machine's; choose another `port` or `host`");
  }
}

HttpServer::~HttpServer() = default;

int HttpServer::port() const { return impl_->port; }

void HttpServer::run() {
  impl_->http.listen_after_bind();
  impl_->has_ended = true;
}

void HttpServer::refuse_new() { impl_->refuses = true; }

// http.stop() does nothing before run() listens.
void HttpServer::stop() {
  while (!impl_->http.is_running() && !impl_->has_ended) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  impl_->http.stop();
}

}  // namespace sluice::tools
