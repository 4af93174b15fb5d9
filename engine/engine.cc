#include "sluice/engine.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "engine/calibration.h"
#include "engine/checkpoint_source.h"
#include "engine/engine_impl.h"
#include "engine/loader.h"
#include "engine/plan.h"
#include "engine/session_step.h"
#include "engine/tensors.h"
#include "engine/value_basis.h"
#include "io/checksum.h"
#include "lib/bytes.h"
#include "lib/counted_queue.h"
#include "lib/text.h"
#include "lib/traced_queue.h"
#include "offload/attention/host_share.h"
#include "offload/backends.h"
#include "offload/plan/disk_layout.h"
#include "offload/plan/index_layout.h"
#include "offload/plan/planner.h"
#include "sluice/errors.h"
#include "sluice/format_names.h"

namespace sluice {
namespace {

constexpr int kMaxChunk = 32768;

void validate(const EngineConfig& config) {
  if (config.model.empty()) {
    throw Error(ErrorCode::usage,
                "`model` is empty; give the folder of a checkpoint, or a GGUF file");
  }
  if (config.chunk < 0 || config.chunk > kMaxChunk) {
    throw Error(ErrorCode::usage, "`chunk` must be 1 to " + std::to_string(kMaxChunk) +
                                      ", or 0 for what suits the device, not " +
                                      std::to_string(config.chunk));
  }
  if (config.threads < 0 || config.threads > 4096) {
    throw Error(ErrorCode::usage, "`threads` must be 0 (one per core) to 4096, not " +
                                      std::to_string(config.threads));
  }
  if (!is_known(config.kv_dtype) || !is_known(config.compute.value_or(DType::f32))) {
    throw Error(ErrorCode::usage, "`kv_dtype` must be " + alternatives(row_format_names()) +
                                      ", and `compute` " + alternatives(dtype_names()));
  }
  if (config.weights && config.weights->code == WeightCode::uint4) {
    throw Error(ErrorCode::usage,
                "`weights` must be elements, int8 or int4, or unset: only files have uint4");
  }
  static_cast<void>(HostShare(config.host_attention));  // throws if it is invalid
}

void validate(const SessionOptions& options, std::int64_t most_at_once) {
  if (options.decode_batch < 1 || options.decode_batch > Decoder::kLogitRows) {
    throw Error(ErrorCode::usage, "decode_batch must be 1 to 64");
  }
  if (options.decode_batch > most_at_once) {
    throw Error(ErrorCode::usage, "decode_batch must not exceed the engine's chunk");
  }
  require_context(options.context);
}

// Prefill with page lists takes whole blocks of queries, so a chunk must hold at least one.
void require_blocks(const SessionOptions& options, std::int64_t chunk) {
  constexpr std::int64_t kBlock = PageLists::kBlock;
  const bool lists = std::any_of(options.policies.begin(), options.policies.end(),
                                 [](const Policy& p) { return p.prefill.pages > 0.0; });
  if (!lists || chunk >= std::min(kBlock, options.context)) return;
  throw Error(ErrorCode::usage, "`prefill=pages` takes a `chunk` of at least " +
                                    std::to_string(kBlock) + " tokens, not " +
                                    std::to_string(chunk));
}

void require_window(const ModelInfo& info, const std::string& device, std::int64_t context) {
  if (!info.window_limits || context <= *info.window) return;
  const std::string window = std::to_string(*info.window);
  throw Error(ErrorCode::unsupported,
              "layers of this model attend to the newest " + window +
                  " tokens alone, which Sluice does not do for its files on device " + device +
                  "; that makes no difference up to a `context` of " + window + ", but " +
                  std::to_string(context) + " tokens are asked for");
}

KvShape kv_shape(const ModelConfig& c, const RowFormat& rows) {
  return {c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim, rows};
}

// max_position_embeddings beside a YaRN factor is often still the number before stretching.
std::int64_t trained_context(const ModelConfig& c) {
  const auto* const yarn = std::get_if<YarnScaling>(&c.rope.scaling);
  if (yarn == nullptr) return c.max_position_embeddings;
  const double stretched = yarn->factor * yarn->original_max_position_embeddings;
  return std::max<std::int64_t>(c.max_position_embeddings, std::llround(stretched));
}

ModelInfo describe(const Checkpoint& checkpoint, const RowFormat& rows) {
  const ModelConfig& c = checkpoint.config();
  ModelInfo info;
  info.architecture = c.architecture;
  info.weight_bytes = checkpoint.parameter_bytes();
  info.weight_dtype = matrix_dtype(checkpoint);
  info.stored_types = checkpoint.stored_types();
  info.has_codes = checkpoint.has_codes();
  info.parameters = checkpoint.parameters();
  info.kv = kv_shape(c, rows);
  info.hidden = c.hidden_size;
  info.intermediate = c.intermediate_size;
  info.vocabulary = c.vocab_size;
  info.trained_context = trained_context(c);
  info.window = c.window;
  info.tied_embeddings = c.tie_word_embeddings;
  info.bos = c.bos_token_id;
  info.eos = c.eos_token_ids;
  return info;
}

// On a CPU, no chunk is faster than kChunk. On an H200, prefill of 32K tokens with chunks of 512
// takes 1.7 times the time of 2048 with sluice-22m, and 1.16 times with Llama 3 8B's shape.
constexpr int kChunk = 512;
constexpr int kDeviceChunk = 2048;

// Every step of a prompt fetches all earlier rows that are not resident, so a chunk twice as long
// halves the bytes fetched. 328K tokens, 12 layers of Llama 3 8B's shape, a tenth resident, on an
// H100: 20.1 s with a chunk of 4096 instead of 27.6 s; 8192 was no faster.
// A prompt that attends to only a few pages computes less per row fetched, so it gains more. A
// million tokens take 221 s with 2048 and 69 s with 8192 on an H100; 59 s with 8192, 35 s with
// 16384 and 25 s with 32768 on an H200 (bench/results/prefill_chunks_*.json).
int longest_chunk(const SessionOptions& options) {
  const auto any = [&](const auto& holds) {
    return std::any_of(options.policies.begin(), options.policies.end(), holds);
  };
  if (any([](const Policy& p) { return p.prefill.pages > 0.0; })) return kMaxChunk;
  // Prompts that run layer by layer fetch the rows they attend to once per layer.
  return any([](const Policy& p) { return p.prefill.tau > 0.0; }) ? kDeviceChunk : 2 * kDeviceChunk;
}

bool is_near(const KvPlan& plan) {
  return plan.in_place || plan.resident_tokens >= std::max(plan.context, plan.tokens);
}

// Returns true if decoding reads few enough rows that misses hardly matter.
bool reads_few_rows(const SessionOptions& options, int layers, const Scorers& scorers) {
  constexpr std::int64_t kFewRows = 1024;  // per KV head
  return std::all_of(options.policies.begin(), options.policies.end(), [&](const Policy& policy) {
    if (policy.select.name == "dense") return false;
    for (int layer = 0; layer < layers; ++layer) {
      if (most_selected(policy.at(layer), options.context, scorers) > kFewRows) return false;
    }
    return true;
  });
}

// Returns true if most of the rows that are resident with the usual chunk stay resident with the
// longer one. Half is enough where decoding reads few rows: with 93,000 resident tokens instead of
// 120,000, a million tokens of 12 layers of Llama 3 8B's shape take an H200 25 s instead of 37 s,
// and each decoded token 6.3 ms instead of 6.2 ms with `values`.
bool spares_rows(const KvPlan& longer, const KvPlan& usual, bool few_are_read) {
  const auto is_most = [](std::int64_t some, std::int64_t of) { return 4 * some >= 3 * of; };
  const bool is_enough = few_are_read ? 2 * longer.resident_tokens >= usual.resident_tokens
                                      : is_most(longer.resident_tokens, usual.resident_tokens);
  return is_enough && is_most(longer.dense_resident_tokens, usual.dense_resident_tokens) &&
         is_most(longer.cache_rows, usual.cache_rows) &&
         longer.stream_tokens >= usual.stream_tokens;
}

// The same for rows on disk: each step of a prompt reads all of them, so half is enough, unless
// those that a longer step leaves no memory for are read more often than before.
bool spares_half(const KvPlan& longer, const KvPlan& usual) {
  const auto is_half = [](std::int64_t some, std::int64_t of) { return 2 * some >= of; };
  // Rows that a prompt of the whole context reads from disk, twice.
  const auto read = [](const KvPlan& kv) {
    const auto on_disk = static_cast<double>(tokens_on_disk(kv));
    return on_disk * on_disk / static_cast<double>(kv.chunk);
  };
  return is_half(longer.resident_tokens, usual.resident_tokens) &&
         is_half(longer.dense_resident_tokens, usual.dense_resident_tokens) &&
         is_half(longer.cache_rows, usual.cache_rows) && read(longer) <= read(usual);
}

int chunk_for(const Checkpoint& checkpoint, Backend& backend, const WeightChoice& choice,
              int readers) {
  if (backend.info().compute_tier == Tier::host) return kChunk;
  const MemoryAccount& account = backend.account(Tier::device);
  const std::uint64_t taken =
      account.used() + weight_sizes(checkpoint, backend, choice, readers).total;
  const std::uint64_t room = account.cap() - std::min(account.cap(), taken);
  int chunk = kDeviceChunk;
  while (chunk > kChunk &&
         Decoder::activation_bytes(checkpoint.config(), backend, chunk) > room / 4) {
    chunk /= 2;
  }
  return chunk;
}

}  // namespace

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

Engine::Engine(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Engine::Impl& Engine::impl() const {
  if (impl_ == nullptr) throw Error(ErrorCode::usage, "an engine that was moved from");
  return *impl_;
}

Engine Engine::open(const EngineConfig& config) {
  return Impl::open(config,
                    [&](DType weights) { return make_backend(backend_options(config, weights)); });
}

Engine Engine::Impl::open(const EngineConfig& config, const MakeBackend& make) {
  validate(config);
  Engine engine = open_to_plan(config, Checkpoint::open(config.model), make, false);
  Impl& impl = engine.impl();
  if (CheckpointSource::open(config.model)->missing_tokenizer().empty()) {
    impl.tokenizer = Tokenizer::load_checkpoint(config.model, impl.info.vocabulary, impl.info.bos);
  }
  return engine;
}

Engine Engine::Impl::open_to_plan(const EngineConfig& config, Checkpoint checkpoint,
                                  const MakeBackend& make, bool is_elsewhere) {
  validate(config);
  check_tensors(checkpoint);
  ModelInfo info = describe(checkpoint, config.kv_dtype);
  std::unique_ptr<Backend> backend = make(info.weight_dtype);
  require_supported(backend->info(), info.kv);
  const bool knows_layers = !checkpoint.config().windows.empty();
  info.window_limits = info.window && !(knows_layers && backend->info().windows);
  require_formats(checkpoint, *backend, config.weights);
  std::unique_ptr<Queue> queue = backend->make_queue();
  if (config.counter) queue = std::make_unique<CountedQueue>(std::move(queue), config.counter);
  if (config.trace) queue = std::make_unique<TracedQueue>(std::move(queue), config.trace);
  const std::uint64_t backend_bytes = backend->account(Tier::device).used();
  const std::uint64_t staging_bytes = backend->account(Tier::host).used();
  HostAttender attender;
  if (!backend->info().synchronous && config.host_attention.value_or(1.0) > 0.0) {
    attender = {make_attending_cpu(config.threads), config.host_attention};
  }
  EngineConfig chosen = config;
  const bool is_open = config.chunk == 0;
  const int readers = reader_count(config.threads);
  if (is_open) chosen.chunk = chunk_for(checkpoint, *backend, config.weights, readers);
  auto* const impl = new Impl{
      std::move(chosen),   std::move(checkpoint), std::move(info), {},           std::move(backend),
      std::move(attender), std::move(queue),      backend_bytes,   staging_bytes};
  impl->chunk_is_open = is_open;
  impl->readers = readers;
  impl->is_elsewhere = is_elsewhere;
  return Engine(std::shared_ptr<Impl>(impl));
}

const ModelInfo& Engine::info() const { return impl().info; }

const Tokenizer& Engine::tokenizer() const {
  if (!impl().tokenizer) {
    throw Error(ErrorCode::tokenizer,
                CheckpointSource::open(impl().config.model)->missing_tokenizer());
  }
  return *impl().tokenizer;
}

std::vector<TokenId> Engine::encode_prompt(std::string_view text) const {
  const std::vector<TokenId> body = tokenizer().encode(text);
  const std::span<const TokenId> prefix = tokenizer().prefix();
  std::vector<TokenId> ids(prefix.begin(), prefix.end());
  ids.insert(ids.end(), body.begin(), body.end());
  return ids;
}

Policy Engine::policy(std::string_view text) const {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  const std::string_view name = text.substr(0, text.find(' '));
  const bool preset = std::any_of(presets().begin(), presets().end(),
                                  [&](const Preset& p) { return p.name == name; });
  const Scorers& scorers = impl().config.scorers;
  if (!preset) return parse_policy(text, scorers);
  const std::optional<Policy> own =
      calibrated_policy(impl().config.model, name, impl().info.kv, scorers);
  if (!own) return parse_policy(text, scorers);
  return change_policy(*own, text.substr(name.size()), scorers);
}

// Everything except the KV cache.
Plan Engine::Impl::model_plan(const SessionOptions& options, int chunk) const {
  const ModelConfig& model = checkpoint.config();
  const WeightSizes weights = weight_sizes(checkpoint, *backend, config.weights, readers);
  Plan plan;
  plan.weight_bytes = weights.total;
  plan.loading_bytes = weights.transient;
  if (wants_value_basis(options)) {
    plan.value_basis_bytes = value_basis_bytes(model);
    plan.loading_bytes =
        std::max(plan.loading_bytes,
                 plan.value_basis_bytes + value_basis_scratch_bytes(checkpoint, readers));
  } else {
    plan.value_basis_bytes = value_basis.bytes();
  }
  plan.weight_bytes += plan.value_basis_bytes;
  plan.activation_bytes = Decoder::activation_bytes(model, *backend, chunk);
  ThreadWork work;
  work.shape = info.kv;
  work.context = options.context;
  if (attender.backend != nullptr) plan.thread_bytes = attender.backend->thread_bytes(work);
  for (const Policy& policy : options.policies) {
    work.sums_columns = work.sums_columns || policy.prefill.tau > 0.0;
    work.lists_pages = work.lists_pages || policy.prefill.pages > 0.0;
  }
  if (work.sums_columns) plan.prompt_bytes = Decoder::prompt_bytes(model, options.context);
  plan.program_bytes = program_bytes();
  work.chunk = chunk;
  work.products = weights.products;
  plan.thread_bytes += backend->thread_bytes(work);
  plan.on_device = backend->info().compute_tier == Tier::device;
  plan.backend_bytes = backend_bytes;
  plan.staging_bytes =
      staging_bytes + Decoder::host_bytes(model, *backend, chunk, config.observer != nullptr);
  plan.loading_peak_bytes =
      staging_bytes + plan.loading_bytes + (plan.on_device ? 0 : plan.weight_bytes);
  return plan;
}

std::optional<Engine::Impl::DeviceCap> Engine::Impl::device_cap(const Plan& plan) const {
  if (!plan.on_device && !config.device_memory) return std::nullopt;
  const MemoryAccount& account = backend->account(Tier::device);
  // On a CPU the device tier holds only sessions. A GPU also holds the model, loaded yet or not.
  std::uint64_t shared = account.used();
  if (plan.on_device && !decoder) shared = plan.model_bytes() + plan.backend_bytes;
  if (plan.on_device && decoder && !decoder->is_allocated()) shared += plan.activation_bytes;
  if (plan.on_device && decoder && value_basis.bytes() == 0) shared += plan.value_basis_bytes;
  return DeviceCap{account.cap(), shared + plan.session_device_bytes()};
}

KvRequest Engine::Impl::kv_request(const SessionOptions& options, int chunk,
                                   const std::optional<DeviceCap>& cap) const {
  KvRequest request;
  request.shape = info.kv;
  request.on = backend->info();
  if (info.window && options.context > *info.window) request.windows = checkpoint.config().windows;
  request.context = options.context;
  request.chunk = chunk;
  request.sequences = options.sequences;
  request.tokens = options.tokens;
  request.indexed_tokens = options.indexed_tokens;
  request.decode_batch = options.decode_batch;
  request.reports_positions = options.reports_positions;
  request.policies = options.policies;
  request.scorers = &config.scorers;
  request.cache_memory = config.row_cache;
  request.host_attention = attender.backend != nullptr;
  request.has_value_basis = true;
  if (cap) {
    request.device_cap = cap->bytes;
    request.beside = cap->beside;
  }
  return request;
}

std::optional<HostRoom> Engine::Impl::host_room(const Plan& plan,
                                                const SessionOptions& options) const {
  std::optional<HostRoom> tightest;
  const auto limit = [&](const HostRoom& room) {
    if (!tightest || room.left() < tightest->left()) tightest = room;
  };
  if (config.host_memory) limit({*config.host_memory, plan.host_bytes() + promised_host_bytes});
  if (options.host_memory) limit({*options.host_memory, plan.session_host_bytes()});
  return tightest;
}

void Engine::Impl::require_host(const Plan& plan, const SessionOptions& options) const {
  require_host_memory(plan, config.host_memory, promised_host_bytes,
                      backend->account(Tier::host).used(), backend->info().threads, !is_elsewhere);
  if (!options.host_memory || plan.session_host_bytes() <= *options.host_memory) return;
  throw Error(ErrorCode::memory, "the session takes " + format_bytes(plan.session_host_bytes()) +
                                     " of host memory, more than its cap of " +
                                     format_bytes(*options.host_memory) + "; give at least " +
                                     std::to_string(plan.session_host_bytes()) + "B");
}

Plan Engine::Impl::plan_with(const SessionOptions& options, int chunk) const {
  Plan plan = model_plan(options, chunk);
  if (options.loads) plan.staging_bytes += saved_piece_bytes(info.kv);
  const std::optional<DeviceCap> cap = device_cap(plan);
  std::optional<DeviceCap> tightest = cap;
  if (options.device_memory) {
    const DeviceCap own = {*options.device_memory, plan.session_device_bytes()};
    if (!cap || own.left() < cap->left()) tightest = own;
  }
  const auto disk = [&] {
    return disk_room(*config.disk, host_room(plan, options),
                     plan.host_bytes() + plan.thread_bytes -
                         std::min(plan.host_bytes(), backend->account(Tier::host).used()));
  };
  plan.kv = plan_with_disk(kv_request(options, chunk, tightest), config.disk.has_value(), disk,
                           [&](const KvPlan& kv) {
                             Plan with = plan;
                             with.kv = kv;
                             require_host(with, options);
                           });
  const KvShape& shape = info.kv;
  const std::uint64_t layer_bytes = static_cast<std::uint64_t>(options.context) *
                                    static_cast<std::uint64_t>(shape.kv_heads) * shape.row_bytes();
  plan.dense_is_faster = is_near(plan.kv) && layer_bytes <= backend->info().dense_bytes;
  if (cap) plan.device_left = cap->left() - plan.kv.device_bytes;
  if (config.host_memory) {
    plan.host_left = *config.host_memory - plan.host_bytes() - promised_host_bytes;
  }
  return plan;
}

Engine::Impl::Planned Engine::Impl::plan(const SessionOptions& options) const {
  validate(options, most_at_once());
  require_window(info, backend->info().name, options.context);
  require_blocks(options, config.chunk);
  Planned usual = {plan_with(options, config.chunk), config.chunk};
  // Activations are shared by all sessions, so a session with its own cap must not lengthen them.
  const bool on_disk = usual.plan.kv.on_disk;
  const bool streams = config.chunk >= kDeviceChunk && !is_near(usual.plan.kv);
  const bool may_be_longer = chunk_is_open && !options.device_memory && (on_disk || streams);
  if (!may_be_longer) return usual;
  const bool few_are_read = reads_few_rows(options, info.kv.layers, config.scorers);
  for (int chunk = on_disk ? kMaxChunk : longest_chunk(options); chunk > config.chunk; chunk /= 2) {
    if (chunk / 2 >= options.context) continue;
    try {
      Planned longer = {plan_with(options, chunk), chunk};
      const bool is_whole = longer.plan.kv.chunk == std::min<std::int64_t>(chunk, options.context);
      const KvPlan& kv = longer.plan.kv;
      const bool spares = on_disk ? kv.on_disk && spares_half(kv, usual.plan.kv)
                                  : spares_rows(kv, usual.plan.kv, few_are_read);
      if (is_whole && spares) return longer;
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): no room for this chunk
    }
  }
  return usual;
}

void Engine::Impl::allocate(int chunk) {
  if (decoder->is_allocated()) return;
  decoder->allocate(chunk);
  config.chunk = chunk;
  chunk_is_open = false;
}

bool Engine::Impl::wants_value_basis(const SessionOptions& options) const {
  return halves_values(options.policies, info.kv.layers);
}

void Engine::Impl::load_value_basis(const SessionOptions& options) {
  if (!wants_value_basis(options) || value_basis.bytes() > 0) return;
  const std::vector<float> numbers = sluice::value_basis(checkpoint, readers);
  const std::span<const std::byte> bytes = std::as_bytes(std::span(numbers));
  Buffer buffer = backend->allocate(backend->info().compute_tier, bytes.size());
  const CopyOp op = {buffer.data(), bytes.data(), bytes.size()};
  queue->copy({&op, 1});
  queue->synchronize();
  value_basis = std::move(buffer);
  value_basis_hash = checksum_of(bytes);
}

ValueBasis Engine::Impl::basis_for(const SessionOptions& options) const {
  if (!wants_value_basis(options)) return {};
  return {value_basis.floats(), value_basis_hash};
}

Plan Engine::plan(const SessionOptions& options) const {
  const std::lock_guard lock(impl().mutex);
  return impl().plan(options).plan;
}

void Engine::load_weights(const std::function<void(double)>& progress) {
  impl();
  const std::shared_ptr<Impl> self = impl_;  // `progress` may end this engine, or move it
  const std::lock_guard lock(self->mutex);
  if (self->decoder) return;
  const Turn turn(*self);
  ModelWeights weights = sluice::load_weights(self->checkpoint, *self->backend,
                                              self->config.weights, self->readers, progress);
  self->decoder.emplace(self->checkpoint.config(), std::move(weights), *self->queue,
                        self->config.observer);
}

Session Engine::new_session(const SessionOptions& options) {
  const std::lock_guard lock(impl().mutex);
  const auto [plan, chunk] = impl().plan(options);
  load_weights();
  const Turn turn(impl());
  impl().load_value_basis(options);
  impl().allocate(chunk);
  auto grant = std::make_shared<SessionGrant>(impl(), plan);
  return Session(std::make_shared<Session::Impl>(
      impl_,
      KvSession(std::make_shared<KvPool>(impl().queue, plan.kv, options.policies,
                                         impl().config.scorers, impl().attender,
                                         impl().disk_source(), impl().basis_for(options))),
      std::move(grant)));
}

Session Engine::new_session(std::int64_t context) {
  SessionOptions options;
  options.context = context;
  return new_session(options);
}

std::vector<StepResult> Engine::step(std::span<const StepToken> tokens) {
  std::vector<SessionToken> inside;
  for (const StepToken& token : tokens) {
    if (token.session == nullptr || token.session->impl().engine.get() != &impl()) {
      throw Error(ErrorCode::usage, "a batch: its sessions must be of this engine");
    }
    inside.push_back({&token.session->impl(), token.token, token.sampler, token.history});
  }
  return step_sessions(impl(), inside);
}

bool Engine::index_fits(std::span<const Session* const> sessions, std::int64_t more) const {
  const std::lock_guard lock(impl().mutex);
  std::vector<std::int32_t> sequences;
  const KvPool* pool = nullptr;
  for (const Session* session : sessions) {
    const KvSession& kv = session->impl().kv;
    if (pool == nullptr) pool = kv.pool().get();
    if (kv.pool().get() != pool) {
      throw Error(ErrorCode::usage, "index_fits: its sessions must share their memory");
    }
    sequences.push_back(kv.sequence());
  }
  return pool == nullptr || pool->tables().has_slots(sequences, more);
}

MemoryUse Engine::memory() const { return memory_use(*impl().backend); }

}  // namespace sluice
