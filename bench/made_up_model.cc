#include "bench/made_up_model.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "lib/weight_code.h"
#include "offload/backends.h"
#include "offload/step/kv_batch.h"
#include "offload/step/solo_step.h"
#include "sluice/half.h"

namespace sluice::bench {
namespace {

constexpr TokenId kToken = 267;  // any id

ModelConfig llama_8b() {
  ModelConfig c;
  c.architecture = "llama";
  c.hidden_size = 4096;
  c.intermediate_size = 14336;
  c.num_hidden_layers = 32;
  c.num_attention_heads = 32;
  c.num_key_value_heads = 8;
  c.head_dim = 128;
  c.vocab_size = 128256;
  c.max_position_embeddings = 1 << 20;
  c.rms_norm_eps = 1e-5f;
  c.rope.theta = 500000.0;
  return c;
}

// MHA: every query head has its own rows.
ModelConfig llama_7b() {
  ModelConfig c = llama_8b();
  c.intermediate_size = 11008;
  c.num_key_value_heads = 32;
  c.vocab_size = 32000;
  c.rope.theta = 10000.0;
  return c;
}

ModelConfig sluice_22m() {
  ModelConfig c = llama_8b();
  c.hidden_size = 384;
  c.intermediate_size = 1024;
  c.num_hidden_layers = 12;
  c.num_attention_heads = 8;
  c.num_key_value_heads = 2;
  c.head_dim = 64;
  c.vocab_size = 4096;
  return c;
}

ModelConfig config_of(ModelShape shape) {
  switch (shape) {
    case ModelShape::llama_8b:
      return llama_8b();
    case ModelShape::llama_7b:
      return llama_7b();
    case ModelShape::sluice_22m:
      break;
  }
  return sluice_22m();
}

// bf16 numbers with a deviation of 0.02, as transformers initialises weights.
std::vector<std::uint16_t> made_up(std::size_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<std::uint16_t> some(1 << 20);
  for (std::uint16_t& value : some) value = float_to_bf16(normal(random));
  std::vector<std::uint16_t> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = some[(i + i / some.size() * 7919) % some.size()];
  return all;
}

Buffer upload(Queue& queue, const void* data, std::size_t bytes) {
  Backend& backend = queue.backend();
  Buffer buffer = backend.allocate(backend.info().compute_tier, bytes);
  const CopyOp op = {buffer.data(), static_cast<const std::byte*>(data), bytes};
  queue.copy({&op, 1});
  queue.synchronize();
  return buffer;
}

// A weight of random codes with scales of 2^-11, because coding as many numbers takes minutes.
std::unique_ptr<Weight> made_up_codes(const WeightShape& shape, Queue& queue) {
  constexpr std::int64_t kRows = 1024;  // at a time, which repeat
  const std::size_t row_bytes = shape.format.row_bytes(shape.inputs);
  const Buffer rows =
      queue.backend().allocate(Tier::host, static_cast<std::size_t>(kRows) * row_bytes);
  std::mt19937 random(1);
  std::vector<std::uint32_t> words(rows.bytes() / sizeof(std::uint32_t) + 1);
  std::generate(words.begin(), words.end(), [&] { return static_cast<std::uint32_t>(random()); });
  std::memcpy(rows.data(), words.data(), rows.bytes());
  const CodedRow at(shape.format, shape.inputs);
  const std::vector<std::uint16_t> scales(at.codes / sizeof(std::uint16_t), float_to_f16(0x1p-11f));
  for (std::size_t row = 0; row < static_cast<std::size_t>(kRows); ++row) {
    std::memcpy(rows.data() + row * row_bytes, scales.data(), at.codes);
  }
  std::unique_ptr<Weight> weight = queue.backend().make_weight(shape);
  for (std::int64_t first = 0; first < shape.outputs; first += kRows) {
    const std::int64_t count = std::min(kRows, shape.outputs - first);
    queue.run(
        WriteWeightParams{weight.get(), first, {rows.data(), shape.format, count, shape.inputs}});
  }
  queue.synchronize();
  return weight;
}

ModelWeights made_up_weights(const ModelConfig& c, const WeightFormat& format, Queue& queue) {
  const std::int64_t hidden = c.hidden_size;
  const std::vector<std::uint16_t> values =
      made_up(static_cast<std::size_t>(c.vocab_size) * static_cast<std::size_t>(hidden));
  const auto matrix_in = [&](std::int64_t outputs, std::int64_t inputs, const WeightFormat& of) {
    if (of.is_coded()) return made_up_codes({outputs, inputs, of}, queue);
    return queue.backend().prepare_weight(
        {const_cast<std::uint16_t*>(values.data()), DType::bf16, outputs, inputs, inputs});
  };
  const auto matrix = [&](std::int64_t outputs, std::int64_t inputs) {
    return matrix_in(outputs, inputs, format);
  };
  const WeightFormat of_qkv = format.code == WeightCode::int4 ? WeightCode::int8 : format;
  const std::vector<float> ones(static_cast<std::size_t>(hidden), 1.0f);
  const auto norm = [&] { return upload(queue, ones.data(), ones.size() * sizeof(float)); };
  const std::int64_t query = std::int64_t{c.num_attention_heads} * c.head_dim;
  const std::int64_t key = std::int64_t{c.num_key_value_heads} * c.head_dim;
  ModelWeights weights;
  weights.embedding = upload(queue, values.data(), values.size() * sizeof(std::uint16_t));
  weights.table = {weights.embedding.data(), DType::bf16, c.vocab_size, hidden, hidden};
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerWeights& w = weights.layers.emplace_back();
    w.input_norm = norm();
    w.qkv = matrix_in(query + 2 * key, hidden, of_qkv);
    w.o = matrix(hidden, query);
    w.post_norm = norm();
    w.gate_up = matrix(2 * std::int64_t{c.intermediate_size}, hidden);
    w.down = matrix(hidden, c.intermediate_size);
  }
  weights.final_norm = norm();
  weights.lm_head = matrix(c.vocab_size, hidden);
  return weights;
}

std::uint64_t bytes_of(const ModelWeights& weights, const WeightFormat& format) {
  const auto bytes_in = [](const Weight& weight, const WeightFormat& of) {
    return static_cast<std::uint64_t>(weight.outputs()) * of.row_bytes(weight.inputs());
  };
  const WeightFormat of_qkv = format.code == WeightCode::int4 ? WeightCode::int8 : format;
  std::uint64_t bytes = bytes_in(*weights.lm_head, format);
  for (const LayerWeights& w : weights.layers) {
    bytes += bytes_in(*w.qkv, of_qkv) + bytes_in(*w.o, format) + bytes_in(*w.gate_up, format) +
             bytes_in(*w.down, format);
  }
  return bytes;
}

}  // namespace

