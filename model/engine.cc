#include "sluice/engine.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "lib/bytes.h"
#include "model/calibration.h"
#include "model/checkpoint.h"
#include "model/decoder.h"
#include "model/plan.h"
#include "model/tensors.h"
#include "offload/backends.h"
#include "offload/kv_batch.h"
#include "offload/kv_session.h"
#include "offload/planner.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr int kMaxChunk = 8192;

void validate(const EngineConfig& config) {
  if (config.chunk < 1 || config.chunk > kMaxChunk) {
    throw Error(ErrorCode::usage, "--chunk must be 1 to 8192, not " + std::to_string(config.chunk));
  }
  if (config.threads < 0 || config.threads > 4096) {
    throw Error(ErrorCode::usage, "--threads must be 0 (one per core) to 4096, not " +
                                      std::to_string(config.threads));
  }
}

void validate(const SessionOptions& options, std::int64_t most_at_once) {
  if (options.decode_batch < 1 || options.decode_batch > Decoder::kLogitRows) {
    throw Error(ErrorCode::usage, "decode_batch must be 1 to 64");
  }
  if (options.decode_batch > most_at_once) {
    throw Error(ErrorCode::usage, "decode_batch must not exceed the engine's chunk");
  }
  if (options.sequences < 1) throw Error(ErrorCode::usage, "sequences must be 1 or more");
}

KvShape kv_shape(const ModelConfig& c, DType dtype) {
  return {c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim, dtype};
}

ModelInfo describe(const Checkpoint& checkpoint, DType kv_dtype) {
  const ModelConfig& c = checkpoint.config();
  ModelInfo info;
  info.architecture = c.architecture;
  info.weight_bytes = checkpoint.parameter_bytes();
  info.weight_dtype = checkpoint.dtype();
  info.parameters = checkpoint.parameters();
  info.kv = kv_shape(c, kv_dtype);
  info.hidden = c.hidden_size;
  info.intermediate = c.intermediate_size;
  info.vocabulary = c.vocab_size;
  info.trained_context = c.max_position_embeddings;
  info.tied_embeddings = c.tie_word_embeddings;
  info.bos = c.bos_token_id;
  info.eos = c.eos_token_ids;
  return info;
}

BackendOptions backend_options(const EngineConfig& config, DType weight_dtype) {
  BackendOptions options;
  options.device = config.device;
  options.threads = config.threads;
  options.compute = config.compute;
  options.weight_dtype = weight_dtype;
  options.device_memory = config.device_memory;
  options.host_memory = config.host_memory;
  return options;
}

// log softmax(logits)[id], in fp64.
float log_probability(std::span<const float> logits, TokenId id) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - largest));
  return static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(id)] - largest) -
                            std::log(sum));
}

}  // namespace

struct Engine::Impl {
  EngineConfig config;
  Checkpoint checkpoint;
  ModelInfo info;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<Backend> backend;
  // Before anything was asked of the backend: of the device, and of the host.
  std::uint64_t backend_bytes = 0;
  std::uint64_t staging_bytes = 0;
  std::optional<Decoder> decoder{};  // from load_weights on
  // Activations and the backend's streams serve one call at a time.
  std::recursive_mutex mutex{};
  bool is_busy = false;

  // Steps of several sessions have no more.
  std::int64_t most_at_once() const {
    return std::min<std::int64_t>(config.chunk, Decoder::kLogitRows);
  }
};

namespace {

// A call's turn to compute. Other threads wait for theirs; a callback has none.
class Turn {
 public:
  explicit Turn(Engine::Impl& engine) : engine_(&engine), lock_(engine.mutex) {
    if (engine.is_busy) {
      throw Error(ErrorCode::usage,
                  "a callback may not compute: the call that it was called from is not over");
    }
    engine.is_busy = true;
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() { engine_->is_busy = false; }

 private:
  Engine::Impl* engine_;
  std::unique_lock<std::recursive_mutex> lock_;
};

}  // namespace

struct Session::Impl {
  std::shared_ptr<Engine::Impl> engine;
  KvSession kv;
  std::vector<TokenId> uncorrected{};  // decoded sparsely since the last correction
  std::vector<float> logits{};         // after the last token

