// From a checkpoint to text: the engine holds the model, a session its conversation.
//
// Operating errors throw Error; nothing is printed. One engine serves any number of sessions. Every
// function may be called from any thread: calls that compute take turns in the order in which they
// came, and a prompt lets others run between its chunks. A call from inside another call's callback
// throws Error{usage}. On a GPU a call leaves the engine's device as the thread's current device.
// One session is one conversation: two threads that use the same session must agree on the order
// themselves. Sessions keep alive the state that they need: the engine may be moved or destroyed
// before them, and a session may be moved or destroyed in a callback of its own call, which then
// runs to its end and returns no logits. A moved-from object can only be assigned to or destroyed;
// any other use throws Error{usage}.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/errors.h"
#include "sluice/kv_cache.h"
#include "sluice/ledger.h"
#include "sluice/policy.h"
#include "sluice/row_observer.h"
#include "sluice/sampler.h"
#include "sluice/scorer.h"
#include "sluice/selection.h"
#include "sluice/tokenizer.h"
#include "sluice/trace.h"
#include "sluice/traffic_counter.h"
#include "sluice/types.h"
#include "sluice/weight_format.h"

namespace sluice {

struct EngineConfig {
  // Hugging Face checkpoint directory, or a GGUF file (of a split one, the first).
  std::filesystem::path model;
  // "cpu"; "cuda" or "cuda:N", an NVIDIA GPU; or "reference", the slow fp32 backend for checking.
  std::string device = "cpu";
  int threads = 0;  // 0: Topology::threads; one less on a GPU, see host_attention
  // Most tokens per prefill step; at least 128 with prefill=pages. 0: 512 on a CPU. On a GPU up to
  // 2048, such that activations leave free three quarters of the memory that the weights leave. If
  // the first session's rows do not all fit the device, up to 4096 (32768 with prefill=pages),
  // because longer steps fetch them less often; such steps leave three quarters of its rows on the
  // device, or half if its policies select at most 1024 per KV head.
  int chunk = 0;
  // Format of the rows, a DType or a RowCode. int8: 8 bits for a channel of a key or value, half
  // the bytes of bf16 in every tier and on the bus. k8v4: 8 bits for a key's channel, 4 for a
  // value's, three eighths of bf16 at head_dim 128 and 256; rows are whole cache lines, so at 64
  // and 96 no less than int8. sluice/row_code.h has the errors. Both need a head_dim that is a
  // multiple of 16, k8v4 one from 32 on, else Engine::open() throws Error{unsupported}.
  RowFormat kv_dtype = DType::bf16;
  // The dtype of matrix products. Unset: on a CPU bf16 for a bf16 checkpoint if the processor is
  // fast at it, else f32, which is exact; on a GPU the checkpoint's dtype.
  std::optional<DType> compute;
  // How matrices are held; norms and biases are f32 in any case. Unset: as the files have them, in
  // the files' codes where the device multiplies these, in int8 where it does not, in elements
  // where the files have no codes. Elements: decoded. int8 (9 bits per weight) and int4 (4.5, but
  // Q, K and V in int8): coded anew while loading; a matrix with inputs that groups of 32 do not
  // divide throws Error{unsupported} in Engine::open(). uint4, which only files have, throws
  // Error{usage}.
  std::optional<WeightFormat> weights;
  // Caps in bytes on all sessions together. The device cap is the size of the device tier; on a
  // GPU it also covers weights and activations. Without it the CPU attends rows in host memory,
  // and a GPU's free memory less 512 MiB for the driver is the cap. Engine::plan() does not compare
  // a cap that is set with a GPU's free memory. The host cap covers everything that is not on the
  // device; with or without it no plan takes more than the process limits leave
  // (sluice/topology.h).
  std::optional<std::uint64_t> device_memory;
  std::optional<std::uint64_t> host_memory;
  // Where rows go that host_memory does not hold, or without host_memory half of the memory that
  // the process has left; see DiskConfig. Every pool of sessions has its own files.
  std::optional<DiskConfig> disk;
  // Most bytes of a session's part of device_memory that its row cache takes; 0: no row cache.
  // Unset: as many as pay. It changes which rows are moved, and answers only by rounding.
  std::optional<std::uint64_t> row_cache;
  // On a GPU, for layers of decode steps that attend to everything: the share, 0 (none) to 1 (all),
  // of the rows only in host memory that the CPU attends to with `threads`, while the GPU fetches
  // the others. Unset: the fastest share as measured while running, none if it does not pay;
  // answers may then differ by rounding from run to run.
  std::optional<double> host_attention;
  Scorers scorers;  // scorers that policies may name: Sluice's own and added ones; sluice/scorer.h
  // Gets an event for every operation. On a GPU steps take longer, because each operation is waited
  // for to measure its time. Answers stay the same.
  std::shared_ptr<Trace> trace;
  // Counts rows and bytes of decode steps while it is started.
  std::shared_ptr<TrafficCounter> counter;
  // Gets the queries, keys and values of every layer of every step. Steps take longer, because each
  // layer is waited for. Answers stay the same.
  std::shared_ptr<RowObserver> observer;
};

// The model as config.json and the tensors' headers describe it.
struct ModelInfo {
  std::string architecture;
  std::int64_t parameters = 0;
  std::uint64_t weight_bytes = 0;    // as stored
  DType weight_dtype = DType::bf16;  // dtype of the matrices; f32 if they differ
  std::string stored_types;          // as files call them, most bytes first: "Q4_K, Q6_K, F32"
  bool has_codes = false;            // of weights, which EngineConfig::weights unset keeps
  KvShape kv;
  int hidden = 0;
  int intermediate = 0;
  int vocabulary = 0;
  std::int64_t trained_context = 0;
  // The sliding window of some of the model's layers in tokens (Mistral 7B v0.1: 4096): they attend
  // to the newest `window` tokens, under every policy. None: all attend to everything.
  std::optional<std::int64_t> window;
  // No context may be longer than the window: the device attends to all tokens, or the checkpoint
  // does not say which layers have the window.
  bool window_limits = false;
  bool tied_embeddings = false;
  std::optional<TokenId> bos;
  std::vector<TokenId> eos;
};

// Bytes that a session will take, computed before anything is allocated.
struct Plan {
  KvPlan kv;
  std::uint64_t weight_bytes = 0;        // in the form that products use
  std::uint64_t value_basis_bytes = 0;   // of these, for policies with components=half
  std::uint64_t activation_bytes = 0;    // buffers of one step
  std::uint64_t prompt_bytes = 0;        // sparse prefill: a whole prompt between two layers
  std::uint64_t loading_bytes = 0;       // host memory held only while weights are being loaded
  std::uint64_t program_bytes = 0;       // the process itself: code, libraries, tokenizer
  std::uint64_t thread_bytes = 0;        // stacks and scratch of the compute threads
  std::uint64_t backend_bytes = 0;       // device memory that the backend itself needs
  std::uint64_t staging_bytes = 0;       // host memory through which a GPU's input and output pass
  std::uint64_t loading_peak_bytes = 0;  // peak host memory while weights are being loaded
  bool on_device = false;                // weights and activations are on the device, a GPU
  // Dense attention is faster: all rows lie where attention reads them, and reading every one takes
  // less time than selecting by an INT4 index, as measured for this kind of device.
  bool dense_is_faster = false;
  // Bytes that the engine's caps leave beside this session and the existing ones; none: no cap.
  std::optional<std::uint64_t> device_left;
  std::optional<std::uint64_t> host_left;

