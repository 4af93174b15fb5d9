#include "engine/decoder.h"

#include <algorithm>
#include <array>

#include "lib/check.h"
#include "offload/step/solo_step.h"

namespace sluice {
namespace {

// Columns of each activation.
struct Widths {
  std::int64_t hidden, query, key, qkv, intermediate, vocabulary;

  explicit Widths(const ModelConfig& c)
      : hidden(c.hidden_size),
        query(std::int64_t{c.num_attention_heads} * c.head_dim),
        key(std::int64_t{c.num_key_value_heads} * c.head_dim),
        qkv(query + 2 * key),
        intermediate(c.intermediate_size),
        vocabulary(c.vocab_size) {}
};

Matrix view(const Buffer& buffer, DType dtype, std::int64_t rows, std::int64_t columns) {
  return {buffer.data(), dtype, rows, columns, columns};
}

const float* optional_floats(const Buffer& buffer) {
  return buffer.data() == nullptr ? nullptr : buffer.floats();
}

// Calls body(first, x) for every chunk of a residual stream: up to `chunk` rows.
template <typename Body>
void for_pieces(const Matrix& stream, std::int64_t chunk, const Body& body) {
  auto* const rows = static_cast<float*>(stream.data);
  for (std::int64_t first = 0; first < stream.rows; first += chunk) {
    Matrix piece = stream;
    piece.data = rows + first * stream.columns;
    piece.rows = std::min(chunk, stream.rows - first);
    body(first, piece);
  }
}

}  // namespace

Decoder::ActivationBytes::ActivationBytes(const ModelConfig& config, const Backend& backend,
                                          std::int64_t chunk) {
  const Widths w(config);
  const auto bytes_of = [](std::int64_t rows, std::int64_t columns, DType dtype) {
    return static_cast<std::size_t>(rows * columns) * size_of(dtype);
  };
  const DType compute = backend.info().compute_dtype;
  ids = static_cast<std::size_t>(chunk) * sizeof(TokenId);
  x = bytes_of(chunk, w.hidden, DType::f32);
  normed = bytes_of(chunk, w.hidden, compute);
  qkv = bytes_of(chunk, w.qkv, DType::f32);
  attended = bytes_of(chunk, w.query, DType::f32);
  lse = bytes_of(chunk, config.num_attention_heads, DType::f32);
  mixed = bytes_of(chunk, w.query, compute);
  const std::int64_t fed = std::min(chunk, kFeedForwardRows);
  gate_up = bytes_of(fed, 2 * w.intermediate, DType::f32);
  product = bytes_of(fed, w.intermediate, compute);
  logits = bytes_of(std::min(chunk, kLogitRows), w.vocabulary, DType::f32);
  const std::int64_t decoded = std::min(chunk, kMostBatch);
  early_normed = bytes_of(2 * decoded, w.hidden, compute);
  early_qkv = bytes_of(decoded, w.qkv, DType::f32);
}

std::uint64_t Decoder::activation_bytes(const ModelConfig& config, const Backend& backend,
                                        std::int64_t chunk) {
  return ActivationBytes(config, backend, chunk).sum();
}

std::uint64_t Decoder::host_bytes(const ModelConfig& config, const Backend& backend,
                                  std::int64_t chunk, bool observed) {
  const std::uint64_t ids = static_cast<std::uint64_t>(kLogitRows) * sizeof(TokenId);
  if (backend.info().compute_tier == Tier::host) return ids;
  const ActivationBytes bytes(config, backend, chunk);
  return ids + bytes.logits + (observed ? bytes.qkv : 0);
}

Decoder::Decoder(const ModelConfig& config, ModelWeights weights, Queue& queue,
                 std::shared_ptr<RowObserver> observer)
    : config_(config),
      weights_(std::move(weights)),
      queue_(&queue),
      inverse_frequencies_(inverse_frequencies(config)),
      observer_(std::move(observer)) {}

// Allocates everything or nothing, so that the caller can make room and try again.
void Decoder::allocate(std::int64_t chunk) {
  Backend& backend = queue_->backend();
  const ActivationBytes bytes(config_, backend, chunk);
  const auto allocate = [&](std::size_t count) {
    return backend.allocate(backend.info().compute_tier, count);
  };
  Buffer staged_ids = backend.allocate(Tier::host, kLogitRows * sizeof(TokenId));
  Activations a;
  a.ids = allocate(bytes.ids);
  a.x = allocate(bytes.x);
  a.normed = allocate(bytes.normed);
  a.qkv = allocate(bytes.qkv);
  a.attended = allocate(bytes.attended);
  a.lse = allocate(bytes.lse);
  a.mixed = allocate(bytes.mixed);
  a.gate_up = allocate(bytes.gate_up);
  a.product = allocate(bytes.product);
  a.logits = allocate(bytes.logits);
  a.early_normed = allocate(bytes.early_normed);
  a.early_qkv = allocate(bytes.early_qkv);
  if (backend.info().compute_tier != Tier::host) {
    host_logits_ = backend.allocate(Tier::host, a.logits.bytes());
    if (observer_) observed_ = backend.allocate(Tier::host, a.qkv.bytes());
  }
  staged_ids_ = std::move(staged_ids);
  a_ = std::move(a);
}

RmsNormParams Decoder::norm(const Matrix& x, const Buffer& weight, const Matrix& y) const {
  return {x, weight.floats(), config_.rms_norm_eps, y};
}

void Decoder::embed(std::span<const TokenId> tokens, const Matrix& x) {
  const CopyOp op = {a_.ids.data(), reinterpret_cast<const std::byte*>(tokens.data()),
                     tokens.size_bytes()};
  queue_->copy({&op, 1});
  queue_->run(EmbedParams{weights_.table, reinterpret_cast<const TokenId*>(a_.ids.data()), x,
                          weights_.coded_table});
}

void Decoder::rotate(const Buffer& qkv, const LayerWeights& weights, std::int64_t tokens,
                     const Positions& positions) {
  RopeParams params;
  params.x = qkv.floats();
  params.tokens = tokens;
  params.stride = Widths(config_).qkv;
  params.query_heads = config_.num_attention_heads;
  params.key_heads = config_.num_key_value_heads;
  params.head_dim = config_.head_dim;
  params.batch = positions.batch;
  params.first_position = positions.first;
  params.inverse_frequency = inverse_frequencies_.data();
  params.query_norm = optional_floats(weights.q_norm);
  params.key_norm = optional_floats(weights.k_norm);
  params.norm_epsilon = config_.rms_norm_eps;
  params.factor = static_cast<float>(config_.rope.attention_factor());
  queue_->run(params);
}

void Decoder::project(int layer, const Matrix& x, const Positions& positions) {
  const Widths w(config_);
  const LayerWeights& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const Matrix normed = view(a_.normed, queue_->backend().info().compute_dtype, x.rows, w.hidden);
  const Matrix qkv = view(a_.qkv, DType::f32, x.rows, w.qkv);
  LinearChain chain;
  chain.norm = norm(x, weights.input_norm, normed);
  chain.linear = {normed, weights.qkv.get(), optional_floats(weights.qkv_bias), qkv};
  queue_->run(chain);
  rotate(a_.qkv, weights, x.rows, positions);
}

// The norm reads x before the previous layer changes it; the rest runs beside that layer.
template <class Step>
void Decoder::begin_early(int layer, Early at, const Matrix& x, const Positions& positions,
                          Step& step) {
  if (layer == config_.num_hidden_layers || step.early(layer) != at) return;
  if (!step.selects(layer)) {
    return queue_->branch(layer % 2, [&] { step.choose_early(layer, {}); });
  }
  const Widths w(config_);
  const LayerWeights& weights = weights_.layers[static_cast<std::size_t>(layer)];
  Matrix normed = view(a_.early_normed, queue_->backend().info().compute_dtype, x.rows, w.hidden);
  normed.data =
      a_.early_normed.data() + static_cast<std::size_t>(layer % 2) * (a_.early_normed.bytes() / 2);
  const Matrix qkv = view(a_.early_qkv, DType::f32, x.rows, w.qkv);
  queue_->run(norm(x, weights.input_norm, normed));
  queue_->branch(layer % 2, [&] {
    queue_->run(LinearParams{normed, weights.qkv.get(), optional_floats(weights.qkv_bias), qkv});
    rotate(a_.early_qkv, weights, x.rows, positions);
    step.choose_early(layer, {a_.early_qkv.floats(), w.qkv, nullptr, nullptr});
  });
}

void Decoder::show(int layer, Phase phase, std::int64_t tokens) {
  if (!observer_) return;
  const Widths w(config_);
  const bool on_host = observed_.data() == nullptr;
  if (!on_host) {
    const CopyOp op = {observed_.data(), a_.qkv.data(),
                       static_cast<std::size_t>(tokens * w.qkv) * sizeof(float)};
    queue_->copy({&op, 1});
  }
  queue_->synchronize();
  const float* const q = on_host ? a_.qkv.floats() : observed_.floats();
  observer_->observe({layer, phase, tokens, w.qkv, q, q + w.query, q + w.query + w.key});
}

NewRows Decoder::new_rows() const {
  const Widths w(config_);
  const float* const k = a_.qkv.floats() + w.query;
  return {k, k + w.key, w.qkv};
}

Queries Decoder::queries() const {
  return {a_.qkv.floats(), Widths(config_).qkv, a_.attended.floats(), a_.lse.floats()};
}

void Decoder::mix(int layer, const Matrix& x) {
  const Widths w(config_);
  const LayerWeights& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const Matrix mixed = view(a_.mixed, queue_->backend().info().compute_dtype, x.rows, w.query);
  LinearChain chain;
  chain.cast = {view(a_.attended, DType::f32, x.rows, w.query), mixed};
  chain.linear = {mixed, weights.o.get(), optional_floats(weights.o_bias), x, true};
  queue_->run(chain);
}

void Decoder::feed_forward(int layer, const Matrix& x) {
  const Widths w(config_);
  const LayerWeights& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const DType compute = queue_->backend().info().compute_dtype;
  for_pieces(x, kFeedForwardRows, [&](std::int64_t, const Matrix& piece) {
    const Matrix normed = view(a_.normed, compute, piece.rows, w.hidden);
    const Matrix gate_up = view(a_.gate_up, DType::f32, piece.rows, 2 * w.intermediate);
    const Matrix product = view(a_.product, compute, piece.rows, w.intermediate);
    LinearChain chain;
    chain.norm = norm(piece, weights.post_norm, normed);
    chain.linear = {normed, weights.gate_up.get(), nullptr, gate_up};
    chain.swiglu = {gate_up, product};
    queue_->run(chain);
    queue_->run(LinearParams{product, weights.down.get(), nullptr, piece, true});
  });
}

// A device works behind the host. For steps so long that a wait between layers is nothing, `stops`
// is asked when the layer before has been computed, not only issued.
bool Decoder::is_stopped(int layer, std::int64_t tokens, SoloStep& step, const Stop& stops) {
  constexpr std::int64_t kLongStep = 1024;
  if (!stops || layer == 0 || !step.is_cancellable()) return false;
  if (tokens >= kLongStep) queue_->synchronize();
  bool is_stopped = false;
  try {
    is_stopped = stops();
  } catch (...) {
    step.cancel();
    throw;
  }
  if (is_stopped) step.cancel();
  return is_stopped;
}

bool Decoder::step(std::span<const TokenId> tokens, Phase phase, KvSession& session,
                   const Stop& stops) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  check(&session.pool()->queue() == queue_, "a session that works on another queue");
  const QueueRange range(*queue_, {to_string(phase), -1, count});
  SoloStep step(session, phase, count);
  const Matrix x = view(a_.x, DType::f32, count, config_.hidden_size);
  embed(tokens, x);
  for (int layer = 0; layer < config_.num_hidden_layers; ++layer) {
    if (is_stopped(layer, count, step, stops)) return false;
    const QueueRange of_layer(*queue_, {"layer", layer});
    const Positions positions = {{}, session.length()};
    begin_early(layer + 1, Early::layer, x, positions, step);
    project(layer, x, positions);
    show(layer, phase, count);
    step.append(layer, new_rows());
    step.attend(layer, queries());
    mix(layer, x);
    begin_early(layer + 1, Early::half, x, positions, step);
    feed_forward(layer, x);
  }
  step.end();
  return true;
}

