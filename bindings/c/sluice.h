// The C interface of Sluice, in C11: engine, sessions, generate, batcher, tokenizer and KvCache. It
// follows the C++ headers (sluice/engine.h and others), which say more about each call.
//
// - Every function returns a sluice_code. After any other than SLUICE_OK, sluice_message() has one
//   line that says what is wrong and what to do. No C++ exception leaves a function.
// - A handle names an object. NULL, a freed handle and one of another kind are refused with
//   SLUICE_USAGE. Handles may be freed in any order: an object lives as long as others need it.
// - Structs begin with `size`, which must be sizeof the struct as the caller compiled it, so that
//   later versions can add fields. Zero in every other field means the default:
//   `sluice_session_options options = {.size = sizeof options, .context = 4096};`
// - A call that fills a caller's buffer sets `count` (or `bytes`, without the final NUL) to what
//   there is. If that does not fit it writes nothing else and returns SLUICE_TOO_SMALL, so a call
//   with capacity 0 asks for the size.
// - Values from a list, such as sluice_dtype, are int32_t: their size is the same everywhere.
// - Texts are UTF-8. Those that go in as `const char*` with `bytes` need no NUL.
// - Any thread may call anything, but a session, sequence, step or stream is for one thread at a
//   time: another one's call is refused with SLUICE_USAGE while a call runs.
//   sluice_stream_cancel and sluice_cancel_set may be called at any time.
// - Callbacks run on the calling thread, or the batcher's where that is said, and get the `user`
//   pointer. They must not throw or longjmp.
#ifndef SLUICE_H
#define SLUICE_H

// NOLINTBEGIN(readability-identifier-naming): names of C.
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SLUICE_API __attribute__((visibility("default")))
#else
#define SLUICE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t sluice_code;
enum {
  SLUICE_OK = 0,
  SLUICE_STOPPED = 1,      // a callback or a cancel ended the call; what was done so far stays
  SLUICE_USAGE = 2,        // an argument, a handle or the order of calls
  SLUICE_NOT_FOUND = 3,    // a file is missing or unreadable
  SLUICE_CORRUPT = 4,      // a file contradicts its format
  SLUICE_UNSUPPORTED = 5,  // a valid model, option or machine that Sluice does not handle
  SLUICE_TOKENIZER = 6,    // tokenizer.json is broken, or lacks something
  SLUICE_PROMPT = 7,       // the prompt is empty, not UTF-8, too long or has unknown tokens
  SLUICE_MEMORY = 8,       // a cap, pool or queue is too small, or memory ran out
  SLUICE_IO = 9,           // reading or writing failed
  SLUICE_INTERNAL = 10,    // a bug in Sluice, or a session used after it failed
  SLUICE_NUMERIC = 11,     // NaN or infinity
  SLUICE_TOO_SMALL = 12    // the caller's buffer; `count` or `bytes` says how much there is
};

typedef int32_t sluice_dtype;
enum { SLUICE_BF16 = 0, SLUICE_F16 = 1, SLUICE_F32 = 2 };

typedef int32_t sluice_finish;
enum {
  SLUICE_NOT_FINISHED = 0,
  SLUICE_END_OF_TEXT = 1,
  SLUICE_STOP_STRING = 2,
  SLUICE_MAX_TOKENS = 3,
  SLUICE_INTERRUPTED = 4,
  SLUICE_DEADLINE = 5
};

typedef struct sluice_engine sluice_engine;
typedef struct sluice_session sluice_session;
typedef struct sluice_cancel sluice_cancel;
typedef struct sluice_constraint sluice_constraint;
typedef struct sluice_batcher sluice_batcher;
typedef struct sluice_stream sluice_stream;
typedef struct sluice_kv_cache sluice_kv_cache;
typedef struct sluice_kv_sequence sluice_kv_sequence;
typedef struct sluice_kv_step sluice_kv_step;

// "0.1.0".
SLUICE_API const char* sluice_version(void);
// Why the thread's last call failed; valid until its next call. Empty after SLUICE_OK.
SLUICE_API const char* sluice_message(void);
// "memory"; "unknown" for other numbers.
SLUICE_API const char* sluice_code_name(int code);