  std::uint64_t model_bytes() const { return weight_bytes + activation_bytes; }
  // Device and host memory that belongs to the session alone.
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
  // Peak resident memory of the process, including the device tier if there is no GPU.
  std::uint64_t process_bytes() const;
  std::string to_table() const;
  std::string to_json() const;
};

// The capabilities that a session is planned for.
struct SessionOptions {
  std::int64_t context = 0;      // most tokens of a session, prompt and answer; required
  std::vector<Policy> policies;  // accepted by Session::use(); the first is in force.
                                 // None: dense
  // Most tokens of one session per step of decode_known() and of decode() with drafts, 1 to 64 and
  // at most the chunk. Unused if all policies are dense, because a step then has as many tokens as
  // a prefill step.
  int decode_batch = 1;
  // Fills LayerSelection::positions, to inspect selections. It takes device and host memory for the
  // positions of all layers, and copies them to the host in every step.
  bool reports_positions = false;
  // Most sessions that share this one's memory at a time, 1 to 4096: itself, its forks and its
  // siblings. Up to plan().decode_batch of them, at most 64, can take a step together.
  int sequences = 1;
  // Tokens of all of them, counting tokens that forks share once; 0: `sequences` times `context`.
  std::int64_t tokens = 0;
  // Most tokens of all of them whose key index and value tiles are on the device at a time, in
  // tiles of 256 tokens of one session or of forks, at least `context`; 0: all. The tiles that no
  // step has needed for longest make room for those of a step: they go to host memory, which the
  // plan counts, and come back before their session's next step, to the bit. Sessions that together
  // need more cannot take a step together: Error{memory}. Not with a prefill that evicts. Without
  // effect if all fits, and where rows are attended in host memory, because the index is there,
  // too.
  std::int64_t indexed_tokens = 0;
  // Session::load() may be called for them: plans its buffer.
  bool loads = false;
  // Caps in bytes on this session and those that share its memory, besides the engine's caps. They
  // exclude weights and activations, and include the prompt of a sparse prefill.
  std::optional<std::uint64_t> device_memory = std::nullopt;
  std::optional<std::uint64_t> host_memory = std::nullopt;
};

// Stores the policy that Engine::policy() gives for preset `name` of the checkpoint in `model`, in
// sluice.json there, or for MODEL.gguf in MODEL.sluice.json beside it. Throws Error{io} if it
// cannot be written, Error{corrupt} if the existing file is not a calibration, Error{usage} for an
// unknown preset or a policy that makes no sense.
void store_calibration(const std::filesystem::path& model, std::string_view name,
                       const Policy& policy);

class Session;

// The contents of a saved session's directory besides its rows; see Session::save().
struct SavedSession {
  std::vector<TokenId> tokens;
  std::string note;
};

// One session's part of a step of several sessions.
struct StepToken {
  Session* session = nullptr;
  TokenId token = 0;  // to append
  // Draws the next token in the backend, from the logits after `token`; null: returns the logits.
  const Sampler* sampler = nullptr;
  std::span<const TokenId> history = {};  // for the sampler's repetition penalty
};
// The result of a StepToken.
struct StepResult {
  std::optional<Error> error;     // the session cannot go on; the others can
  TokenId next = -1;              // with a sampler: the token drawn
  std::span<const float> logits;  // else [vocabulary], valid until the session's next call
};

class Engine {
 public:
  // Reads the config, the tokenizer and the tensors' headers, but no weights.
  static Engine open(const EngineConfig& config);
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  const ModelInfo& info() const;
  // Throws Error{tokenizer} if the checkpoint has none; token ids work without it.
  const Tokenizer& tokenizer() const;
  // The prompt's ids with the BOS token in front if the model expects one.
  std::vector<TokenId> encode_prompt(std::string_view text) const;

