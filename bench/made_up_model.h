// Models of the shapes of Llama 3 8B, of Llama 2 7B and of sluice-22m on a GPU, with made-up
// weights and rows, which take the time that real ones take. Selections of made-up rows hit their
// caps: more rows than real text needs, never fewer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "lib/backend.h"
#include "model/config.h"
#include "model/decoder.h"
#include "offload/step/kv_session.h"

namespace sluice::bench {

// Most tokens per step of a prompt.
inline constexpr std::int64_t kChunk = 2048;

enum class ModelShape { sluice_22m, llama_8b, llama_7b };

class MadeUpModel {
 public:
  explicit MadeUpModel(ModelShape shape);

  Backend& backend() const { return *backend_; }
  const std::shared_ptr<Queue>& queue() const { return queue_; }
  Decoder& decoder() const { return *decoder_; }
  KvShape kv() const;
  // Of the matrices, every one of which a decode step reads once.
  std::uint64_t matrix_bytes() const { return matrix_bytes_; }

  // Rows up to `length`, and the key index, without any attention.
  void fill(KvSession& session, std::int64_t length) const;

  // One token for each session, and the logits after it brought to host memory. The seconds that
  // the host itself took to issue the step, waiting for nothing.
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

// Made once, and one at a time.
MadeUpModel& made_up_model(ModelShape shape);

// Rows and index entries that decode steps of a session read, and bytes that came from the host.
struct DecodeBytes {
  std::uint64_t read = 0;
  std::uint64_t from_host = 0;
};
DecodeBytes decode_bytes(std::span<KvSession* const> sessions);

}  // namespace sluice::bench