// Ends calls early from another thread.
SLUICE_API sluice_code sluice_cancel_create(sluice_cancel** cancel);
SLUICE_API sluice_code sluice_cancel_set(sluice_cancel* cancel);
SLUICE_API sluice_code sluice_cancel_free(sluice_cancel* cancel);

// ---- Engine ----

// See sluice::EngineConfig. Pointers are to values that 0 would not tell from an unset one.
typedef struct sluice_engine_options {
  size_t size;
  const char* model;       // Hugging Face checkpoint directory; required
  const char* device;      // "cpu" (NULL), "cuda", "cuda:N" or "reference"
  const char* compute;     // "f32", "f16" or "bf16"; NULL: chosen by the device
  const char* weights;     // "elements", "int8" or "int4"; NULL: as they are stored
  const char* kv_dtype;    // of the rows: "bf16" (NULL), "f16", "f32", "int8" or "k8v4"
  int32_t threads;         // 0: one per core
  int32_t chunk;           // most tokens per prefill step; 0: chosen
  uint64_t device_memory;  // bytes; 0: no cap
  uint64_t host_memory;
  const uint64_t* row_cache;     // most bytes of the row cache; NULL: as many as pay
  const double* host_attention;  // 0 to 1; NULL: measured
  const char* const* disk;       // directories for rows that host memory does not hold; NULL: none
  size_t disk_count;
  uint64_t disk_bytes;  // most bytes in all; 0: as many as the rows take
} sluice_engine_options;

typedef struct sluice_model_info {
  size_t size;
  int64_t parameters;
  uint64_t weight_bytes;
  int64_t trained_context;
  int64_t window;  // 0: no layer has a sliding window
  int32_t layers;
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t hidden;
  int32_t vocabulary;  // logits per token
  int32_t bos;         // -1: none
} sluice_model_info;

typedef struct sluice_memory {
  size_t size;
  uint64_t device_bytes;
  uint64_t device_peak;
  uint64_t host_bytes;
  uint64_t host_peak;
} sluice_memory;

// See sluice::SessionOptions.
typedef struct sluice_session_options {
  size_t size;
  int64_t context;              // most tokens, prompt and answer; required
  const char* const* policies;  // texts; the first is in force. NULL: dense
  size_t policy_count;
  int32_t decode_batch;    // 0: 1
  int32_t sequences;       // forks and siblings, itself included; 0: 1
  int64_t tokens;          // of all of them; 0: sequences * context
  uint64_t device_memory;  // caps of this session; 0: the engine's alone
  uint64_t host_memory;
  int32_t loads;           // not 0: sluice_session_load() may be called, for it and its siblings
  int64_t indexed_tokens;  // most of all of them with their index on the device; 0: all
} sluice_session_options;

// Called with the share done, 0 to 1; anything but 0 stops. Weights once stopped are loaded anew.
typedef int (*sluice_share_callback)(void* user, double share);
// Called between steps of a prompt; anything but 0 stops there.
typedef int (*sluice_progress_callback)(void* user, int64_t done, int64_t total);

// Reads config, tokenizer and the tensors' headers, but no weights.
SLUICE_API sluice_code sluice_engine_open(const sluice_engine_options* options,
                                          sluice_engine** engine);
SLUICE_API sluice_code sluice_engine_free(sluice_engine* engine);
SLUICE_API sluice_code sluice_engine_load_weights(sluice_engine* engine,
                                                  sluice_share_callback on_share, void* user);
SLUICE_API sluice_code sluice_engine_info(sluice_engine* engine, sluice_model_info* info);
// Tokens with which the model ends a text.
SLUICE_API sluice_code sluice_engine_eos(sluice_engine* engine, int32_t* tokens, size_t capacity,
                                         size_t* count);
SLUICE_API sluice_code sluice_engine_memory(sluice_engine* engine, sluice_memory* memory);
// The memory plan of a session, as JSON.
SLUICE_API sluice_code sluice_engine_plan_json(sluice_engine* engine,
                                               const sluice_session_options* options, char* json,
                                               size_t capacity, size_t* bytes);
