#include "sluice/engine.h"

#include <algorithm>
#include <cmath>

#include "lib/bytes.h"
#include "model/calibration.h"
#include "model/checkpoint.h"
#include "model/decoder.h"
#include "model/plan.h"
#include "model/tensors.h"
#include "offload/backends.h"
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

  std::int64_t chunk(const KvPlan& kv) const {
    return std::min<std::int64_t>(kv.chunk, config.chunk);
  }
};

struct Session::Impl {
  Engine::Impl* engine;
  KvSession kv;
  std::vector<TokenId> uncorrected{};  // decoded sparsely since the last correction

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

  // Decodes `tokens`, at most as many as one step takes, after a correction if one is due.
  void decode(std::span<const TokenId> tokens) {
    const std::int64_t interval = correction_interval();
    if (interval > 0 && static_cast<std::int64_t>(uncorrected.size()) >= interval) correct();
    engine->decoder->step(tokens, Phase::decode, kv);
    if (interval > 0) uncorrected.insert(uncorrected.end(), tokens.begin(), tokens.end());
  }

  // Tokens that the next decode step may take.
  std::int64_t decode_room() const {
    const std::int64_t most = std::min(kv.plan().chunk, kv.plan().decode_batch);
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
    return engine->decoder->logits(0, 1);
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

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
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
  return Engine(std::make_unique<Impl>(Impl{config, std::move(checkpoint), std::move(info),
                                            std::move(tokenizer), std::move(backend), backend_bytes,
                                            staging_bytes}));
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
  if (!preset) return parse_policy(text);
  const std::optional<Policy> own = calibrated_policy(impl_->config.model, name);
  if (!own) return parse_policy(text);
  return change_policy(*own, text.substr(name.size()));
}

Plan Engine::plan(const SessionOptions& options) const {
  if (options.decode_batch < 1 || options.decode_batch > Decoder::kLogitRows) {
    throw Error(ErrorCode::usage, "decode_batch must be 1 to 64");
  }
  const ModelConfig& config = impl_->checkpoint.config();
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
  plan.on_device = impl_->backend->info().compute_tier == Tier::device;
  plan.backend_bytes = impl_->backend_bytes;
  plan.staging_bytes =
      impl_->staging_bytes + Decoder::host_bytes(config, *impl_->backend, impl_->config.chunk);
  plan.kv = plan_kv(impl_->info.kv, options.context, impl_->config.chunk, kv_cap(plan),
                    impl_->backend->info().attends_host_rows, options.policies,
                    options.decode_batch, impl_->backend->info().logits,
                    plan.on_device ? plan.model_bytes() + plan.backend_bytes : 0);
  require_host_memory(plan, impl_->config.host_memory);
  return plan;
}

std::optional<std::uint64_t> Engine::kv_cap(const Plan& plan) const {
  if (!plan.on_device) return impl_->config.device_memory;
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
  if (impl_->decoder) return;
  ModelWeights weights = sluice::load_weights(impl_->checkpoint, *impl_->backend, progress);
  impl_->decoder.emplace(impl_->checkpoint.config(), std::move(weights), *impl_->backend,
                         impl_->config.chunk);
}

Session Engine::new_session(const SessionOptions& options) {
  const Plan plan = this->plan(options);
  load_weights();
  return Session(std::make_unique<Session::Impl>(
      Session::Impl{impl_.get(), KvSession(*impl_->backend, plan.kv, options.policies)}));
}

Session Engine::new_session(std::int64_t context) { return new_session({context, {}, 1}); }

MemoryUse Engine::memory() const { return memory_use(*impl_->backend); }

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

std::span<const float> Session::prefill(std::span<const TokenId> tokens, const Progress& progress) {
  impl_->require(tokens);
  if (!impl_->uncorrected.empty()) impl_->correct();
  if (impl_->kv.policy().prefill.tau > 0.0) return impl_->sparse_prefill(tokens, progress);
  std::int64_t last = 0;
  const auto remember = [&](std::int64_t, std::int64_t count) { last = count - 1; };
  if (!impl_->run(tokens, progress, remember)) return {};
  return impl_->engine->decoder->logits(last, 1);
}

std::span<const float> Session::decode(TokenId token) {
  impl_->require({&token, 1});
  impl_->decode({&token, 1});
  return impl_->engine->decoder->logits(0, 1);
}

TokenId Session::decode(TokenId token, Sampler& sampler, std::span<const TokenId> history) {
  if (sampler.penalizes()) return sampler.next(decode(token), history);
  impl_->require({&token, 1});
  impl_->decode({&token, 1});
  return impl_->engine->decoder->sample(sampler.draw());
}

void Session::decode_known(std::span<const TokenId> tokens,
                           const std::function<void(std::size_t, std::span<const float>)>& each) {
  impl_->require(tokens);
  const auto vocabulary = static_cast<std::size_t>(impl_->engine->info.vocabulary);
  for (std::size_t first = 0; first < tokens.size();) {
    const std::size_t count =
        std::min(static_cast<std::size_t>(impl_->decode_room()), tokens.size() - first);
    impl_->decode(tokens.subspan(first, count));
    const std::span<const float> logits =
        impl_->engine->decoder->logits(0, static_cast<std::int64_t>(count));
    for (std::size_t i = 0; i < count; ++i) {
      each(first + i, logits.subspan(i * vocabulary, vocabulary));
    }
    first += count;
  }
}

void Session::use(const Policy& policy) {
  impl_->kv.use(policy);
  impl_->uncorrected.clear();
}

const Policy& Session::policy() const { return impl_->kv.policy(); }

void Session::truncate(std::int64_t length) {
  if (length < 0 || length > impl_->kv.length()) {
    throw Error(ErrorCode::usage, "a session of " + std::to_string(impl_->kv.length()) +
                                      " tokens cannot be cut to " + std::to_string(length));
  }
  impl_->kv.truncate(length);
  impl_->uncorrected.clear();
}

std::vector<float> Session::score(std::span<const TokenId> tokens, const Progress& progress) {
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