  // Blocks and sequences of the pool are given back in turn, too.
  ~Impl() {
    const std::lock_guard lock(engine->mutex);
    const KvSession ended = std::move(kv);
  }

  // Throws unless `tokens` may be appended, before anything has changed.
  void require(std::span<const TokenId> tokens) const {
    if (tokens.empty()) throw Error(ErrorCode::prompt, "the prompt is empty; give some text");
    const std::int64_t room = kv.plan().context - kv.length();
    if (static_cast<std::int64_t>(tokens.size()) > room) {
      throw Error(ErrorCode::prompt,
                  "the prompt has " + std::to_string(tokens.size()) + " tokens but only " +
                      std::to_string(room) + " of the planned context of " +
                      std::to_string(kv.plan().context) + " are free; raise --context");
    }
    for (const TokenId id : tokens) {
      if (id < 0 || id >= engine->info.vocabulary) {
        throw Error(ErrorCode::prompt, "token id " + std::to_string(id) +
                                           " is outside the model's vocabulary of " +
                                           std::to_string(engine->info.vocabulary));
      }
    }
  }

  std::int64_t correction_interval() const { return kv.policy().correct; }

  // Recomputes the tokens that were decoded since the last correction: their rows and their part
  // of the key index are replaced by what dense attention gives. Source: TidalDecode, section 3.3.
  void correct() {
    const std::vector<TokenId> tokens = std::move(uncorrected);
    uncorrected.clear();
    kv.truncate(kv.length() - static_cast<std::int64_t>(tokens.size()));
    const auto chunk = static_cast<std::size_t>(kv.plan().chunk);
    for (std::size_t first = 0; first < tokens.size(); first += chunk) {
      engine->decoder->step(
          std::span(tokens).subspan(first, std::min(chunk, tokens.size() - first)),
          Phase::correction, kv);
    }
  }

  void correct_if_due() {
    const std::int64_t interval = correction_interval();
    if (interval > 0 && static_cast<std::int64_t>(uncorrected.size()) >= interval) correct();
  }
  void note(std::span<const TokenId> tokens) {
    if (correction_interval() == 0) return;
    uncorrected.insert(uncorrected.end(), tokens.begin(), tokens.end());
  }

  // Decodes known tokens, at most as many as one step takes, after a correction if one is due.
  void decode_known(std::span<const TokenId> tokens) {
    correct_if_due();
    engine->decoder->step(tokens, Phase::decode, kv);
    note(tokens);
  }

  // The logits after a token of the last step, kept for whoever asked.
  std::span<const float> keep(std::span<const float> row) {
    logits.assign(row.begin(), row.end());
    return logits;
  }

  // Tokens that the next decode step may take.
  std::int64_t decode_room() const {
    const std::int64_t most =
        std::min(kv.decode_room(), std::int64_t{Decoder::kLogitRows});
    const std::int64_t interval = correction_interval();
    if (interval == 0) return most;
    const std::int64_t left = interval - static_cast<std::int64_t>(uncorrected.size());
    return std::min(most, left > 0 ? left : interval);
  }

  // A prompt under a policy whose prefill is sparse.
  std::span<const float> sparse_prefill(std::span<const TokenId> tokens, const Progress& progress) {
    const auto total = static_cast<std::int64_t>(tokens.size());
    const bool whole = engine->decoder->prompt(tokens, kv, [&](double share) {
      return !progress ||
             progress(static_cast<std::int64_t>(share * static_cast<double>(total)), total);
    });
    if (!whole) return {};
    if (progress) progress(total, total);
    return keep(engine->decoder->logits(0, 1));
  }