// Checks a policy and writes it in full: `policy` "values" gives that preset's settings, as
// `sluice calibrate` adapted them to the checkpoint.
SLUICE_API sluice_code sluice_engine_policy(sluice_engine* engine, const char* policy, char* text,
                                            size_t capacity, size_t* bytes);

// ---- Text ----

typedef int32_t sluice_encoding;
enum {
  SLUICE_ENCODE = 0,         // added tokens in the text, "<|end_of_text|>", become their ids
  SLUICE_ENCODE_PROMPT = 1,  // the same, with the BOS token in front if the model expects one
  SLUICE_ENCODE_PLAIN = 2    // special tokens in the text stay text: for text of users
};

SLUICE_API sluice_code sluice_encode(sluice_engine* engine, const char* text, size_t bytes,
                                     sluice_encoding encoding, int32_t* tokens, size_t capacity,
                                     size_t* count);
// Without special tokens unless `keep_special`.
SLUICE_API sluice_code sluice_decode(sluice_engine* engine, const int32_t* tokens, size_t count,
                                     int keep_special, char* text, size_t capacity, size_t* bytes);

typedef struct sluice_turn {
  const char* question;
  const char* answer;  // NULL in the last turn
} sluice_turn;

// The tokens of a conversation by the checkpoint's chat template. `system` may be NULL.
SLUICE_API sluice_code sluice_render_chat(sluice_engine* engine, const char* system,
                                          const sluice_turn* turns, size_t turn_count,
                                          int32_t* tokens, size_t capacity, size_t* count);
// Tokens with which the template ends an answer, besides sluice_engine_eos(): for end_tokens.
SLUICE_API sluice_code sluice_chat_end_tokens(sluice_engine* engine, int32_t* tokens,
                                              size_t capacity, size_t* count);

// ---- Sessions ----

// Plans, loads the weights unless they are loaded, and allocates.
SLUICE_API sluice_code sluice_session_open(sluice_engine* engine,
                                           const sluice_session_options* options,
                                           sluice_session** session);
// A session with the same tokens, which costs only what it adds.
SLUICE_API sluice_code sluice_session_fork(sluice_session* session, sluice_session** fork);
// An empty session in this one's memory.
SLUICE_API sluice_code sluice_session_sibling(sluice_session* session, sluice_session** sibling);
SLUICE_API sluice_code sluice_session_free(sluice_session* session);

// Appends a prompt. `logits`, if not NULL, gets the `vocabulary` logits after its last token;
// `capacity` counts floats. SLUICE_STOPPED: `on_progress` stopped it after a step, or `cancel`,
// which may be NULL, within one, which is then undone; `logits` is unchanged.
SLUICE_API sluice_code sluice_session_prefill(sluice_session* session, const int32_t* tokens,
                                              size_t count, sluice_progress_callback on_progress,
                                              void* user, sluice_cancel* cancel, float* logits,
                                              size_t capacity);
// Computes the rows of all tokens again, so that a session goes on whose rows a disk has lost
// (SLUICE_IO, SLUICE_CORRUPT); see sluice::Session::recompute. The other arguments are those of a
// prefill, whose `logits` it gives.
SLUICE_API sluice_code sluice_session_recompute(sluice_session* session,
                                                sluice_progress_callback on_progress, void* user,
                                                sluice_cancel* cancel, float* logits,
                                                size_t capacity);
// Appends a token.
SLUICE_API sluice_code sluice_session_decode(sluice_session* session, int32_t token, float* logits,
                                             size_t capacity);
// Appends tokens and writes log p(tokens[i] | all before) for i = 1 .. count-1, count-1 floats.
SLUICE_API sluice_code sluice_session_score(sluice_session* session, const int32_t* tokens,
                                            size_t count, float* logprobs, size_t capacity);
// Puts another one of the session's policies in force.
SLUICE_API sluice_code sluice_session_use(sluice_session* session, const char* policy);
SLUICE_API sluice_code sluice_session_policy(sluice_session* session, char* text, size_t capacity,
                                             size_t* bytes);
