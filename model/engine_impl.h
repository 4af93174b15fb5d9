// What Engine and Session share: see sluice/engine.h.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "model/checkpoint.h"
#include "model/decoder.h"
#include "model/turns.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_session.h"
#include "sluice/engine.h"

namespace sluice {

struct Engine::Impl {
  EngineConfig config;
  Checkpoint checkpoint;
  ModelInfo info;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<Backend> backend;
  HostAttender attender;         // beside it, if it is a GPU
  std::shared_ptr<Queue> queue;  // of all pools
  // Before anything was asked of the backend: of the device, and of the host.
  std::uint64_t backend_bytes = 0;
  std::uint64_t staging_bytes = 0;
  std::optional<Decoder> decoder{};       // from load_weights on; allocated by the first session
  int readers = 1;                        // threads that load the weights
  bool chunk_is_open = false;             // nobody asked for config.chunk, and nothing is allocated
  std::uint64_t promised_host_bytes = 0;  // to sessions, whose rows take them as they grow
  // Activations and the backend's streams serve one call at a time.
  FairMutex mutex{};
  bool is_busy = false;
  int sessions = 0;

  // Engine::open() with a backend of the caller's choice, for weights of a dtype.
  using MakeBackend = std::function<std::unique_ptr<Backend>(DType weights)>;
  static Engine open(const EngineConfig& config, const MakeBackend& make);

  // A cap on device memory, and what it has to hold besides a new session's KV cache: its prompt,
  // other sessions and, on a GPU, what all share, be it there already or not.
  struct DeviceCap {
    std::uint64_t bytes = 0;
    std::uint64_t beside = 0;

    std::uint64_t left() const { return bytes - std::min(bytes, beside); }
  };

  // A plan, and the chunk that the engine is to have for it.
  struct Planned {
    Plan plan;
    int chunk = 0;
  };
  Planned plan(const SessionOptions& options) const;
  // Allocates what serves steps of up to `chunk` tokens, for the first session.
  void allocate(int chunk);

  // The parts of plan(). The engine's cap, none if there is none, is that of a model's plan.
  Plan plan_with(const SessionOptions& options, int chunk) const;
  Plan model_plan(const SessionOptions& options, int chunk) const;
  std::optional<DeviceCap> device_cap(const Plan& plan) const;
  KvRequest kv_request(const SessionOptions& options, int chunk,
                       const std::optional<DeviceCap>& cap) const;

  // Steps of several sessions have no more.
  std::int64_t most_at_once() const {
    return std::min<std::int64_t>(config.chunk, Decoder::kLogitRows);
  }
};

// A call's turn to compute. Other threads wait for theirs; a callback has none.
class Turn {
 public:
  explicit Turn(Engine::Impl& engine) : engine_(&engine), lock_(engine.mutex) { begin(); }
  // Once no other call is under way for any of the sessions.
  Turn(Engine::Impl& engine, std::span<Session::Impl* const> sessions);
  Turn(Engine::Impl& engine, Session::Impl& session);
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn();

  // Lets those who wait have theirs first. Calls for this turn's sessions wait on.
  void pause();

 private:
  void begin();

  Engine::Impl* engine_;
  std::unique_lock<FairMutex> lock_;
  std::vector<Session::Impl*> sessions_;
};

// What a plan was granted besides its pool, until the last session that has a part of it ends: the
// promise of host memory for its rows, and room for a prompt.
class SessionGrant {
 public:
  // Throws Error{memory} if there is no room.
  SessionGrant(Engine::Impl& engine, const Plan& plan)
      : prompt_(engine.backend->allocate(engine.backend->info().compute_tier, plan.prompt_bytes)),
        engine_(&engine),
        bytes_(plan.session_host_bytes()) {
    engine.promised_host_bytes += bytes_;
  }
  SessionGrant(const SessionGrant&) = delete;
  SessionGrant& operator=(const SessionGrant&) = delete;
  ~SessionGrant() { engine_->promised_host_bytes -= bytes_; }

  // See Decoder::prompt(). Taken when the session begins: what others find free later is theirs.
  const Buffer& prompt() const { return prompt_; }

 private:
  Buffer prompt_;
  Engine::Impl* engine_;
  std::uint64_t bytes_;
};

struct Session::Impl {
  std::shared_ptr<Engine::Impl> engine;
  KvSession kv;
  std::shared_ptr<SessionGrant> grant;  // that it shares with forks and siblings
  std::vector<TokenId> uncorrected{};   // decoded sparsely since the last correction
  std::vector<float> logits{};          // after the last token
  bool in_call = false;                 // which has not returned yet

  Impl(std::shared_ptr<Engine::Impl> owner, KvSession session,
       std::shared_ptr<SessionGrant> granted);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  // Throws unless `tokens` may be appended, before anything has changed.
  void require(std::span<const TokenId> tokens) const;

  // Recomputes the tokens that were decoded since the last correction: their rows and their part
  // of the key index are replaced by what dense attention gives. Source: TidalDecode, section 3.3.
  void correct();
  void correct_if_due();
  // Tokens that were decoded, and will have to be corrected.
  void note(std::span<const TokenId> tokens);

  // Decodes known tokens, at most as many as one step takes, after a correction if one is due.
  void decode_known(std::span<const TokenId> tokens);
  // Tokens that the next decode step may take.
  std::int64_t decode_room() const;

  std::span<const float> prefill(std::span<const TokenId> tokens, const Progress& progress);
  // A prompt under a policy whose prefill is sparse.
  std::span<const float> sparse_prefill(std::span<const TokenId> tokens, const Progress& progress);
  // Runs `tokens` in steps of the planned chunk, between which others may have their turn;
  // each(first, count) after every step. False if `progress` stopped it. What fails leaves the
  // tokens that there were, unless the session cannot go on.
  bool run(Turn& turn, std::span<const TokenId> tokens, const Progress& progress,
           const std::function<void(std::int64_t, std::int64_t)>& each);
  bool run_pieces(Turn& turn, std::span<const TokenId> tokens, const Progress& progress,
                  const std::function<void(std::int64_t, std::int64_t)>& each);
  // The logits after a token of the last step, kept for whoever asked.
  std::span<const float> keep(std::span<const float> row);
};

}  // namespace sluice
