// From a checkpoint directory to text: the engine holds the model, a session its conversation.
//
// Everything operating throws Error; nothing is printed. One engine serves any number of sessions.
// Any thread may call any of it: calls that compute take turns, in the order in which they came; a
// prompt gives others theirs between its pieces of `chunk` tokens. A call from inside another's
// callback throws Error{usage}. On a GPU a call leaves the engine's device the thread's current
// one. One session is one conversation: two threads that use the same one must agree on the order
// themselves. Sessions keep alive what they need: the engine may be moved, or end, before them, and
// a session in a callback of its own call, which then goes on to its end and returns no logits.
// What was moved from can only be assigned to or destroyed; the rest throws Error{usage}.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/errors.h"
#include "sluice/kv_cache.h"
#include "sluice/ledger.h"
#include "sluice/policy.h"
#include "sluice/sampler.h"
#include "sluice/scorer.h"
#include "sluice/selection.h"
#include "sluice/tokenizer.h"
#include "sluice/trace.h"
#include "sluice/types.h"

namespace sluice {

struct EngineConfig {
  std::filesystem::path model;  // Hugging Face checkpoint directory
  // "cpu"; "cuda" or "cuda:N", an NVIDIA GPU; or "reference", the slow fp32 backend for checking.
  std::string device = "cpu";
  int threads = 0;  // 0: Topology::threads; on a GPU, see host_attention, one less
  // Most tokens per prefill step, with prefill=pages at least 128. 0: 512 on a CPU, up to 2048 on a
  // GPU, where activations leave three quarters of what the weights leave, and there up to 4096,
  // with prefill=pages 32768, if the first session's rows do not all fit the device: longer steps
  // fetch them less often. They leave three quarters of its rows on the device, half if its
  // policies select at most 1024 per KV head.
  int chunk = 0;
  DType kv_dtype = DType::bf16;  // of the rows
  // Of matrix products. Unset, on a CPU: bf16 for a bf16 checkpoint where the processor is fast at
  // it, else f32, which is exact; on a GPU: the checkpoint's.
  std::optional<DType> compute;
  // Caps in bytes on all sessions together. The device cap is the size of the device tier; on a
  // GPU it covers weights and activations, too. Without it the CPU attends rows in host memory,
  // and a GPU's free memory is the cap. The host cap covers all that is not on the device;
  // with or without it no plan takes more than the limits of the process leave (sluice/topology.h).
  std::optional<std::uint64_t> device_memory;
  std::optional<std::uint64_t> host_memory;
  // Of a session's part of device_memory at most so many bytes for its row cache; 0: there is none.
  // Unset: as many as pay. It changes what is moved, and answers by no more than rounding.
  std::optional<std::uint64_t> row_cache;
  // On a GPU, in layers of decode steps that attend to everything: the share of the rows in host
  // memory alone that the CPU attends to, with `threads`, while the others cross. 0: none, 1: all.
  // Unset: what is fastest, as measured while running, and none where it does not pay; answers may
  // then differ by rounding from run to run.
  std::optional<double> host_attention;
  Scorers scorers;  // that policies may name: Sluice's own, and what was added; see sluice/scorer.h
  // Gets an event for every operation. Each is waited for, so that its time is known: on a GPU
  // steps take longer than without. Answers stay the same.
  std::shared_ptr<Trace> trace;
};

// What config.json and the tensors' headers say.
struct ModelInfo {
  std::string architecture;
  std::int64_t parameters = 0;
  std::uint64_t weight_bytes = 0;    // as stored
  DType weight_dtype = DType::bf16;  // of the matrices; f32 if they differ
  KvShape kv;
  int hidden = 0;
  int intermediate = 0;
  int vocabulary = 0;
  std::int64_t trained_context = 0;
  // Some layers of the model attend to so many of the newest tokens alone (Mistral 7B v0.1: 4096),
  // which Sluice does not: no context may be longer. None: all attend to everything.
  std::optional<std::int64_t> window;
  bool tied_embeddings = false;
  std::optional<TokenId> bos;
  std::vector<TokenId> eos;
};

// Bytes that a session will take, before anything is allocated.
struct Plan {
  KvPlan kv;
  std::uint64_t weight_bytes = 0;        // as computed with
  std::uint64_t activation_bytes = 0;    // buffers of one step
  std::uint64_t prompt_bytes = 0;        // of sparse prefills: a whole prompt between two layers
  std::uint64_t loading_bytes = 0;       // of host memory, held only while weights are being loaded
  std::uint64_t program_bytes = 0;       // the process itself: code, libraries, tokenizer
  std::uint64_t thread_bytes = 0;        // stacks and scratch of the threads that compute
  std::uint64_t backend_bytes = 0;       // device memory that the backend itself needs
  std::uint64_t staging_bytes = 0;       // host memory through which a GPU's input and output pass
  std::uint64_t loading_peak_bytes = 0;  // of host memory, while weights are being loaded
  bool on_device = false;                // weights and activations are on the device, a GPU
  // All rows lie where attention reads them, and reading every one takes less time than selecting
  // by an INT4 index, as measured for this kind of device.
  bool dense_is_faster = false;
  // What the engine's caps leave once this session and those that exist are there; none: no cap.
  std::optional<std::uint64_t> device_left;
  std::optional<std::uint64_t> host_left;

