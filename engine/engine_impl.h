// State shared by Engine and Session: see sluice/engine.h.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/decoder.h"
#include "engine/fingerprint.h"
#include "engine/saved_session.h"
#include "engine/turns.h"
#include "lib/backend.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_session.h"
#include "sluice/engine.h"

namespace sluice {

struct BackendOptions;
BackendOptions backend_options(const EngineConfig& config, DType weight_dtype);

struct Engine::Impl {
  EngineConfig config;
  Checkpoint checkpoint;
  ModelInfo info;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<Backend> backend;
  HostAttender attender;         // host attention beside a GPU backend
  std::shared_ptr<Queue> queue;  // shared by all pools
  // Bytes that the new backend itself holds on the device, and in host memory.
  std::uint64_t backend_bytes = 0;
  std::uint64_t staging_bytes = 0;
  std::optional<Decoder> decoder{};       // from load_weights on; allocated by the first session
  int readers = 1;                        // threads that load the weights
  Buffer value_basis{};                   // value_basis(), from the first session that wants it on
  std::uint64_t value_basis_hash = 0;     // of its numbers
  bool is_elsewhere = false;              // plans for another machine, whose limits are not ours
  bool chunk_is_open = false;             // config.chunk left at its default, nothing allocated
  std::uint64_t promised_host_bytes = 0;  // to sessions, whose rows take them as they grow
  // Activations and the backend's streams serve one call at a time.
  FairMutex mutex{};
  bool is_busy = false;
  int sessions = 0;

  DiskSource disk_source() const {
    return {config.disk ? config.disk->directories : std::vector<std::filesystem::path>()};
  }

  // Engine::open() with the backend that `make` returns for the weights' dtype.
  using MakeBackend = std::function<std::unique_ptr<Backend>(DType weights)>;
  static Engine open(const EngineConfig& config, const MakeBackend& make);
  // An engine that plans only: it has no tokenizer. `is_elsewhere`: for another machine, so that
  // the limits of this process do not count.
  static Engine open_to_plan(const EngineConfig& config, Checkpoint checkpoint,
                             const MakeBackend& make, bool is_elsewhere);

  // A cap on device memory, and the bytes under it besides a new session's KV cache: the session's
  // prompt, other sessions and, on a GPU, everything shared, allocated already or not.
  struct DeviceCap {
    std::uint64_t bytes = 0;
    std::uint64_t beside = 0;

    std::uint64_t left() const { return bytes - std::min(bytes, beside); }
  };

  // A plan, and the engine's chunk under it.
  struct Planned {
    Plan plan;
    int chunk = 0;
  };
  Planned plan(const SessionOptions& options) const;
  // Allocates activations for steps of up to `chunk` tokens, for the first session.
  void allocate(int chunk);

  // The parts of plan(). The device cap is the engine's, or nothing if the engine has no cap.
  Plan plan_with(const SessionOptions& options, int chunk) const;
  Plan model_plan(const SessionOptions& options, int chunk) const;
  std::optional<DeviceCap> device_cap(const Plan& plan) const;
  // The host memory that caps leave to a session's KV cache; none: no cap.
  std::optional<HostRoom> host_room(const Plan& plan, const SessionOptions& options) const;
  void require_host(const Plan& plan, const SessionOptions& options) const;
  KvRequest kv_request(const SessionOptions& options, int chunk,
                       const std::optional<DeviceCap>& cap) const;

  // True if the session's policies take the basis of values.
  bool wants_value_basis(const SessionOptions& options) const;
  // Computes the basis for the first session that wants it.
  void load_value_basis(const SessionOptions& options);
  // The basis for the pool of a session that wants it.
  ValueBasis basis_for(const SessionOptions& options) const;

  // Throws Error{unsupported} for rows that cannot be saved.
  SavedKind saved_kind() const;

  // The most tokens in a step of several sessions.
  std::int64_t most_at_once() const {
    return std::min<std::int64_t>(config.chunk, Decoder::kLogitRows);
  }
};

// A call's turn to compute. Other threads wait for theirs; a callback may not compute.
class Turn {
 public:
  explicit Turn(Engine::Impl& engine) : engine_(&engine), lock_(engine.mutex) { begin(); }
  // Waits until no other call is under way for any of the sessions.
  Turn(Engine::Impl& engine, std::span<Session::Impl* const> sessions);
  Turn(Engine::Impl& engine, Session::Impl& session);
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn();