void Decoder::restore(std::int64_t tokens, KvSession& session,
                      const std::function<std::span<const RowSpan>(int layer)>& read) {
  session.list_pages(false);  // no query will choose any
  SoloStep step(session, Phase::prefill, tokens);
  for (int layer = 0; layer < config_.num_hidden_layers; ++layer) {
    queue_->synchronize();  // rows of the layer before are read until then
    step.append(layer, {.ready = read(layer)});
  }
  step.end_restored();
  session.list_pages(true);
}

void Decoder::decode(std::span<const TokenId> tokens, KvBatch& batch) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  check(count == batch.count() && count <= kLogitRows, "decode: other tokens than the batch has");
  check(&batch.queue() == queue_, "sessions that work on another queue");
  auto* const staged = reinterpret_cast<TokenId*>(staged_ids_.data());
  std::copy(tokens.begin(), tokens.end(), staged);
  const QueueRange range(*queue_, {to_string(Phase::decode), -1, count});
  const auto issue = [&] {
    const Matrix x = view(a_.x, DType::f32, count, config_.hidden_size);
    embed({staged, tokens.size()}, x);
    for (int layer = 0; layer < config_.num_hidden_layers; ++layer) {
      const QueueRange of_layer(*queue_, {"layer", layer});
      const Positions positions = {batch.tokens(), 0};
      begin_early(layer + 1, Early::layer, x, positions, batch);
      project(layer, x, positions);
      show(layer, Phase::decode, count);
      batch.append(layer, new_rows());
      batch.attend(layer, queries());
      mix(layer, x);
      begin_early(layer + 1, Early::half, x, positions, batch);
      feed_forward(layer, x);
    }
    compute_logits(0, count);
    batch.issue_report();
  };
  // An observer is the host's part in every layer.
  const bool replays = batch.is_recordable() && !observer_;
  replays ? queue_->replay(batch.recording(), issue) : issue();
}