  // parse_policy with the engine's scorers, except that a preset that `sluice calibrate` has
  // adapted to this checkpoint gives the adapted policy.
  Policy policy(std::string_view text) const;

  // Throws Error{memory} if a cap or a process limit is too small for the plan, naming the setting
  // to change, and Error{unsupported} for a context that a window limits, see ModelInfo.
  Plan plan(const SessionOptions& options) const;
  Plan plan(std::int64_t context) const { return plan(SessionOptions{context, {}, 1}); }
  // Loads the weights unless they are loaded; `progress` gets the share done, 0 to 1.
  void load_weights(const std::function<void(double)>& progress = {});
  // A session for up to `context` tokens. Plans first, loads the weights if necessary.
  Session new_session(const SessionOptions& options);
  Session new_session(std::int64_t context);

  // A session with the tokens and rows that Session::save() put into `directory`. Nothing is
  // computed: rows are read, checked and copied, and the key index is built from them, under any of
  // `options`, which may differ in all but EngineConfig::kv_dtype from those it was saved under.
  // Logits are not saved, so give it the next tokens; or, for the logits after its last token,
  // truncate(length() - 1) and decode that token. Several processes and sessions may load from one
  // directory at a time.
  // Throws Error{not_found} if there is no saved session; Error{usage} for one of another model or
  // `kv_dtype`; Error{unsupported} for another version of the format; Error{corrupt} for damaged
  // files or links in their place; Error{io} while the directory is saved to; Error{prompt} if
  // `options.context` has no room for its tokens, and what new_session() throws.
  Session load_session(const std::filesystem::path& directory, const SessionOptions& options);
  // The tokens and the note of a saved session; reads no rows. Throws what load_session() throws.
  SavedSession saved_session(const std::filesystem::path& directory) const;
  // Throws what Session::save() would throw now for a session of `tokens` tokens, before there is
  // one: the directory is not usable, or the disk has too little room. Creates the directory.
  void require_savable(const std::filesystem::path& directory, std::int64_t tokens) const;