// Forgets all tokens from `length` on.
SLUICE_API sluice_code sluice_session_truncate(sluice_session* session, int64_t length);
SLUICE_API sluice_code sluice_session_length(sluice_session* session, int64_t* length);
// All tokens, in order.
SLUICE_API sluice_code sluice_session_tokens(sluice_session* session, int32_t* tokens,
                                             size_t capacity, size_t* count);
// Saves tokens, rows and a note of the caller's own, which may be NULL, to a directory, whole or
// not at all; see sluice::Session::save().
SLUICE_API sluice_code sluice_session_save(sluice_session* session, const char* directory,
                                           const char* note, size_t note_bytes);
// Gives an empty session, opened with `loads` or the sibling of one, what was saved; nothing is
// computed again. The logits after the last token are those of decoding it once more.
SLUICE_API sluice_code sluice_session_load(sluice_session* session, const char* directory);
// The number of tokens and the note of a saved session of this model; `tokens` may be NULL.
SLUICE_API sluice_code sluice_saved_session(sluice_engine* engine, const char* directory,
                                            int64_t* tokens, char* note, size_t capacity,
                                            size_t* bytes);
// The rows and bytes that moved or were read, as JSON.
SLUICE_API sluice_code sluice_session_ledger_json(sluice_session* session, char* json,
                                                  size_t capacity, size_t* bytes);

// Appends a token to each of several sessions that share memory, in one pass over the weights.
// `logits` [count, vocabulary]; `codes` [count] gets the error of each session alone. SLUICE_OK
// if the step was computed.
SLUICE_API sluice_code sluice_engine_step(sluice_engine* engine, sluice_session* const* sessions,
                                          const int32_t* tokens, size_t count, float* logits,
                                          size_t capacity, sluice_code* codes);

// ---- Constraints ----

typedef int32_t sluice_constraint_kind;
enum {
  SLUICE_JSON_OBJECT = 0,  // any; without a text
  SLUICE_JSON_SCHEMA = 1,
  SLUICE_REGEX = 2,
  SLUICE_GRAMMAR = 3  // as llama.cpp reads it
};

// Compiles what the text of an answer has to be, see sluice::Constraints. Any number of answers of
// this engine may use it at a time.
SLUICE_API sluice_code sluice_constraint_create(sluice_engine* engine, sluice_constraint_kind kind,
                                                const char* text, size_t bytes,
                                                sluice_constraint** constraint);
SLUICE_API sluice_code sluice_constraint_free(sluice_constraint* constraint);

// ---- Generate ----

// See sluice::SamplingParams. Zero in all of them is greedy, without penalties.
typedef struct sluice_sampling {
  size_t size;
  double temperature;
  double top_p;  // 0: 1
  double min_p;
  double repetition_penalty;  // 0: 1
  int32_t top_k;              // 0: all
  int32_t max_tokens;         // sluice_generate takes 1 or more
  uint64_t seed;
  const char* const* stop;  // strings that end the text
  size_t stop_count;
} sluice_sampling;

// Called with whole characters, as they are generated; anything but 0 stops.
typedef int (*sluice_text_callback)(void* user, const char* text, size_t bytes);

typedef struct sluice_generate_options {
  size_t size;
  const sluice_sampling* sampling;  // required
  const int32_t* end_tokens;        // end the text, besides the model's
  size_t end_token_count;
  const int32_t* history;  // tokens before the prompt that the repetition penalty covers
  size_t history_count;
  int32_t ignore_eos;
  sluice_progress_callback on_progress;
  sluice_text_callback on_text;
  void* user;
  sluice_cancel* cancel;
  // Most tokens of a step that are guessed from the context, 0 to 63; the text stays the same. The
  // session needs a decode_batch of one more.
  int32_t lookup_drafts;
  sluice_constraint* constraint;  // NULL: none. Neither with ignore_eos nor with lookup_drafts
} sluice_generate_options;