  std::uint64_t model_bytes() const { return weight_bytes + activation_bytes; }
  // What the session holds by itself, of the device and of the host.
  std::uint64_t session_device_bytes() const {
    return kv.device_bytes + (on_device ? prompt_bytes : 0);
  }
  std::uint64_t session_host_bytes() const {
    return kv.host_bytes + (on_device ? 0 : prompt_bytes);
  }
  std::uint64_t host_bytes() const {
    return session_host_bytes() + staging_bytes + (on_device ? 0 : model_bytes());
  }
  std::uint64_t device_bytes() const {
    return session_device_bytes() + (on_device ? model_bytes() + backend_bytes : 0);
  }
  // Peak resident memory of the process; without a GPU the device tier is part of it.
  std::uint64_t process_bytes() const;
  std::string to_table() const;
  std::string to_json() const;
};

// What a session is to be able to do.
struct SessionOptions {
  std::int64_t context = 0;      // tokens
  std::vector<Policy> policies;  // that Session::use() may be called with; the first is in force.
                                 // None: dense
  // Most tokens per step of Session::decode_known(), unless all policies are dense: then their rows
  // are fetched once for as many tokens as a step of a prompt has.
  int decode_batch = 1;
  // LayerSelection::positions is filled. For those who look at selections: it takes memory for the
  // positions of all layers, on the device and off it, and brings them over in every step.
  bool reports_positions = false;
  // Sessions that share this one's memory, at a time: itself, its forks and its siblings. They can
  // take a step together.
  int sequences = 1;
  // Tokens of all of them, what forks share counted once; 0: `sequences` times `context`.
  std::int64_t tokens = 0;
  // Caps in bytes on this session and those that share its memory, beside the engine's. Weights and
  // activations are not theirs; the prompt of a sparse prefill is.
  std::optional<std::uint64_t> device_memory = std::nullopt;
  std::optional<std::uint64_t> host_memory = std::nullopt;
};

// Stores the policy that Engine::policy() gives for preset `name` of the checkpoint in `model`, in
// sluice.json there. Throws Error{io} if it cannot be written, Error{corrupt} if what is there is
// no calibration, Error{usage} for a preset that there is not or a policy that makes no sense.
void store_calibration(const std::filesystem::path& model, std::string_view name,
                       const Policy& policy);

class Session;

// A session's part of a step of several.
struct StepToken {
  Session* session = nullptr;
  TokenId token = 0;  // to append
  // Draws the next token from the logits after it, where they are; null: the logits are wanted.
  const Sampler* sampler = nullptr;
  std::span<const TokenId> history = {};  // for the sampler's repetition penalty
};
// What became of it.
struct StepResult {
  std::optional<Error> error;     // the session cannot go on; the others can
  TokenId next = -1;              // with a sampler
  std::span<const float> logits;  // without; [vocabulary], valid until the session's next call
};

class Engine {
 public:
  // Reads the config, the tokenizer and the tensors' headers; no weights yet.
  static Engine open(const EngineConfig& config);
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  const ModelInfo& info() const;
  // Throws Error{tokenizer} if the checkpoint has none; tokens can be used without it.
  const Tokenizer& tokenizer() const;
  // The prompt's ids with the BOS token in front if the model expects one.
  std::vector<TokenId> encode_prompt(std::string_view text) const;

  // parse_policy with the engine's scorers, but a preset that `sluice calibrate` has adapted to
  // this checkpoint is that.
  Policy policy(std::string_view text) const;