MadeUpModel::MadeUpModel(ModelShape shape, const WeightFormat& format) : config_(config_of(shape)) {
  BackendOptions options;
  options.device = "cuda";
  backend_ = make_backend(options);
  queue_ = backend_->make_queue();
  ModelWeights weights = made_up_weights(config_, format, *queue_);
  matrix_bytes_ = bytes_of(weights, format);
  decoder_ = std::make_unique<Decoder>(config_, std::move(weights), *queue_);
  decoder_->allocate(kChunk);
  logits_ = backend_->allocate(
      Tier::host,
      static_cast<std::size_t>(Decoder::kLogitRows * config_.vocab_size) * sizeof(float));
}

KvShape MadeUpModel::kv(const RowFormat& rows) const {
  return {config_.num_hidden_layers, config_.num_attention_heads, config_.num_key_value_heads,
          config_.head_dim, rows};
}

void MadeUpModel::fill(KvSession& session, std::int64_t length) const {
  const KvShape& shape = session.plan().shape;
  const std::int64_t width = std::int64_t{shape.kv_heads} * shape.head_dim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(session.plan().chunk * width));
  for (float& value : rows) value = normal(random);
  const Buffer device = upload(*queue_, rows.data(), rows.size() * sizeof(float));
  while (session.length() < length) {
    SoloStep step(session, Phase::prefill,
                  std::min(session.plan().chunk, length - session.length()));
    for (int layer = 0; layer < shape.layers; ++layer) {
      step.append(layer, {device.floats(), device.floats(), width});
    }
    step.end();
  }
  queue_->synchronize();
}

double MadeUpModel::decode(std::span<KvSession* const> sessions) {
  const std::vector<TokenId> tokens(sessions.size(), kToken);
  const auto begin = std::chrono::steady_clock::now();
  KvBatch batch(sessions);
  decoder_->decode(tokens, batch);
  const std::chrono::duration<double> issued = std::chrono::steady_clock::now() - begin;
  const auto vocabulary = static_cast<std::size_t>(config_.vocab_size);
  for (std::int64_t i = 0; i < batch.count(); ++i) {
    decoder_->read_logits(i, {logits_.floats() + i * config_.vocab_size, vocabulary});
  }
  for (const std::optional<Error>& error : batch.end()) {
    if (error) throw Error(*error);
  }
  return issued.count();
}

double MadeUpModel::decode(KvSession& session) {
  KvSession* const one = &session;
  return decode({&one, 1});
}

MadeUpModel& made_up_model(ModelShape shape, const WeightFormat& format) {
  static std::unique_ptr<MadeUpModel> one;
  static std::pair made = {shape, format};
  const std::pair wanted = {shape, format};
  if (one == nullptr || made != wanted) {
    one.reset();
    one = std::make_unique<MadeUpModel>(shape, format);
    made = wanted;
  }
  return *one;
}

DecodeBytes decode_bytes(std::span<KvSession* const> sessions) {
  DecodeBytes bytes;
  for (const KvSession* session : sessions) {
    const Ledger& ledger = session->ledger();
    const auto total = [&](Tier from, Cause cause) {
      return ledger.total(Phase::decode, from, Tier::device, cause).bytes;
    };
    bytes.read += total(Tier::device, Cause::hit) + total(Tier::host, Cause::miss) +
                  total(Tier::device, Cause::index_read);
    bytes.from_host += ledger.crossed(Tier::host, Tier::device).bytes;
  }
  return bytes;
}

}  // namespace sluice::bench
