#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lib/bytes.h"
#include "sluice/batcher.h"
#include "sluice/constraint.h"
#include "sluice/errors.h"
#include "tools/commands.h"
#include "tools/flags.h"
#include "tools/generation.h"
#include "tools/model_flags.h"
#include "tools/output.h"
#include "tools/plan_flag.h"
#include "tools/policy_help.h"
#include "tools/serve/server.h"

namespace sluice::tools {
namespace {

constexpr std::int64_t kMostContext = 32768;  // planned without --context
constexpr int kMostSeconds = 86400;

struct ServeFlags {
  ModelFlags model;
  ServerOptions server;
  std::vector<std::string> policies = {"auto"};
  std::string most_body = "8MiB";
  std::string name;
  std::int64_t context = 0;
  std::int64_t tokens = 0;
  std::int64_t indexed_tokens = 0;
  std::int64_t max_tokens = 0;
  int running = 16;
  int cached = 16;
  int queued = 256;
  int timeout = 600;
  int drain = 30;
  std::string prefixes;
  double prefill_ms = 0.0;
  std::string speculate;
  int drafts = 8;
};

std::atomic<bool> terminates{false};  // a signal handler has no other way

std::int64_t default_context(const ModelInfo& info) {
  const std::int64_t trained = info.trained_context > 0 ? info.trained_context : kMostContext;
  const std::int64_t most = std::min(trained, kMostContext);
  return info.window_limits ? std::min(most, *info.window) : most;
}

std::optional<ChatFormat> load_format(const ServeFlags& flags, const Engine& engine) {
  try {
    return ChatFormat::load(flags.model.model, engine.tokenizer());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    print_error(
        wrapped("note:", 6, std::string("/v1/chat/completions will refuse: ") + error.what()));
    return std::nullopt;
  }
}

void require_range(const char* flag, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw Error(ErrorCode::usage, std::string(flag) + " " + std::to_string(value) + ": give " +
                                    std::to_string(least) + " to " + std::to_string(most));
}

void validate(const ServeFlags& flags) {
  require_range("--port", flags.server.port, 0, 65535);
  require_range("--connections", flags.server.connections, 1, 4096);
  require_range("--timeout", flags.timeout, 0, kMostSeconds);
  if (!flags.prefixes.empty() && flags.cached == 0) {
    throw Error(ErrorCode::usage, "--prefixes keeps what --cached keeps, and that is 0");
  }
  require_range("--drain", flags.drain, 0, kMostSeconds);
  require_range("--queued", flags.queued, 0, 1 << 20);
  require_range("--running", flags.running, 1, 1024);
  require_range("--cached", flags.cached, 0, 1024);
  require_range("--max-tokens", flags.max_tokens, 0, INT32_MAX);
  require_range("--context", flags.context, 0, INT32_MAX);
  require_range("--drafts", flags.drafts, 1, kMostDrafts);
  require_range("--tokens", flags.tokens, 0, std::int64_t{1} << 40);
  require_range("--indexed-tokens", flags.indexed_tokens, 0, std::int64_t{1} << 40);
}

BatcherOptions batcher_options(const ServeFlags& flags, const Engine& engine) {
  BatcherOptions options;
  options.context = flags.context > 0 ? flags.context : default_context(engine.info());
  options.running = flags.running;
  options.cached = flags.cached;
  options.queued = static_cast<std::size_t>(flags.queued);
  options.prefill_ms = flags.prefill_ms;
  options.loads_prefixes = !flags.prefixes.empty();
  if (!flags.speculate.empty()) options.drafts = flags.drafts;
  // Without a number two whole contexts, which requests share.
  options.tokens = flags.tokens > 0 ? flags.tokens : options.context * std::min(flags.running, 2);
  options.indexed_tokens = flags.indexed_tokens;
  SessionOptions session;
  session.context = options.context;
  session.sequences = options.running + options.cached + 2;
  session.tokens = options.tokens;
  session.indexed_tokens = options.indexed_tokens;
  session.decode_batch = options.drafts + 1;
  for (const std::string& line : flags.policies) {
    options.policies.push_back(choose_session(engine, line, session).options.policies.front());
  }
  return options;
}

void print_prefixes(const std::string& done, const SavedPrefixes& prefixes) {
  print_error("sluice: prefixes " + done + ": " + std::to_string(prefixes.sessions) + ", of " +
              std::to_string(prefixes.tokens) + " tokens\n");
  for (const std::string& why : prefixes.skipped) print_error("note: skipped " + why + "\n");
}

// Until SIGTERM; then no new requests, and an end for those that there are.
void serve(HttpServer& server, Batcher& batcher, const ServeFlags& flags) {
  std::signal(SIGTERM, [](int) { terminates = true; });
  const std::jthread listening([&] { server.run(); });
  while (!terminates) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  print_error("sluice: ending; " + std::to_string(batcher.stats().running) + " answers run\n");
  server.refuse_new();
  batcher.drain(std::chrono::seconds(flags.drain));
  server.stop();
  if (!flags.prefixes.empty()) print_prefixes("saved", batcher.save_prefixes(flags.prefixes));
}

int run(ServeFlags flags) {
  const std::optional<PlanSettings> planned = plan_of(flags.model);
  if (planned) {
    flags.context = planned->context;
    flags.policies = {planned->policy};
    if (flags.tokens == 0) flags.tokens = planned->context;
  }
  validate(flags);
  flags.server.most_body = parse_bytes(flags.most_body, "--max-body");
  if (flags.server.most_body == 0) throw Error(ErrorCode::usage, "--max-body 0: give 1 or more");
  Engine engine = Engine::open(config_of(flags.model, planned));
  if (planned) require_model(*planned, engine.info());
  engine.tokenizer();  // throws if there is none
  const std::optional<ChatFormat> format = load_format(flags, engine);
  const BatcherOptions options = batcher_options(flags, engine);
  load(engine);
  Batcher batcher(engine, options);
  if (!flags.prefixes.empty()) print_prefixes("loaded", batcher.load_prefixes(flags.prefixes));
  const Constraints constraints(engine.tokenizer());
  ServedModel served;
  served.engine = &engine;
  served.constraints = &constraints;
  served.chat = format ? &*format : nullptr;
  served.name = flags.name;
  if (served.name.empty()) {
    served.name = std::filesystem::absolute(flags.model.model).lexically_normal().filename();
    if (served.name.empty()) served.name = "model";
  }
  served.context = options.context;
  served.most_tokens =
      flags.max_tokens > 0 ? std::min(flags.max_tokens, options.context) : options.context;
  served.most_choices = options.running;
  served.most_time = std::chrono::seconds(flags.timeout);
  HttpServer server(flags.server, served, batcher);
  print_error("sluice: " + served.name + ", " + std::to_string(batcher.stats().planned_tokens) +
              " tokens, policy " + to_string(options.policies.front()) + "\n" +
              "sluice: serving on http://" + flags.server.host + ":" +
              std::to_string(server.port()) + "\n");
  serve(server, batcher, flags);
  return 0;
}

}  // namespace

Command add_serve(CLI::App& app) {
  const auto flags = std::make_shared<ServeFlags>();
  flags->model.add_to(app);
  app.footer(policy_help() + "\n" + app.get_footer());
  app.add_option("--host", flags->server.host, "address to listen on")->capture_default_str();
  add_integer(app, "--port", flags->server.port, "port to listen on; 0: any that is free")
      ->capture_default_str();
  app.add_option("--api-key", flags->server.api_key,
                 "what clients must send as Authorization: Bearer KEY");
  app.add_option("--name", flags->name,
                 "the model's name for clients; default: its folder's or file's");
  app.add_option("--policy", flags->policies,
                 "which tokens decoding attends to, see below; given several times, requests may "
                 "ask for any, and the first is the default")
      ->capture_default_str()
      ->allow_extra_args(false);
  add_integer(app, "--context", flags->context,
              "most tokens of a prompt and its answer; default: what the model was trained for, "
              "32768 at most");
  add_integer(app, "--tokens", flags->tokens,
              "tokens of all sequences to plan memory for; default: twice --context");
  add_integer(app, "--indexed-tokens", flags->indexed_tokens,
              "tokens of all sequences whose key index has room on the device, --context at least; "
              "that of sequences that do not run goes to host memory; 0: all")
      ->capture_default_str();
  add_integer(app, "-n,--max-tokens", flags->max_tokens,
              "most tokens of an answer; 0: as many as fit")
      ->capture_default_str();
  add_integer(app, "--running", flags->running, "most answers computed at a time")
      ->capture_default_str();
  add_integer(app, "--cached", flags->cached, "finished sequences kept for their prefixes")
      ->capture_default_str();
  app.add_option("--prefixes", flags->prefixes,
                 "directory of saved sessions that prompts may begin with: those kept by --cached "
                 "are saved there when the server ends, and known when it starts again");
  add_integer(app, "--queued", flags->queued, "most answers that wait; others get 429")
      ->capture_default_str();
  app.add_option("--prefill-ms", flags->prefill_ms,
                 "most milliseconds of a prompt between two decode steps; 0: twice such a step")
      ->capture_default_str();
  auto* speculate =
      app.add_option("--speculate", flags->speculate,
                     "lookup: while one answer runs alone, guess its next tokens from its context "
                     "and verify them in one step; the text stays the same")
          ->check(CLI::IsMember({"lookup"}));
  add_integer(app, "--drafts", flags->drafts, "most guesses of a step")
      ->capture_default_str()
      ->needs(speculate);
  add_integer(app, "--timeout", flags->timeout, "most seconds of a request; 0: no limit")
      ->capture_default_str();
  add_integer(app, "--drain", flags->drain, "seconds for what runs to end after SIGTERM")
      ->capture_default_str();
  app.add_option("--max-body", flags->most_body, "most bytes of a request's body")
      ->capture_default_str();
  add_integer(app, "--connections", flags->server.connections, "connections served at a time")
      ->capture_default_str();
  add_plan_flag(app, flags->model);
  return [flags] { return run(*flags); };
}

}  // namespace sluice::tools