std::uint64_t Decoder::prompt_bytes(const ModelConfig& config, std::int64_t tokens) {
  return static_cast<std::uint64_t>(tokens * config.hidden_size) * sizeof(float);
}

void Decoder::prompt_layer(int layer, const Matrix& stream, const KvSession& session,
                           KvPrompt& prompt) {
  const QueueRange range(*queue_, {"layer", layer});
  const std::int64_t chunk = session.plan().chunk;
  for_pieces(stream, chunk, [&](std::int64_t first, const Matrix& x) {
    prompt.take(first, x.rows);
    project(layer, x, {{}, session.length() + first});
    show(layer, Phase::prefill, x.rows);
    prompt.append(layer, new_rows());
    prompt.collect(queries());
  });
  prompt.choose(layer);
  for_pieces(stream, chunk, [&](std::int64_t first, const Matrix& x) {
    prompt.take(first, x.rows);
    // A prompt of one chunk still has its queries from the first pass.
    if (x.rows < stream.rows) project(layer, x, {{}, session.length() + first});
    prompt.attend(layer, queries());
    mix(layer, x);
    feed_forward(layer, x);
  });
}

bool Decoder::prompt(std::span<const TokenId> tokens, KvSession& session, const Buffer& stream,
                     const std::function<bool(double)>& progress) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  const std::int64_t hidden = config_.hidden_size;
  check(stream.bytes() >= prompt_bytes(config_, total), "a prompt that has no room");
  const Matrix all = {stream.floats(), DType::f32, total, hidden, hidden};
  const QueueRange range(*queue_, {to_string(Phase::prefill), -1, total});
  KvPrompt prompt(session, total);
  try {
    for_pieces(all, session.plan().chunk, [&](std::int64_t first, const Matrix& x) {
      embed(tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(x.rows)), x);
    });
    for (int layer = 0; layer < config_.num_hidden_layers; ++layer) {
      if (!progress(static_cast<double>(layer) / config_.num_hidden_layers)) {
        prompt.cancel();
        return false;
      }
      prompt.ready(layer);
      prompt_layer(layer, all, session, prompt);
    }
    prompt.end();
  } catch (...) {
    if (session.in_step()) prompt.cancel();
    throw;
  }
  // logits() starts from the last token's residual stream.
  queue_->run(CastParams{{stream.floats() + (total - 1) * hidden, DType::f32, 1, hidden, hidden},
                         view(a_.x, DType::f32, 1, hidden)});
  queue_->synchronize();
  return true;
}