  // Runs `tokens` in steps of the planned chunk; each(first, count) after every step. False if
  // `progress` stopped it.
  bool run(std::span<const TokenId> tokens, const Progress& progress, const auto& each) {
    require(tokens);
    const auto total = static_cast<std::int64_t>(tokens.size());
    for (std::int64_t first = 0; first < total;) {
      if (progress && !progress(first, total)) return false;
      const std::int64_t count = std::min(kv.plan().chunk, total - first);
      engine->decoder->step(
          tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)),
          Phase::prefill, kv);
      each(first, count);
      first += count;
    }
    if (progress) progress(total, total);
    return true;
  }
};

Engine::Engine(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Engine Engine::open(const EngineConfig& config) {
  validate(config);
  Checkpoint checkpoint = Checkpoint::open(config.model);
  check_tensors(checkpoint);
  ModelInfo info = describe(checkpoint, config.kv_dtype);
  std::optional<Tokenizer> tokenizer;
  const std::filesystem::path path = config.model / "tokenizer.json";
  if (std::filesystem::exists(path)) tokenizer = Tokenizer::load(path, info.vocabulary);
  auto backend = make_backend(backend_options(config, info.weight_dtype));
  require_supported(backend->info(), info.kv);
  const std::uint64_t backend_bytes = backend->account(Tier::device).used();
  const std::uint64_t staging_bytes = backend->account(Tier::host).used();
  auto* const impl = new Impl{config,
                              std::move(checkpoint),
                              std::move(info),
                              std::move(tokenizer),
                              std::move(backend),
                              backend_bytes,
                              staging_bytes};
  return Engine(std::shared_ptr<Impl>(impl));
}

const ModelInfo& Engine::info() const { return impl_->info; }

const Tokenizer& Engine::tokenizer() const {
  if (!impl_->tokenizer) {
    throw Error(ErrorCode::tokenizer, (impl_->config.model / "tokenizer.json").string() +
                                          ": there is no such file; copy the tokenizer.json of "
                                          "the checkpoint there");
  }
  return *impl_->tokenizer;
}

std::vector<TokenId> Engine::encode_prompt(std::string_view text) const {
  std::vector<TokenId> ids(tokenizer().prefix().begin(), tokenizer().prefix().end());
  // A tokenizer without a post-processor leaves the BOS token to whoever uses it.
  if (!tokenizer().has_post_processor() && impl_->info.bos) ids.push_back(*impl_->info.bos);
  const std::vector<TokenId> body = tokenizer().encode(text);
  ids.insert(ids.end(), body.begin(), body.end());
  return ids;
}

Policy Engine::policy(std::string_view text) const {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  const std::string_view name = text.substr(0, text.find(' '));
  const bool preset = std::any_of(presets().begin(), presets().end(),
                                  [&](const Preset& p) { return p.name == name; });
  const Scorers& scorers = impl_->config.scorers;
  if (!preset) return parse_policy(text, scorers);
  const std::optional<Policy> own = calibrated_policy(impl_->config.model, name, scorers);
  if (!own) return parse_policy(text, scorers);
  return change_policy(*own, text.substr(name.size()), scorers);
}

Plan Engine::plan(const SessionOptions& options) const {
  const std::lock_guard lock(impl_->mutex);
  validate(options, impl_->most_at_once());
  const ModelConfig& config = impl_->checkpoint.config();
  const BackendInfo& backend = impl_->backend->info();
  Plan plan;
  const WeightSizes weights = weight_sizes(impl_->checkpoint, *impl_->backend);
  plan.weight_bytes = weights.total;
  plan.loading_bytes = weights.transient;
  plan.activation_bytes = Decoder::activation_bytes(config, *impl_->backend, impl_->config.chunk);
  const bool sparse_prefill =
      std::any_of(options.policies.begin(), options.policies.end(),
                  [](const Policy& policy) { return policy.prefill.tau > 0.0; });
  if (sparse_prefill) plan.activation_bytes += Decoder::prompt_bytes(config, options.context);
  plan.program_bytes = program_bytes();
  plan.on_device = backend.compute_tier == Tier::device;
  plan.backend_bytes = impl_->backend_bytes;
  plan.staging_bytes =
      impl_->staging_bytes + Decoder::host_bytes(config, *impl_->backend, impl_->config.chunk);

  KvRequest request;
  request.shape = impl_->info.kv;
  request.context = options.context;
  request.chunk = impl_->config.chunk;
  request.sequences = options.sequences;
  request.tokens = options.tokens;
  request.decode_batch = options.decode_batch;
  request.policies = options.policies;
  request.scorers = &impl_->config.scorers;
  request.processor = backend.processor;
  request.device_cap = kv_cap(plan);
  if (options.device_memory) {
    request.device_cap = std::min(request.device_cap.value_or(UINT64_MAX), *options.device_memory);
  }
  request.attends_host_rows = backend.attends_host_rows;
  request.logits = backend.logits;
  request.beside = plan.on_device ? plan.model_bytes() + plan.backend_bytes : 0;
  plan.kv = plan_kv(request);
  const std::uint64_t taken = sessions_host_bytes(plan);
  require_host_memory(plan, impl_->config.host_memory, taken);
  if (options.host_memory && plan.kv.host_bytes > *options.host_memory) {
    throw Error(ErrorCode::memory, "the session's rows take " + format_bytes(plan.kv.host_bytes) +
                                       " of host memory, more than its cap of " +
                                       format_bytes(*options.host_memory));
  }
  if (const auto left = kv_cap(plan)) plan.device_left = *left - plan.kv.device_bytes;
  if (impl_->config.host_memory) {
    plan.host_left = *impl_->config.host_memory - plan.host_bytes() - taken;
  }
  return plan;
}

// Host memory that other sessions hold already.
std::uint64_t Engine::sessions_host_bytes(const Plan& plan) const {
  const std::uint64_t used = impl_->backend->account(Tier::host).used();
  std::uint64_t own = impl_->staging_bytes;
  if (impl_->decoder) own = plan.staging_bytes + (plan.on_device ? 0 : plan.model_bytes());
  return used > own ? used - own : 0;
}

std::optional<std::uint64_t> Engine::kv_cap(const Plan& plan) const {
  if (!plan.on_device) {
    if (!impl_->config.device_memory) return std::nullopt;
    // Other sessions hold their part already.
    const std::uint64_t used = impl_->backend->account(Tier::device).used();
    return *impl_->config.device_memory - std::min(used, *impl_->config.device_memory);
  }
  const std::uint64_t cap = impl_->backend->account(Tier::device).cap();
  const std::uint64_t model = plan.model_bytes() + plan.backend_bytes;
  // Other sessions hold their part already.
  const std::uint64_t taken = impl_->decoder ? impl_->backend->account(Tier::device).used() : model;
  if (taken < cap) return cap - taken;
  throw Error(ErrorCode::memory,
              "the device's memory is too small: of " + format_bytes(cap) + " the weights take " +
                  format_bytes(plan.weight_bytes) + ", activations " +
                  format_bytes(plan.activation_bytes) + " and the backend " +
                  format_bytes(plan.backend_bytes) +
                  "; raise --device-memory, lower --chunk or choose a smaller model");
}

void Engine::load_weights(const std::function<void(double)>& progress) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->decoder) return;
  ModelWeights weights = sluice::load_weights(impl_->checkpoint, *impl_->backend, progress);
  impl_->decoder.emplace(impl_->checkpoint.config(), std::move(weights), *impl_->backend,
                         impl_->config.chunk);
}