typedef struct sluice_generate_result {
  size_t size;
  sluice_finish finish;
  int32_t pending;        // drawn but not appended, or -1: the next prompt must begin with it
  int64_t answer_tokens;  // without the end-of-text token
  int64_t prefill_tokens;
  double prefill_seconds;
  double first_token_seconds;
  double decode_seconds;      // for the tokens after the first
  int64_t drafted;            // tokens guessed and verified
  int64_t accepted;           // of these
  int64_t recomputed_tokens;  // whose rows a disk had lost
} sluice_generate_result;

// Generates after the prompt. `answer`, if not NULL, gets the tokens and has to hold max_tokens.
// SLUICE_OK, too, if a callback or a cancel stopped it: then `finish` is SLUICE_INTERRUPTED.
SLUICE_API sluice_code sluice_generate(sluice_session* session, const int32_t* prompt, size_t count,
                                       const sluice_generate_options* options, int32_t* answer,
                                       size_t capacity, sluice_generate_result* result);

// ---- Batcher ----

// See sluice::BatcherOptions.
typedef struct sluice_batcher_options {
  size_t size;
  int64_t context;  // most tokens of a request, prompt and answer; required
  const char* const* policies;
  size_t policy_count;
  int32_t running;          // most sequences at a time; 0: 16
  int32_t no_prefix_cache;  // not 0: finished sequences are not kept
  int64_t tokens;           // of all sequences, see sluice::BatcherOptions; 0: running * context
  int64_t queued;           // most choices that wait; 0: 1024
  double prefill_ms;        // 0: twice the time of a decode step
  uint64_t device_memory;
  uint64_t host_memory;
  int32_t loads_prefixes;  // not 0: sluice_batcher_load_prefixes() may be called
  int64_t indexed_tokens;  // see sluice::BatcherOptions; 0: all
} sluice_batcher_options;

// See sluice::SavedPrefixes.
typedef struct sluice_saved_prefixes {
  size_t size;
  int64_t sessions;
  int64_t tokens;   // of them
  int64_t skipped;  // other sessions of the directory
} sluice_saved_prefixes;

typedef struct sluice_bias {
  int32_t token;
  double bias;  // -100 to 100
} sluice_bias;

// Called on the batcher's thread with the answer so far and the logits, which it may change;
// -INFINITY forbids a token. Anything but 0 ends the request with SLUICE_USAGE. It may not call the
// batcher.
typedef int (*sluice_mask_callback)(void* user, const int32_t* answer, size_t count, float* logits,
                                    size_t vocabulary);

// See sluice::Request.
typedef struct sluice_request {
  size_t size;
  const int32_t* prompt;
  size_t prompt_count;
  const sluice_sampling* sampling;  // required; max_tokens 0 computes only the prompt
  const int32_t* end_tokens;
  size_t end_token_count;
  const char* policy;  // one of the batcher's; NULL: the first
  const sluice_bias* bias;
  size_t bias_count;
  double presence_penalty;
  double frequency_penalty;
  int32_t ignore_eos;
  int32_t choices;            // 0: 1
  int32_t priority;           // higher ones go first
  int32_t no_wait;            // not 0: refused with SLUICE_MEMORY if there is no room now
  int64_t timeout_ms;         // ends the answer with SLUICE_DEADLINE; 0: none
  int32_t logprobs;           // not 0: pieces have the tokens' log probabilities
  sluice_mask_callback mask;  // with its user pointer valid until the stream has ended or is freed
  void* mask_user;
  sluice_constraint* constraint;  // NULL: none. Not with ignore_eos
} sluice_request;

typedef int32_t sluice_stream_state;
enum {
  SLUICE_PIECE = 0,     // there is a piece
  SLUICE_NO_PIECE = 1,  // none within the time
  SLUICE_ENDED = 2      // all choices have ended
};

// Pointers are valid until the stream's next sluice_stream_next or its end.
typedef struct sluice_piece {
  size_t size;
  sluice_stream_state state;
  int32_t choice;
  const char* text;  // whole characters, NUL behind them
  size_t text_bytes;
  const int32_t* tokens;  // drawn since the last piece; their text may follow later
  const float* logprobs;  // of the tokens; NULL unless asked for
  size_t token_count;
  sluice_finish finish;  // of this choice
} sluice_piece;