Matrix Decoder::compute_logits(std::int64_t first, std::int64_t count) {
  check(count >= 1 && count <= kLogitRows, "logits: too many rows at once");
  const Widths w(config_);
  const DType compute = queue_->backend().info().compute_dtype;
  const Matrix x{a_.x.floats() + first * w.hidden, DType::f32, count, w.hidden, w.hidden};
  const Matrix normed = view(a_.normed, compute, count, w.hidden);
  LinearChain chain;
  chain.norm = norm(x, weights_.final_norm, normed);
  chain.linear = {normed, weights_.lm_head.get(), nullptr,
                  view(a_.logits, DType::f32, count, w.vocabulary)};
  queue_->run(chain);
  return chain.linear.y;
}

std::span<const float> Decoder::logits(std::int64_t first, std::int64_t count) {
  const Matrix logits = compute_logits(first, count);
  const auto size = static_cast<std::size_t>(count * logits.columns);
  const bool on_host = host_logits_.data() == nullptr;
  if (!on_host) {
    const CopyOp op = {host_logits_.data(), a_.logits.data(), size * sizeof(float)};
    queue_->copy({&op, 1});
  }
  queue_->synchronize();
  return {on_host ? a_.logits.floats() : host_logits_.floats(), size};
}

void Decoder::read_logits(std::int64_t token, std::span<float> to) {
  const CopyOp op = {
      reinterpret_cast<std::byte*>(to.data()),
      reinterpret_cast<const std::byte*>(a_.logits.floats() + token * config_.vocab_size),
      to.size_bytes()};
  queue_->copy({&op, 1});
}

void Decoder::sample(std::span<const TokenDraw> params, std::span<SampledToken> tokens) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  queue_->run(SampleParams{view(a_.logits, DType::f32, count, config_.vocab_size), params, tokens});
}

}  // namespace sluice