Session Engine::new_session(const SessionOptions& options) {
  const std::lock_guard lock(impl_->mutex);
  const Plan plan = this->plan(options);
  load_weights();
  return Session(std::make_unique<Session::Impl>(
      impl_, KvSession(*impl_->backend, plan.kv, options.policies, impl_->config.scorers)));
}

Session Engine::new_session(std::int64_t context) {
  SessionOptions options;
  options.context = context;
  return new_session(options);
}

namespace {

// Penalties look at what the host knows; draws without them happen where the logits are.
bool draws_on_device(const StepToken& token) {
  return token.sampler != nullptr && !token.sampler->penalizes();
}

}  // namespace

// What a step of several sessions does besides computing.
struct SessionStep {
  static Session::Impl& impl(const StepToken& token) { return *token.session->impl_; }

  static void require(std::span<const StepToken> tokens, const Engine::Impl& engine) {
    for (const StepToken& token : tokens) {
      if (token.session == nullptr || impl(token).engine.get() != &engine) {
        throw Error(ErrorCode::usage, "a batch: its sessions must be of this engine");
      }
      impl(token).require({&token.token, 1});
    }
  }

  // Draws, or reads the logits, and waits. Results of sessions that failed are left out later.
  static std::vector<StepResult> read(std::span<const StepToken> tokens, Decoder& decoder,
                                      std::int64_t vocabulary) {
    std::vector<StepResult> results(tokens.size());
    std::vector<SampleParams> params(tokens.size());
    bool any_drawn = false;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i].sampler != nullptr && draws_on_device(tokens[i])) {
        params[i] = tokens[i].sampler->draw();
        any_drawn = true;
        continue;
      }
      std::vector<float>& logits = impl(tokens[i]).logits;
      logits.resize(static_cast<std::size_t>(vocabulary));
      decoder.read_logits(static_cast<std::int64_t>(i), logits);
      results[i].logits = logits;
    }
    if (!any_drawn) return results;
    std::vector<SampledToken> drawn(tokens.size());
    decoder.sample(params, drawn);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (!draws_on_device(tokens[i])) continue;
      settle(results[i], [&] { return token_of(drawn[i]); });
    }
    return results;
  }

  // Draws on the host, once the logits are there.
  static void draw(const StepToken& token, StepResult& result) {
    if (token.sampler == nullptr || draws_on_device(token)) return;
    settle(result, [&] { return token.sampler->next(result.logits, token.history); });
    result.logits = {};
  }

  static void settle(StepResult& result, const auto& next) {
    try {
      result.next = next();
    } catch (const Error& error) {
      result.error = error;
    }
  }
};