  // Appends a token to each of several sessions, which must share their memory (SessionOptions) and
  // the policy in force: one pass over the weights serves all. Every session gets the result that
  // it would get by itself, except for rounding. Throws Error{usage}, {prompt}, {memory} or
  // {internal} before anything is computed if the batch cannot be served, {memory} also if their
  // index does not fit the device together (index_fits()); an error of one session alone is in its
  // StepResult.
  std::vector<StepResult> step(std::span<const StepToken> tokens);

  // True if the key index of these sessions, which share their memory, has room on the device at
  // the same time and still has when they have `more` tokens together. Always without
  // SessionOptions::indexed_tokens.
  bool index_fits(std::span<const Session* const> sessions, std::int64_t more) const;

  // Memory of weights, activations and all sessions, as counted by the allocators.
  MemoryUse memory() const;

  struct Impl;  // opaque

 private:
  friend class Session;
  explicit Engine(std::shared_ptr<Impl> impl);
  Impl& impl() const;
  // new_session(); besides the plan it must leave `staging` bytes of host memory.

  std::shared_ptr<Impl> impl_;
};

// Called between prefill steps with the tokens done and the total; returning false stops there, and
// the tokens done so far stay in the cache (none under `prefill=zipvl`, which goes layer by layer).
// If it throws, the session keeps the tokens that it had before the call.
using Progress = std::function<bool(std::int64_t done, std::int64_t total)>;

// Asked between the layers of a prompt's chunk, on the thread that computes, so it should only
// look: at a flag that another thread sets, or at the clock.
using Stop = std::function<bool()>;

// The memory that sessions share, as one of them finds it, in tokens of whole blocks (128 each).
struct SessionRoom {
  std::int64_t free = 0;  // tokens that any of the sessions may take
  std::int64_t own = 0;   // tokens that would be free, too, if this session ended
};

// The KV cache and position of one conversation. A session that threw inside a step refuses further
// use; other sessions are unaffected.
class Session {
 public:
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();

  // A session with the same tokens and policy, which shares this one's memory until either writes,
  // so it costs only what it adds. Its ledger starts empty. Throws Error{memory} if
  // SessionOptions::sequences sessions exist.
  Session fork();
  // An empty session in this one's memory. Throws what fork() throws.
  Session sibling();

  // Appends tokens. Returns the logits [vocabulary] after the last one, valid until this session's
  // next call; empty if `progress` or `stops` stopped it. Once `stops` returns true, the chunk
  // being computed is given up after its layer, and the tokens of earlier chunks stay (none under
  // `prefill=zipvl`). In a session with rows on disk, a chunk that begins within a page of 128
  // tokens is computed to its end instead. Throws Error{prompt} if `tokens` is empty or does
  // not fit the planned context. Under `prefill=zipvl` throws Error{unsupported}, before anything
  // is computed, if the rows cannot be contiguous: for forks, and if sessions that share memory
  // leave no run of rows that long (plan a session that shares none).
  std::span<const float> prefill(std::span<const TokenId> tokens, const Progress& progress = {},
                                 const Stop& stops = {});
  // The same, and each(i, logits) gets the logits [vocabulary] after every token, valid during the
  // call. Attends to every token, whatever the policy's prefill says. If `each` throws, the session
  // keeps the tokens that it had before the call.
  std::span<const float> prefill_each(
      std::span<const TokenId> tokens,
      const std::function<void(std::size_t, std::span<const float>)>& each,
      const Progress& progress = {}, const Stop& stops = {});
  // Appends one generated token. With a policy that corrects, every T-th call first recomputes the
  // last T tokens densely.
  std::span<const float> decode(TokenId token);
  // The same, and draws the next token in the backend, because that saves copying the logits:
  // equals sampler.next(decode(token), history, length()), except for rounding.
  TokenId decode(TokenId token, const Sampler& sampler, std::span<const TokenId> history);
  // The same with drafts, guesses at the tokens that follow `token` (sluice/drafter.h): one step
  // computes `token` and up to as many drafts as decode_batch and the current page have room for,
  // each as if it were decoded. Returns the tokens drawn: every draft that equals the draw at its
  // place, up to the first that does not, and one token more, which is not appended yet. So
  // length() grows by the number returned. Drafts that were rejected are forgotten and leave no
  // trace but their traffic. goes_on(id) is called for every token drawn, in order, and may not
  // compute; once it returns false, no further draft is accepted.
  // Throws what decode() throws, and Error{usage} for drafts of a session that selects and was
  // planned for a decode_batch of 1.
  std::vector<TokenId> decode(TokenId token, std::span<const TokenId> drafts,
                              const Sampler& sampler, std::span<const TokenId> history,
                              const std::function<bool(TokenId)>& goes_on);
  // Most drafts that the next step verifies: none at the end of a page, for example. Throws
  // Error{usage} for a session that selects and was planned for a decode_batch of 1.
  std::int64_t draft_room() const;
  // Appends tokens that are known in advance as if each were decoded: token i attends to the
  // earlier tokens that the policy chooses for it. `each(i, logits)`, if set, gets the logits
  // [vocabulary] after every token. Several tokens share a step, which changes only rounding; if
  // `each` throws, the session keeps all tokens of the step.
  void decode_known(std::span<const TokenId> tokens,
                    const std::function<void(std::size_t, std::span<const float>)>& each);