typedef struct sluice_usage {
  size_t size;
  int64_t prompt_tokens;
  int64_t reused_tokens;
  int64_t answer_tokens;
  int32_t preemptions;
  double queue_seconds;
  double first_token_seconds;  // 0: there is none yet
  double seconds;
} sluice_usage;

typedef struct sluice_batcher_stats {
  size_t size;
  uint64_t submitted;
  uint64_t refused;
  uint64_t failed;
  uint64_t prompt_tokens;
  uint64_t reused_tokens;
  uint64_t answer_tokens;
  uint64_t preemptions;
  uint64_t steps;
  int64_t queued;
  int64_t running;
  int64_t cached;
  int64_t free_tokens;
  int64_t planned_tokens;
} sluice_batcher_stats;

SLUICE_API sluice_code sluice_batcher_open(sluice_engine* engine,
                                           const sluice_batcher_options* options,
                                           sluice_batcher** batcher);
// Cancels everything; streams that are left give the pieces that they have, then SLUICE_ENDED or
// an error.
SLUICE_API sluice_code sluice_batcher_free(sluice_batcher* batcher);
SLUICE_API sluice_code sluice_batcher_submit(sluice_batcher* batcher, const sluice_request* request,
                                             sluice_stream** stream);
// Refuses further requests and waits for the others, at most `patience_ms`, then cancels them.
SLUICE_API sluice_code sluice_batcher_drain(sluice_batcher* batcher, int64_t patience_ms);
// Makes the saved sessions in a directory known as prefixes, and saves those that finished requests
// have left; see sluice::Batcher. `result` may be NULL.
SLUICE_API sluice_code sluice_batcher_load_prefixes(sluice_batcher* batcher, const char* directory,
                                                    sluice_saved_prefixes* result);
SLUICE_API sluice_code sluice_batcher_save_prefixes(sluice_batcher* batcher, const char* directory,
                                                    sluice_saved_prefixes* result);
SLUICE_API sluice_code sluice_batcher_stats_read(sluice_batcher* batcher,
                                                 sluice_batcher_stats* stats);
// Waits for the next piece, at most `timeout_ms`; -1: until there is one. Returns the error that
// ended the request.
SLUICE_API sluice_code sluice_stream_next(sluice_stream* stream, int64_t timeout_ms,
                                          sluice_piece* piece);
SLUICE_API sluice_code sluice_stream_cancel(sluice_stream* stream);
SLUICE_API sluice_code sluice_stream_usage(sluice_stream* stream, sluice_usage* usage);
// Cancels the request unless it has ended.
SLUICE_API sluice_code sluice_stream_free(sluice_stream* stream);

// ---- KvCache, for programs that run a model of their own ----

// See sluice::KvConfig.
typedef struct sluice_kv_options {
  size_t size;
  int32_t layers;
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  sluice_dtype rows;
  int64_t context;
  const char* device;  // NULL: "cpu"
  void* stream;        // a cudaStream_t; NULL: the cache's own
  int32_t threads;
  int32_t chunk;         // 0: 512
  int32_t sequences;     // 0: 1
  int32_t decode_batch;  // 0: 1
  int64_t tokens;        // 0: sequences * context
  const char* const* policies;
  size_t policy_count;
  double scale;  // of logits; 0: 1 / sqrt(head_dim)
  uint64_t device_memory;
  uint64_t host_memory;
  const uint64_t* row_cache;
  const char* const* disk;  // as of sluice_engine_options
  size_t disk_count;
  uint64_t disk_bytes;
  // For policies with components=half: [layers, kv_heads, head_dim / 2, head_dim], from
  // sluice_value_basis(). NULL: none.
  const float* value_basis;
  size_t value_basis_count;  // floats
} sluice_kv_options;

typedef struct sluice_kv_info {
  size_t size;
  int64_t chunk;  // most tokens of a prefill step
  int64_t context;
  uint64_t device_bytes;
  uint64_t host_bytes;
  uint64_t dense_bytes;  // of a cache with every row on the device
} sluice_kv_info;