std::vector<StepResult> Engine::step(std::span<const StepToken> tokens) {
  const Turn turn(*impl_);
  if (static_cast<std::int64_t>(tokens.size()) > impl_->most_at_once()) {
    throw Error(ErrorCode::usage, "a batch: of " + std::to_string(tokens.size()) +
                                      " sessions; this engine takes " +
                                      std::to_string(impl_->most_at_once()) + " at a time");
  }
  SessionStep::require(tokens, *impl_);
  std::vector<KvSession*> sessions;
  std::vector<TokenId> ids;
  for (const StepToken& token : tokens) {
    SessionStep::impl(token).correct_if_due();
    sessions.push_back(&SessionStep::impl(token).kv);
    ids.push_back(token.token);
  }
  KvBatch batch(sessions);
  impl_->decoder->decode(ids, batch);
  std::vector<StepResult> results =
      SessionStep::read(tokens, *impl_->decoder, impl_->info.vocabulary);
  const std::vector<std::optional<Error>> outcomes = batch.end();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (outcomes[i]) {
      results[i] = {outcomes[i], -1, {}};
      continue;
    }
    SessionStep::impl(tokens[i]).note({&tokens[i].token, 1});
    SessionStep::draw(tokens[i], results[i]);
  }
  return results;
}

MemoryUse Engine::memory() const { return memory_use(*impl_->backend); }

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

Session Session::fork() {
  const Turn turn(*impl_->engine);
  auto child = std::make_unique<Impl>(impl_->engine, impl_->kv.fork());
  child->uncorrected = impl_->uncorrected;
  child->logits = impl_->logits;
  return Session(std::move(child));
}

Session Session::sibling() {
  const Turn turn(*impl_->engine);
  return Session(std::make_unique<Impl>(impl_->engine, KvSession(impl_->kv.pool())));
}