  // Lets waiting threads go first, except calls for this turn's sessions.
  void pause();

 private:
  void begin();

  Engine::Impl* engine_;
  std::unique_lock<FairMutex> lock_;
  std::vector<Session::Impl*> sessions_;
};

// Memory granted to a plan besides its pool: the promise of host memory for its rows, and room for
// a prompt. Held until the last session that shares it ends.
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

  // See Decoder::prompt(). Allocated when the session begins, because later sessions may take
  // whatever memory they find free.
  const Buffer& prompt() const { return prompt_; }

 private:
  Buffer prompt_;
  Engine::Impl* engine_;
  std::uint64_t bytes_;
};

struct Session::Impl {
  std::shared_ptr<Engine::Impl> engine;
  KvSession kv;
  std::shared_ptr<SessionGrant> grant;  // shared with forks and siblings
  std::vector<TokenId> uncorrected{};   // decoded sparsely since the last correction
  std::vector<float> logits{};          // after the last token
  // Tokens that were appended, from the first on. Up to kv.length() they are the session's; others
  // were forgotten since.
  std::vector<TokenId> history{};
  // Tokens that recompute() restores of a session that cannot go on; unset: kv.length().
  std::optional<std::int64_t> restorable{};
  bool in_call = false;  // true while a call is running

  Impl(std::shared_ptr<Engine::Impl> owner, KvSession session,
       std::shared_ptr<SessionGrant> granted);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  // Throws unless `tokens` may be appended. Changes nothing.
  void require(std::span<const TokenId> tokens) const;

  // Recomputes the tokens decoded since the last correction with dense attention, which replaces
  // their rows and their part of the key index. Source: TidalDecode, section 3.3.
  void correct();
  void correct_if_due();
  // Notes decoded tokens for the next correction.
  void note(std::span<const TokenId> tokens);
  // Forgets the newest `tokens` tokens, rejected drafts of the latest step.
  void reject(std::size_t tokens);
  // Takes the newest `cut` tokens, which are gone, off those that wait for a correction.
  void drop_uncorrected(std::int64_t cut);
  // See Session::draft_room().
  std::int64_t draft_room() const;
  // The drafts from the first on that can share a step with the token before them. Throws what
  // draft_room() throws.
  std::span<const TokenId> usable(std::span<const TokenId> drafts) const;
  // Call after tokens were appended.
  void remember(std::span<const TokenId> tokens);

  void save(const std::filesystem::path& directory, std::string_view note);
  // Appends the tokens and rows of a saved session to this empty one.
  void load(const SessionReader& saved);

  // Decodes known tokens, at most as many as one step takes, after a correction if one is due.
  void decode_known(std::span<const TokenId> tokens);
  // Tokens that the next decode step may take.
  std::int64_t decode_room() const;

  std::span<const float> prefill(std::span<const TokenId> tokens, const Progress& progress,
                                 const Stop& stops);
  // A prompt under a policy whose prefill is sparse.
  std::span<const float> sparse_prefill(std::span<const TokenId> tokens, const Progress& progress,
                                        const Stop& stops);
  // After a call that failed: notes the tokens from before it, if the session cannot go on.
  void note_failure(std::int64_t length) {
    if (kv.in_step() && !restorable) restorable = length;
  }
  // See Session::recompute().
  std::span<const float> recompute(const Progress& progress, const Stop& stops);
  // Runs `tokens` in steps of the planned chunk and calls each(first, count) after every step;
  // other calls may compute between steps. Returns false if `progress` or `stops` stopped it. A
  // failed run restores the tokens from before, unless the session cannot go on.
  bool run(Turn& turn, std::span<const TokenId> tokens, const Progress& progress, const Stop& stops,
           const std::function<void(std::int64_t, std::int64_t)>& each);
  bool run_pieces(Turn& turn, std::span<const TokenId> tokens, const Progress& progress,
                  const Stop& stops, const std::function<void(std::int64_t, std::int64_t)>& each);
  // Copies the logits after a token of the last step into `logits`, so that they outlive the step.
  std::span<const float> keep(std::span<const float> row);
};

}  // namespace sluice