  // Throws Error{memory} if a cap or a limit of the process does not hold the plan, naming what
  // would have to change, and Error{unsupported} for a context longer than the model's window.
  Plan plan(const SessionOptions& options) const;
  Plan plan(std::int64_t context) const { return plan(SessionOptions{context, {}, 1}); }
  // Loads the weights if that has not happened yet; `progress` gets the share done, 0 to 1.
  void load_weights(const std::function<void(double)>& progress = {});
  // A session for up to `context` tokens. Plans first, loads the weights if necessary.
  Session new_session(const SessionOptions& options);
  Session new_session(std::int64_t context);

  // Appends a token to each of several sessions, which share their memory (SessionOptions), and the
  // policy in force: one pass over the weights serves all. Every session gets what it would get by
  // itself, but for rounding. Throws Error{usage}, {prompt}, {memory} or {internal} before anything
  // is computed if the batch cannot be served; what fails for one session alone is in its result.
  std::vector<StepResult> step(std::span<const StepToken> tokens);

  // Memory of weights, activations and all sessions, as the allocators counted it.
  MemoryUse memory() const;

  struct Impl;  // opaque

 private:
  friend class Session;
  explicit Engine(std::shared_ptr<Impl> impl);
  Impl& impl() const;

  std::shared_ptr<Impl> impl_;
};

// Called between prefill steps with the tokens done and to do; returning false stops there, with
// the tokens done so far in the cache; of a prompt that goes layer by layer (`prefill=zipvl`) there
// are none. What it throws leaves the tokens that there were before the call.
using Progress = std::function<bool(std::int64_t done, std::int64_t total)>;

// The KV cache and position of one conversation. A session that threw inside a step refuses further
// use; other sessions are not affected.
class Session {
 public:
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();

  // A session with the same tokens and policy, which shares this one's memory until either writes:
  // it costs what it adds. Its ledger begins anew. Throws Error{memory} if there are as many
  // sessions as SessionOptions::sequences.
  Session fork();
  // A new, empty session in the memory of this one. Throws what fork() throws.
  Session sibling();

  // Appends tokens. Returns the logits [vocabulary] after the last one, valid until this session's
  // next call; empty if `progress` stopped it. Throws Error{prompt} if `tokens` is empty or does
  // not fit the planned context, and under `prefill=zipvl` Error{unsupported} if the rows cannot
  // follow each other: of forks, and where sessions that share memory leave no run of rows so long
  // (plan one that shares none), before anything is computed.
  std::span<const float> prefill(std::span<const TokenId> tokens, const Progress& progress = {});
  // Appends one generated token. With a policy that corrects, every T-th call first recomputes the
  // last T tokens densely.
  std::span<const float> decode(TokenId token);
  // The same, and draws the next token where the logits are, which spares bringing them over:
  // sampler.next(decode(token), history, length()), but for rounding.
  TokenId decode(TokenId token, const Sampler& sampler, std::span<const TokenId> history);
  // Appends tokens that are known in advance as if each were decoded: token i attends to what the
  // policy chooses for it among the tokens before. `each(i, logits)`, if there is one, gets the
  // logits [vocabulary] after every token. Several tokens share a step, which changes rounding and
  // nothing else; if `each` throws, the session has all tokens of the step.
  void decode_known(std::span<const TokenId> tokens,
                    const std::function<void(std::size_t, std::span<const float>)>& each);

  // The policy from the next token on; one of those that the session was planned for.
  void use(const Policy& policy);
  const Policy& policy() const;
  // Forgets all tokens from `length` on.
  void truncate(std::int64_t length);
  // Appends tokens and returns log p(tokens[i] | everything before) for i = 1 .. size-1, in nats;
  // the mean of the negatives is the NLL. Attends to every token, so that it throws Error{usage}
  // after a prefill that evicted some.
  std::vector<float> score(std::span<const TokenId> tokens, const Progress& progress = {});

  std::int64_t length() const;
  const KvPlan& plan() const;
  const Ledger& ledger() const;
  // Of the last step; empty if it was dense.
  const StepSelection& selection() const;
  // Of the pairs of a query and a page before it, those that prompts under `prefill=pages` looked
  // at; 1 without such prompts, and in dense layers, which do not count. A fork counts its own.
  double prefill_share() const;

  struct Impl;  // opaque

 private:
  friend class Engine;
  friend class GeneratingSession;
  friend struct SessionStep;
  explicit Session(std::shared_ptr<Impl> impl);
  Impl& impl() const;
  std::shared_ptr<Impl> share() const;

  std::shared_ptr<Impl> impl_;  // a call's own as well, until it is over
};

}  // namespace sluice