std::span<const float> Session::prefill(std::span<const TokenId> tokens, const Progress& progress) {
  const Turn turn(*impl_->engine);
  impl_->require(tokens);
  if (!impl_->uncorrected.empty()) impl_->correct();
  if (impl_->kv.policy().prefill.tau > 0.0) return impl_->sparse_prefill(tokens, progress);
  std::int64_t last = 0;
  const auto remember = [&](std::int64_t, std::int64_t count) { last = count - 1; };
  if (!impl_->run(tokens, progress, remember)) return {};
  return impl_->keep(impl_->engine->decoder->logits(last, 1));
}

std::span<const float> Session::decode(TokenId token) {
  const StepToken one = {this, token};
  const std::vector<StepResult> results = Engine(impl_->engine).step({&one, 1});
  if (results[0].error) throw *results[0].error;
  return results[0].logits;
}

TokenId Session::decode(TokenId token, Sampler& sampler, std::span<const TokenId> history) {
  const StepToken one = {this, token, &sampler, history};
  const std::vector<StepResult> results = Engine(impl_->engine).step({&one, 1});
  if (results[0].error) throw *results[0].error;
  return results[0].next;
}

void Session::decode_known(std::span<const TokenId> tokens,
                           const std::function<void(std::size_t, std::span<const float>)>& each) {
  const Turn turn(*impl_->engine);
  impl_->require(tokens);
  const auto vocabulary = static_cast<std::size_t>(impl_->engine->info.vocabulary);
  for (std::size_t first = 0; first < tokens.size();) {
    const std::size_t count =
        std::min(static_cast<std::size_t>(impl_->decode_room()), tokens.size() - first);
    impl_->decode_known(tokens.subspan(first, count));
    const std::span<const float> logits =
        impl_->engine->decoder->logits(0, static_cast<std::int64_t>(count));
    for (std::size_t i = 0; i < count; ++i) {
      each(first + i, logits.subspan(i * vocabulary, vocabulary));
    }
    first += count;
  }
}

void Session::use(const Policy& policy) {
  const Turn turn(*impl_->engine);
  impl_->kv.use(policy);
  impl_->uncorrected.clear();
}

const Policy& Session::policy() const { return impl_->kv.policy(); }

void Session::truncate(std::int64_t length) {
  const Turn turn(*impl_->engine);
  if (length < 0 || length > impl_->kv.length()) {
    throw Error(ErrorCode::usage, "a session of " + std::to_string(impl_->kv.length()) +
                                      " tokens cannot be cut to " + std::to_string(length));
  }
  impl_->kv.truncate(length);
  impl_->uncorrected.clear();
}

std::vector<float> Session::score(std::span<const TokenId> tokens, const Progress& progress) {
  const Turn turn(*impl_->engine);
  impl_->require(tokens);
  if (!impl_->uncorrected.empty()) impl_->correct();
  std::vector<float> scores;
  const auto vocabulary = static_cast<std::size_t>(impl_->engine->info.vocabulary);
  impl_->run(tokens, progress, [&](std::int64_t first, std::int64_t count) {
    const std::int64_t scored =
        std::min(count, static_cast<std::int64_t>(tokens.size()) - 1 - first);
    for (std::int64_t row = 0; row < scored; row += Decoder::kLogitRows) {
      const std::int64_t rows = std::min(Decoder::kLogitRows, scored - row);
      const std::span<const float> logits = impl_->engine->decoder->logits(row, rows);
      for (std::int64_t i = 0; i < rows; ++i) {
        scores.push_back(
            log_probability(logits.subspan(static_cast<std::size_t>(i) * vocabulary, vocabulary),
                            tokens[static_cast<std::size_t>(first + row + i + 1)]));
      }
    }
  });
  return scores;
}

std::int64_t Session::length() const { return impl_->kv.length(); }
const KvPlan& Session::plan() const { return impl_->kv.plan(); }
const Ledger& Session::ledger() const { return impl_->kv.ledger(); }
const StepSelection& Session::selection() const { return impl_->kv.selection(); }

}  // namespace sluice
