// Models with the shapes of Llama 3 8B, Llama 2 7B and sluice-22m on a GPU. Weights and rows are
// made up, which does not change the time of a step. Selections of made-up rows hit their caps:
// more rows than real text needs, never fewer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/config.h"
#include "engine/decoder.h"
#include "lib/backend.h"
#include "offload/step/kv_session.h"

namespace sluice::bench {

// Maximum tokens per step of a prompt.
inline constexpr std::int64_t kChunk = 2048;

enum class ModelShape { sluice_22m, llama_8b, llama_7b };

class MadeUpModel {
 public:
  // Weights of int4 have Q, K and V in int8, as the loader makes them.
  MadeUpModel(ModelShape shape, const WeightFormat& format);

  Backend& backend() const { return *backend_; }
  const std::shared_ptr<Queue>& queue() const { return queue_; }
  Decoder& decoder() const { return *decoder_; }
  KvShape kv(const RowFormat& rows = DType::bf16) const;
  // Bytes of the matrices; a decode step reads each of them once.
  std::uint64_t matrix_bytes() const { return matrix_bytes_; }

  // Fills rows up to `length` and their key index, without attention.
  void fill(KvSession& session, std::int64_t length) const;

  // Decodes one token per session and copies the logits to host memory. Returns the seconds the
  // host took to issue the step, excluding waits.
  double decode(std::span<KvSession* const> sessions);
  double decode(KvSession& session);

 private:
  ModelConfig config_;
  std::unique_ptr<Backend> backend_;
  std::shared_ptr<Queue> queue_;
  std::unique_ptr<Decoder> decoder_;
  Buffer logits_;  // host memory, [Decoder::kLogitRows, vocabulary]
  std::uint64_t matrix_bytes_ = 0;
};

// Built on the first call for a shape and a format; only one model exists at a time.
MadeUpModel& made_up_model(ModelShape shape, const WeightFormat& format = DType::bf16);

// Rows and index entries that decode steps of a session read, and bytes fetched from host memory.
struct DecodeBytes {
  std::uint64_t read = 0;
  std::uint64_t from_host = 0;
};
DecodeBytes decode_bytes(std::span<KvSession* const> sessions);

}  // namespace sluice::bench