  // Computes the rows of all tokens again, into memory that no fork shares, so that a session goes
  // on whose rows a disk has lost (Error{io}, Error{corrupt}). Its tokens are those from before the
  // call that failed; policy and ledger stay. Returns what prefill() of its tokens returns, and may
  // be stopped as that. Throws what prefill() throws; the session then has no tokens, and if a disk
  // fails again, cannot go on.
  std::span<const float> recompute(const Progress& progress = {}, const Stop& stops = {});

  // Sets the policy from the next token on. Throws Error{usage} unless it is one of
  // SessionOptions::policies.
  void use(const Policy& policy);
  const Policy& policy() const;
  // Forgets tokens from `length` on, 0 to length() and not within a prompt that evicted; else
  // throws.
  void truncate(std::int64_t length);
  // Appends tokens and returns log p(tokens[i] | everything before) for i = 1 .. size-1, in nats;
  // the mean of the negatives is the NLL. After a prefill that evicted tokens it attends to those
  // that are left.
  std::vector<float> score(std::span<const TokenId> tokens, const Progress& progress = {});

  // Saves tokens, rows and `note`, text of the caller's own of up to 64 MiB, to a directory, which
  // is created if its parent exists; Engine::load_session() has them again. The directory may have
  // an earlier session of the same model, which stays intact until the new one is on the disk
  // whole; if the process is killed before, the next save removes what it left. Files are readable
  // for this user alone (mode 0600). Row bytes on disk: tokens times KvShape::token_bytes().
  // Throws Error{usage} for a session without tokens or with evicted ones, and if the directory has
  // other files or a session of another model; Error{io} if it is in use by another session or
  // process, cannot be written, or the disk is full; Error{corrupt} if its manifest is damaged.
  void save(const std::filesystem::path& directory, std::string_view note = {});
  // Gives a session without tokens, of SessionOptions::loads, those of a saved one: siblings load
  // several into one memory. Throws Error{usage} if it has tokens, Error{memory} if the memory has
  // no room for them, and what Engine::load_session() throws; it has failed then, and can only be
  // ended.
  void load(const std::filesystem::path& directory);

  std::int64_t length() const;
  // All tokens, [length()]; valid until this session's next call.
  std::span<const TokenId> tokens() const;
  SessionRoom room() const;
  const KvPlan& plan() const;
  // How rows on disk are read, a line per directory; empty if none are planned there.
  std::vector<std::string> disk_modes() const;
  const Ledger& ledger() const;
  // Selection of the last step; empty if it was dense.
  const StepSelection& selection() const;
  // The share of (query, earlier page) pairs that prompts under `prefill=pages` attended to; 1
  // without such prompts. Dense layers do not count. A fork counts its own.
  double prefill_share() const;

  struct Impl;  // opaque

 private:
  friend class Engine;
  friend class GeneratingSession;
  explicit Session(std::shared_ptr<Impl> impl);
  Impl& impl() const;
  std::shared_ptr<Impl> share() const;

  std::shared_ptr<Impl> impl_;  // a running call holds it, too
};

}  // namespace sluice