typedef int32_t sluice_phase;
enum { SLUICE_PREFILL = 0, SLUICE_DECODE = 1, SLUICE_CORRECTION = 2 };

// An array [tokens, heads, head_dim] of the caller's. The elements of a head are contiguous.
typedef struct sluice_array {
  size_t size;
  void* data;
  size_t bytes;  // that `data` points to; an array that would reach beyond them is refused
  sluice_dtype dtype;
  int32_t on_device;     // not 0: GPU memory
  int64_t token_stride;  // elements; 0: dense
  int64_t head_stride;   // elements; 0: head_dim
} sluice_array;

// The basis of one KV head, see sluice/value_basis.h. `weights`: its rows of the value projection,
// [head_dim, hidden], `bytes` in all. `basis` has room for head_dim / 2 * head_dim floats.
SLUICE_API sluice_code sluice_value_basis(const void* weights, size_t bytes, sluice_dtype dtype,
                                          int32_t head_dim, float* basis, size_t count);

SLUICE_API sluice_code sluice_kv_cache_open(const sluice_kv_options* options,
                                            sluice_kv_cache** cache);
SLUICE_API sluice_code sluice_kv_cache_free(sluice_kv_cache* cache);
SLUICE_API sluice_code sluice_kv_cache_info(sluice_kv_cache* cache, sluice_kv_info* info);
SLUICE_API sluice_code sluice_kv_cache_memory(sluice_kv_cache* cache, sluice_memory* memory);

SLUICE_API sluice_code sluice_kv_sequence_open(sluice_kv_cache* cache,
                                               sluice_kv_sequence** sequence);
SLUICE_API sluice_code sluice_kv_sequence_fork(sluice_kv_sequence* sequence,
                                               sluice_kv_sequence** fork);
SLUICE_API sluice_code sluice_kv_sequence_free(sluice_kv_sequence* sequence);
SLUICE_API sluice_code sluice_kv_sequence_use(sluice_kv_sequence* sequence, const char* policy);
SLUICE_API sluice_code sluice_kv_sequence_truncate(sluice_kv_sequence* sequence, int64_t length);
// Forgets all tokens, a failure and the ledger.
SLUICE_API sluice_code sluice_kv_sequence_reset(sluice_kv_sequence* sequence);
SLUICE_API sluice_code sluice_kv_sequence_length(sluice_kv_sequence* sequence, int64_t* length);
SLUICE_API sluice_code sluice_kv_sequence_ledger_json(sluice_kv_sequence* sequence, char* json,
                                                      size_t capacity, size_t* bytes);

// A step adds `tokens` to every layer: append and attend each layer, then end the step. The thread
// that begins a step has to end it; other threads' calls of the same cache wait meanwhile.
SLUICE_API sluice_code sluice_kv_step_begin(sluice_kv_sequence* sequence, sluice_phase phase,
                                            int64_t tokens, sluice_kv_step** step);
// A decode step of several sequences, one token of each in this order.
SLUICE_API sluice_code sluice_kv_step_begin_batch(sluice_kv_cache* cache,
                                                  sluice_kv_sequence* const* sequences,
                                                  size_t count, sluice_kv_step** step);
// Keys (after RoPE) and values, [tokens, kv_heads, head_dim].
SLUICE_API sluice_code sluice_kv_step_append(sluice_kv_step* step, int32_t layer,
                                             const sluice_array* keys, const sluice_array* values);
// Queries and `out` [tokens, query_heads, head_dim]. `lse`, if not NULL, gets the log-sum-exp of
// the attended logits, [tokens, query_heads] f32 in the same memory as `out`; `capacity` counts
// floats.
SLUICE_API sluice_code sluice_kv_step_attend(sluice_kv_step* step, int32_t layer,
                                             const sluice_array* queries, const sluice_array* out,
                                             float* lse, size_t capacity);
SLUICE_API sluice_code sluice_kv_step_end(sluice_kv_step* step);
// A step that was not ended fails, and so do its sequences.
SLUICE_API sluice_code sluice_kv_step_free(sluice_kv_step* step);

#ifdef __cplusplus
}
#endif
// NOLINTEND(readability-identifier-naming)

#endif
