// The C interface, used and misused.
//
//   c_api_test MODEL SUBJECT
#define _POSIX_C_SOURCE 200809L  // mkdtemp
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "c_test.h"

enum { kMostTokens = 256, kAnswer = 12 };

static const char* model;

static const char* const kText = "Well, Prince, so Genoa and Lucca are now just family estates";

static sluice_engine* open_engine(void) {
  const sluice_engine_options options = {.size = sizeof options, .model = model};
  sluice_engine* engine = NULL;
  EXPECT_OK(sluice_engine_open(&options, &engine));
  return engine;
}

static sluice_session_options session_options(void) {
  const sluice_session_options options = {.size = sizeof options, .context = 512, .sequences = 3};
  return options;
}

static sluice_session* open_session(sluice_engine* engine) {
  const sluice_session_options options = session_options();
  sluice_session* session = NULL;
  EXPECT_OK(sluice_session_open(engine, &options, &session));
  return session;
}

static size_t vocabulary_of(sluice_engine* engine) {
  sluice_model_info info = {.size = sizeof info};
  EXPECT_OK(sluice_engine_info(engine, &info));
  CHECK(info.vocabulary > 1000 && info.layers > 0 && info.kv_heads > 0);
  return (size_t)info.vocabulary;
}

typedef struct tokens {
  int32_t ids[kMostTokens];
  size_t count;
} tokens;

static tokens prompt_of(sluice_engine* engine) {
  tokens prompt;
  EXPECT_OK(sluice_encode(engine, kText, strlen(kText), SLUICE_ENCODE_PROMPT, prompt.ids,
                          kMostTokens, &prompt.count));
  CHECK(prompt.count > 4);
  return prompt;
}

static int32_t likeliest(const float* logits, size_t count) {
  size_t best = 0;
  for (size_t i = 1; i < count; ++i) {
    if (logits[i] > logits[best]) best = i;
  }
  return (int32_t)best;
}

// A greedy answer by the session's own calls.
static void decode_greedily(sluice_engine* engine, int32_t* answer) {
  const size_t vocabulary = vocabulary_of(engine);
  const tokens prompt = prompt_of(engine);
  float* logits = memory_for(vocabulary, sizeof *logits);
  sluice_session* session = open_session(engine);
  EXPECT_OK(sluice_session_prefill(session, prompt.ids, prompt.count, NULL, NULL, NULL, logits,
                                   vocabulary));
  for (int i = 0; i < kAnswer; ++i) {
    answer[i] = likeliest(logits, vocabulary);
    EXPECT_OK(sluice_session_decode(session, answer[i], logits, vocabulary));
  }
  EXPECT_OK(sluice_session_free(session));
  free(logits);
}

static void test_handles(void) {
  sluice_engine* engine = open_engine();
  sluice_session* session = open_session(engine);
  int64_t length = -1;
  // NULL, of another kind, wild, and freed.
  EXPECT(SLUICE_USAGE, sluice_session_length(NULL, &length));
  EXPECT(SLUICE_USAGE, sluice_session_length((sluice_session*)engine, &length));
  EXPECT(SLUICE_USAGE, sluice_session_length((sluice_session*)&length, &length));
  EXPECT(SLUICE_USAGE, sluice_engine_free((sluice_engine*)session));
  EXPECT_OK(sluice_session_length(session, &length));
  CHECK(length == 0);
  EXPECT_OK(sluice_session_free(session));
  EXPECT(SLUICE_USAGE, sluice_session_length(session, &length));
  EXPECT(SLUICE_USAGE, sluice_session_free(session));
  EXPECT(SLUICE_USAGE, sluice_session_decode(session, 1, NULL, 0));
  EXPECT(SLUICE_USAGE, sluice_session_fork(session, &session));
  EXPECT(SLUICE_USAGE, sluice_engine_step(engine, &session, NULL, 1, NULL, 0, NULL));
  EXPECT_OK(sluice_engine_free(engine));
  EXPECT(SLUICE_USAGE, sluice_engine_free(engine));
  EXPECT(SLUICE_USAGE, sluice_engine_free(NULL));
  EXPECT(SLUICE_USAGE, sluice_cancel_set(NULL));
  EXPECT(SLUICE_USAGE, sluice_cancel_free((sluice_cancel*)engine));
  EXPECT(SLUICE_USAGE, sluice_cancel_create(NULL));
  EXPECT(SLUICE_USAGE, sluice_stream_cancel(NULL));
  EXPECT(SLUICE_USAGE, sluice_stream_free(NULL));
  EXPECT(SLUICE_USAGE, sluice_batcher_free(NULL));
  EXPECT(SLUICE_USAGE, sluice_kv_cache_free(NULL));
  EXPECT(SLUICE_USAGE, sluice_kv_sequence_free(NULL));
  EXPECT(SLUICE_USAGE, sluice_kv_step_free(NULL));
  CHECK(strcmp(sluice_code_name(SLUICE_MEMORY), "memory") == 0);
  CHECK(strcmp(sluice_code_name(SLUICE_TOO_SMALL), "too_small") == 0);
  CHECK(strcmp(sluice_code_name(-1), "unknown") == 0);
  CHECK(strcmp(sluice_code_name(99), "unknown") == 0);
  CHECK(sluice_version()[0] != '\0');
}

static void test_structs(void) {
  sluice_engine* engine = NULL;
  sluice_engine_options options = {.size = sizeof options, .model = model};
  EXPECT(SLUICE_USAGE, sluice_engine_open(NULL, &engine));
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, NULL));
  options.size = 0;
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  options.size = sizeof options - 8;
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  options.size = (size_t)-1;
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  options.size = sizeof options;
  options.model = NULL;
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  options.model = "nowhere";
  EXPECT(SLUICE_NOT_FOUND, sluice_engine_open(&options, &engine));
  options.model = model;
  options.device = "toaster";
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  options.device = NULL;
  options.compute = "f64";
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  options.compute = NULL;
  options.weights = "int2";
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  options.weights = NULL;
  options.kv_dtype = "int4";
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  const char* const coded[] = {"int8", "k8v4"};
  for (size_t i = 0; i < 2; ++i) {
    options.kv_dtype = coded[i];
    EXPECT_OK(sluice_engine_open(&options, &engine));
    EXPECT_OK(sluice_engine_free(engine));
    engine = NULL;
  }
  options.kv_dtype = NULL;
  options.threads = -1;
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  options.threads = 0;
  const char* const disk[] = {"nowhere"};
  options.disk_count = 1;
  EXPECT(SLUICE_USAGE, sluice_engine_open(&options, &engine));
  CHECK(engine == NULL);
  options.disk = disk;
  options.host_memory = 200 << 20;
  options.device_memory = 64 << 20;
  EXPECT_OK(sluice_engine_open(&options, &engine));
  // The directory is looked at by the first session whose rows do not fit.
  sluice_session* spilled = NULL;
  const sluice_session_options large = {.size = sizeof large, .context = 131072};
  EXPECT(SLUICE_NOT_FOUND, sluice_session_open(engine, &large, &spilled));
  CHECK(spilled == NULL);
  EXPECT_OK(sluice_engine_free(engine));
  engine = NULL;
  options.disk = NULL;

  // A caller of a later version: fields that this one does not know have to be zero.
  struct {
    sluice_engine_options known;
    uint64_t added;
  } later = {{.size = sizeof later, .model = model}, 0};
  EXPECT_OK(sluice_engine_open(&later.known, &engine));
  EXPECT_OK(sluice_engine_free(engine));
  later.added = 1;
  EXPECT(SLUICE_USAGE, sluice_engine_open(&later.known, &engine));

  engine = open_engine();
  sluice_model_info info = {.size = 0};
  EXPECT(SLUICE_USAGE, sluice_engine_info(engine, &info));
  EXPECT(SLUICE_USAGE, sluice_engine_info(engine, NULL));
  sluice_memory memory = {.size = 4};
  EXPECT(SLUICE_USAGE, sluice_engine_memory(engine, &memory));
  memory.size = sizeof memory;
  EXPECT_OK(sluice_engine_memory(engine, &memory));
  CHECK(memory.size == sizeof memory);

  sluice_session* session = NULL;
  sluice_session_options planned = session_options();
  EXPECT(SLUICE_USAGE, sluice_session_open(engine, NULL, &session));
  EXPECT(SLUICE_USAGE, sluice_session_open(engine, &planned, NULL));
  planned.context = -4;
  EXPECT(SLUICE_USAGE, sluice_session_open(engine, &planned, &session));
  planned = session_options();
  planned.sequences = 100000;
  EXPECT(SLUICE_USAGE, sluice_session_open(engine, &planned, &session));
  planned = session_options();
  planned.host_memory = 1;
  EXPECT(SLUICE_MEMORY, sluice_session_open(engine, &planned, &session));
  planned = session_options();
  const char* const policies[] = {"values", "select=magic"};
  planned.policies = policies;
  planned.policy_count = 2;
  EXPECT(SLUICE_USAGE, sluice_session_open(engine, &planned, &session));
  CHECK(strstr(sluice_message(), "magic") != NULL);
  planned.policies = NULL;
  EXPECT(SLUICE_USAGE, sluice_session_open(engine, &planned, &session));
  CHECK(session == NULL);
  EXPECT_OK(sluice_engine_free(engine));
}

static void test_buffers(void) {
  sluice_engine* engine = open_engine();
  const size_t vocabulary = vocabulary_of(engine);
  const tokens prompt = prompt_of(engine);
  int32_t few[2] = {-7, -7};
  size_t count = 0;
  EXPECT(SLUICE_TOO_SMALL,
         sluice_encode(engine, kText, strlen(kText), SLUICE_ENCODE_PROMPT, few, 2, &count));
  CHECK(count == prompt.count && few[0] == -7 && few[1] == -7);
  EXPECT(SLUICE_TOO_SMALL,
         sluice_encode(engine, kText, strlen(kText), SLUICE_ENCODE_PROMPT, NULL, 0, &count));
  EXPECT(SLUICE_USAGE, sluice_encode(engine, kText, strlen(kText), SLUICE_ENCODE_PROMPT, NULL,
                                     kMostTokens, &count));

  char text[512];
  size_t bytes = 0;
  const sluice_session_options planned = session_options();
  EXPECT(SLUICE_TOO_SMALL, sluice_engine_plan_json(engine, &planned, NULL, 0, &bytes));
  char* json = memory_for(bytes + 1, 1);
  // The NUL needs room, too.
  EXPECT(SLUICE_TOO_SMALL, sluice_engine_plan_json(engine, &planned, json, bytes, &bytes));
  EXPECT_OK(sluice_engine_plan_json(engine, &planned, json, bytes + 1, &bytes));
  CHECK(strlen(json) == bytes && strstr(json, "\"device_bytes\"") != NULL);
  free(json);
  EXPECT_OK(sluice_engine_policy(engine, "values", text, sizeof text, NULL));
  CHECK(strstr(text, "compensate=values") != NULL);
  EXPECT(SLUICE_USAGE, sluice_engine_policy(engine, NULL, text, sizeof text, NULL));
  EXPECT(SLUICE_USAGE, sluice_engine_policy(engine, "values", NULL, sizeof text, NULL));

  sluice_session* session = open_session(engine);
  float* logits = memory_for(vocabulary, sizeof *logits);
  EXPECT(SLUICE_TOO_SMALL, sluice_session_prefill(session, prompt.ids, prompt.count, NULL, NULL,
                                                  NULL, logits, vocabulary - 1));
  int64_t length = 0;
  EXPECT_OK(sluice_session_length(session, &length));
  CHECK(length == 0);  // refused before anything was computed
  EXPECT(SLUICE_USAGE, sluice_session_length(session, NULL));
  EXPECT(SLUICE_USAGE, sluice_session_score(session, prompt.ids, prompt.count, NULL, 0));
  EXPECT(SLUICE_TOO_SMALL, sluice_session_score(session, prompt.ids, prompt.count, logits, 1));
  free(logits);
  EXPECT_OK(sluice_session_free(session));
  EXPECT_OK(sluice_engine_free(engine));
}

static void test_text(void) {
  sluice_engine* engine = open_engine();
  const tokens prompt = prompt_of(engine);
  char text[512];
  size_t bytes = 0;
  size_t count = 0;
  EXPECT_OK(sluice_decode(engine, prompt.ids, prompt.count, 0, text, sizeof text, &bytes));
  CHECK(strcmp(text, kText) == 0 && bytes == strlen(kText));
  int32_t ids[kMostTokens];
  EXPECT(SLUICE_PROMPT, sluice_encode(engine, "\xC3(", 2, SLUICE_ENCODE, ids, kMostTokens, &count));
  EXPECT(SLUICE_PROMPT,
         sluice_encode(engine, "\xFF\xFE", 2, SLUICE_ENCODE_PLAIN, ids, kMostTokens, &count));
  EXPECT(SLUICE_USAGE, sluice_encode(engine, NULL, 3, SLUICE_ENCODE, ids, kMostTokens, &count));
  EXPECT(SLUICE_USAGE, sluice_encode(engine, "a", 1, (sluice_encoding)9, ids, kMostTokens, &count));
  EXPECT_OK(sluice_encode(engine, NULL, 0, SLUICE_ENCODE, ids, kMostTokens, &count));
  CHECK(count == 0);
  const int32_t unknown[] = {-1};
  EXPECT(SLUICE_TOKENIZER, sluice_decode(engine, unknown, 1, 0, text, sizeof text, &bytes));
  EXPECT(SLUICE_USAGE, sluice_decode(engine, NULL, 1, 0, text, sizeof text, &bytes));
  EXPECT_OK(sluice_engine_eos(engine, ids, kMostTokens, &count));

  // The bundled checkpoint has no chat template.
  const sluice_turn turns[] = {{"And Genoa?", NULL}};
  EXPECT(SLUICE_UNSUPPORTED, sluice_render_chat(engine, NULL, turns, 1, ids, kMostTokens, &count));
  EXPECT(SLUICE_UNSUPPORTED, sluice_chat_end_tokens(engine, ids, kMostTokens, &count));
  EXPECT_OK(sluice_engine_free(engine));
}

// With a template that writes a line for each message.
static void test_chat(void) {
  sluice_engine* engine = open_engine();
  int32_t ids[kMostTokens];
  char text[512];
  size_t count = 0;
  const sluice_turn turns[] = {{"Who?", "Vasili."}, {"And Genoa?", NULL}};
  EXPECT_OK(sluice_render_chat(engine, "Be brief.", turns, 2, ids, kMostTokens, &count));
  EXPECT_OK(sluice_decode(engine, ids, count, 1, text, sizeof text, NULL));
  CHECK(strcmp(text,
               "system: Be brief.\nuser: Who?\nassistant: Vasili.\nuser: And Genoa?\n"
               "assistant: ") == 0);
  EXPECT(SLUICE_TOO_SMALL, sluice_render_chat(engine, NULL, turns, 2, ids, 1, &count));
  EXPECT(SLUICE_USAGE, sluice_render_chat(engine, NULL, NULL, 1, ids, kMostTokens, &count));
  EXPECT(SLUICE_PROMPT, sluice_render_chat(engine, NULL, turns, 0, ids, kMostTokens, &count));
  const sluice_turn empty[] = {{NULL, NULL}};
  EXPECT(SLUICE_USAGE, sluice_render_chat(engine, NULL, empty, 1, ids, kMostTokens, &count));
  const sluice_turn broken[] = {{"\xFF", NULL}};
  EXPECT(SLUICE_PROMPT, sluice_render_chat(engine, NULL, broken, 1, ids, kMostTokens, &count));
  EXPECT_OK(sluice_chat_end_tokens(engine, ids, kMostTokens, &count));
  EXPECT_OK(sluice_engine_free(engine));
}

static int stop_at_once(void* user, int64_t done, int64_t total) {
  (void)done;
  (void)total;
  ++*(int*)user;
  return 1;
}

static void test_recompute(void) {
  sluice_engine* engine = open_engine();
  const size_t vocabulary = vocabulary_of(engine);
  const tokens prompt = prompt_of(engine);
  float* logits = memory_for(2 * vocabulary, sizeof *logits);
  float* again = logits + vocabulary;
  sluice_session* session = open_session(engine);
  EXPECT(SLUICE_PROMPT, sluice_session_recompute(session, NULL, NULL, NULL, NULL, 0));
  EXPECT_OK(sluice_session_prefill(session, prompt.ids, prompt.count, NULL, NULL, NULL, logits,
                                   vocabulary));
  EXPECT(SLUICE_TOO_SMALL, sluice_session_recompute(session, NULL, NULL, NULL, again, 1));
  EXPECT_OK(sluice_session_recompute(session, NULL, NULL, NULL, again, vocabulary));
  CHECK(memcmp(logits, again, vocabulary * sizeof *logits) == 0);
  int calls = 0;
  EXPECT(SLUICE_STOPPED, sluice_session_recompute(session, stop_at_once, &calls, NULL, NULL, 0));
  int64_t length = -1;
  EXPECT_OK(sluice_session_length(session, &length));
  CHECK(length == 0);
  EXPECT_OK(sluice_session_free(session));
  EXPECT_OK(sluice_engine_free(engine));
  free(logits);
}

static void test_saved_sessions(void) {
  sluice_engine* engine = open_engine();
  const size_t vocabulary = vocabulary_of(engine);
  const tokens prompt = prompt_of(engine);
  char directory[] = "/tmp/sluice_c_XXXXXX";
  CHECK(mkdtemp(directory) != NULL);
  char path[64];
  snprintf(path, sizeof path, "%s/one", directory);
  float* logits = memory_for(vocabulary, 2 * sizeof *logits);
  float* again = logits + vocabulary;

  sluice_session_options options = session_options();
  options.sequences = 3;
  options.loads = 1;
  sluice_session* session = NULL;
  EXPECT_OK(sluice_session_open(engine, &options, &session));
  EXPECT(SLUICE_USAGE, sluice_session_save(session, path, NULL, 0));  // no tokens
  EXPECT_OK(sluice_session_prefill(session, prompt.ids, prompt.count, NULL, NULL, NULL, NULL, 0));
  EXPECT(SLUICE_USAGE, sluice_session_save(session, NULL, NULL, 0));
  EXPECT(SLUICE_USAGE, sluice_session_save(session, path, NULL, 4));
  EXPECT_OK(sluice_session_save(session, path, "mine", 4));
  EXPECT_OK(sluice_session_decode(session, 7, logits, vocabulary));

  char note[8];
  int64_t count = 0;
  EXPECT_OK(sluice_saved_session(engine, path, &count, note, sizeof note, NULL));
  CHECK(count == (int64_t)prompt.count && strcmp(note, "mine") == 0);
  EXPECT(SLUICE_TOO_SMALL, sluice_saved_session(engine, path, NULL, note, 4, NULL));
  EXPECT(SLUICE_NOT_FOUND, sluice_saved_session(engine, directory, NULL, note, sizeof note, NULL));

  sluice_session* loaded = NULL;
  EXPECT_OK(sluice_session_sibling(session, &loaded));
  EXPECT(SLUICE_NOT_FOUND, sluice_session_load(loaded, "/nonexistent"));
  EXPECT_OK(sluice_session_free(loaded));
  EXPECT_OK(sluice_session_sibling(session, &loaded));
  EXPECT_OK(sluice_session_load(loaded, path));
  EXPECT(SLUICE_USAGE, sluice_session_load(loaded, path));  // has tokens now
  EXPECT(SLUICE_USAGE, sluice_session_load(loaded, NULL));
  int32_t ids[kMostTokens];
  size_t tokens = 0;
  EXPECT_OK(sluice_session_tokens(loaded, ids, kMostTokens, &tokens));
  CHECK(tokens == prompt.count && memcmp(ids, prompt.ids, tokens * sizeof *ids) == 0);
  EXPECT(SLUICE_TOO_SMALL, sluice_session_tokens(loaded, ids, 1, &tokens));
  EXPECT_OK(sluice_session_decode(loaded, 7, again, vocabulary));
  CHECK(memcmp(logits, again, vocabulary * sizeof *logits) == 0);
  EXPECT_OK(sluice_session_free(loaded));
  EXPECT_OK(sluice_session_free(session));
  sluice_session_options too_few = session_options();
  too_few.indexed_tokens = 511;  // less than the context
  EXPECT(SLUICE_USAGE, sluice_session_open(engine, &too_few, &session));

  // The same as a prefix of a batcher's prompts.
  sluice_batcher_options batching = {.size = sizeof batching, .context = 512, .running = 1};
  sluice_batcher* batcher = NULL;
  EXPECT_OK(sluice_batcher_open(engine, &batching, &batcher));
  EXPECT(SLUICE_USAGE, sluice_batcher_load_prefixes(batcher, directory, NULL));
  EXPECT_OK(sluice_batcher_free(batcher));
  batching.loads_prefixes = 1;
  batching.indexed_tokens = 511;  // less than the context
  EXPECT(SLUICE_USAGE, sluice_batcher_open(engine, &batching, &batcher));
  batching.indexed_tokens = 512;
  EXPECT_OK(sluice_batcher_open(engine, &batching, &batcher));
  sluice_saved_prefixes result = {.size = sizeof result};
  EXPECT_OK(sluice_batcher_load_prefixes(batcher, directory, &result));
  CHECK(result.sessions == 1 && result.tokens == (int64_t)prompt.count && result.skipped == 0);
  EXPECT(SLUICE_USAGE, sluice_batcher_load_prefixes(batcher, NULL, &result));
  EXPECT_OK(sluice_batcher_save_prefixes(batcher, directory, NULL));
  EXPECT(SLUICE_IO, sluice_batcher_save_prefixes(batcher, "/nonexistent/a", &result));
  EXPECT_OK(sluice_batcher_free(batcher));

  EXPECT_OK(sluice_engine_free(engine));
  free(logits);
  char command[96];
  snprintf(command, sizeof command, "rm -r %s", directory);
  CHECK(system(command) == 0);
}

static void test_sessions(void) {
  sluice_engine* engine = open_engine();
  const size_t vocabulary = vocabulary_of(engine);
  const tokens prompt = prompt_of(engine);
  const char* const policies[] = {"dense", "values"};
  sluice_session_options options = session_options();
  options.policies = policies;
  options.policy_count = 2;
  sluice_session* session = NULL;
  EXPECT_OK(sluice_session_open(engine, &options, &session));
  float* logits = memory_for(vocabulary, sizeof *logits);

  // Scores are the log softmax of the logits before each token.
  float* scores = memory_for(prompt.count, sizeof *scores);
  EXPECT_OK(sluice_session_score(session, prompt.ids, prompt.count, scores, prompt.count - 1));
  EXPECT_OK(sluice_session_truncate(session, 0));
  for (size_t i = 0; i + 1 < prompt.count; ++i) {
    const sluice_code code =
        i == 0
            ? sluice_session_prefill(session, prompt.ids, 1, NULL, NULL, NULL, logits, vocabulary)
            : sluice_session_decode(session, prompt.ids[i], logits, vocabulary);
    EXPECT_OK(code);
    double sum = 0.0;
    for (size_t id = 0; id < vocabulary; ++id) sum += exp((double)logits[id]);
    const double logprob = (double)logits[prompt.ids[i + 1]] - log(sum);
    // Chunks of other sizes round differently.
    CHECK(fabs(logprob - (double)scores[i]) < 0.05);
  }
  free(scores);

  EXPECT_OK(sluice_session_use(session, "values"));
  char text[512];
  EXPECT_OK(sluice_session_policy(session, text, sizeof text, NULL));
  CHECK(strstr(text, "compensate=values") != NULL);
  EXPECT(SLUICE_USAGE, sluice_session_use(session, "quest"));  // not planned
  EXPECT(SLUICE_USAGE, sluice_session_use(session, "nonsense"));
  EXPECT(SLUICE_USAGE, sluice_session_use(session, NULL));
  EXPECT(SLUICE_USAGE, sluice_session_truncate(session, -1));
  EXPECT(SLUICE_USAGE, sluice_session_truncate(session, 100000));
  EXPECT(SLUICE_PROMPT, sluice_session_decode(session, -1, logits, vocabulary));
  EXPECT(SLUICE_PROMPT, sluice_session_decode(session, (int32_t)vocabulary, logits, vocabulary));
  EXPECT(SLUICE_PROMPT, sluice_session_prefill(session, prompt.ids, 0, NULL, NULL, NULL, NULL, 0));
  EXPECT(SLUICE_USAGE, sluice_session_prefill(session, NULL, 3, NULL, NULL, NULL, NULL, 0));
  EXPECT(SLUICE_USAGE,
         sluice_session_prefill(session, prompt.ids, SIZE_MAX, NULL, NULL, NULL, NULL, 0));
  int calls = 0;
  EXPECT(SLUICE_STOPPED, sluice_session_prefill(session, prompt.ids, prompt.count, stop_at_once,
                                                &calls, NULL, logits, vocabulary));
  CHECK(calls == 1);
  size_t bytes = 0;
  EXPECT(SLUICE_TOO_SMALL, sluice_session_ledger_json(session, NULL, 0, &bytes));
  char* json = memory_for(bytes + 1, 1);
  EXPECT_OK(sluice_session_ledger_json(session, json, bytes + 1, NULL));
  CHECK(strstr(json, "append") != NULL);
  free(json);
  free(logits);
  EXPECT_OK(sluice_session_free(session));
  EXPECT_OK(sluice_engine_free(engine));
}

static void test_steps(void) {
  sluice_engine* engine = open_engine();
  const size_t vocabulary = vocabulary_of(engine);
  const tokens prompt = prompt_of(engine);
  sluice_session* both[2] = {open_session(engine), NULL};
  EXPECT_OK(sluice_session_prefill(both[0], prompt.ids, prompt.count, NULL, NULL, NULL, NULL, 0));
  EXPECT(SLUICE_USAGE, sluice_session_fork(both[0], NULL));
  EXPECT_OK(sluice_session_fork(both[0], &both[1]));
  const int32_t next[2] = {prompt.ids[1], prompt.ids[1]};
  float* logits = memory_for(2 * vocabulary, sizeof *logits);
  sluice_code codes[2] = {SLUICE_IO, SLUICE_IO};
  EXPECT_OK(sluice_engine_step(engine, both, next, 2, logits, 2 * vocabulary, codes));
  CHECK(codes[0] == SLUICE_OK && codes[1] == SLUICE_OK);
  // Forks that get the same token give the same logits, and so does one alone, but for rounding.
  float* alone = memory_for(vocabulary, sizeof *alone);
  EXPECT_OK(sluice_session_truncate(both[0], (int64_t)prompt.count));
  EXPECT_OK(sluice_session_decode(both[0], next[0], alone, vocabulary));
  for (size_t i = 0; i < vocabulary; ++i) {
    CHECK(fabsf(logits[i] - logits[vocabulary + i]) < 1e-5F);
    CHECK(fabsf(logits[i] - alone[i]) < 0.1F);
  }
  free(alone);
  EXPECT(SLUICE_TOO_SMALL,
         sluice_engine_step(engine, both, next, 2, logits, 2 * vocabulary - 1, codes));
  EXPECT(SLUICE_USAGE, sluice_engine_step(engine, both, next, 2, logits, 2 * vocabulary, NULL));
  EXPECT(SLUICE_USAGE, sluice_engine_step(engine, NULL, next, 2, NULL, 0, codes));
  EXPECT(SLUICE_USAGE, sluice_engine_step(engine, both, NULL, 2, NULL, 0, codes));
  sluice_session* twice[2] = {both[0], both[0]};
  EXPECT(SLUICE_USAGE, sluice_engine_step(engine, twice, next, 2, NULL, 0, codes));
  sluice_session* sibling = NULL;
  EXPECT(SLUICE_USAGE, sluice_session_sibling(both[0], NULL));
  EXPECT_OK(sluice_session_sibling(both[0], &sibling));
  sluice_session* fourth = NULL;
  EXPECT(SLUICE_MEMORY, sluice_session_fork(both[0], &fourth));  // planned for three
  CHECK(fourth == NULL);
  EXPECT_OK(sluice_session_free(sibling));
  EXPECT_OK(sluice_session_free(both[0]));
  EXPECT_OK(sluice_session_decode(both[1], next[1], NULL, 0));  // the fork goes on
  EXPECT_OK(sluice_session_free(both[1]));
  EXPECT_OK(sluice_engine_free(engine));
  free(logits);
}

typedef struct heard {
  char text[1024];
  size_t bytes;
  int calls;
  int most_calls;  // then it stops
  sluice_session* session;
} heard;

static int hear(void* user, const char* text, size_t bytes) {
  heard* all = user;
  CHECK(strlen(text) == bytes && all->bytes + bytes < sizeof all->text);
  memcpy(all->text + all->bytes, text, bytes + 1);
  all->bytes += bytes;
  // The session whose text this is can be looked at, but not changed.
  int64_t length = 0;
  if (all->session != NULL) {
    EXPECT_OK(sluice_session_length(all->session, &length));
    EXPECT(SLUICE_USAGE, sluice_generate(all->session, NULL, 0, NULL, NULL, 0, NULL));
  }
  return ++all->calls == all->most_calls;
}

static void test_generate(void) {
  sluice_engine* engine = open_engine();
  const tokens prompt = prompt_of(engine);
  int32_t expected[kAnswer];
  decode_greedily(engine, expected);

  sluice_session* session = open_session(engine);
  heard all = {.session = session};
  sluice_sampling sampling = {.size = sizeof sampling, .max_tokens = kAnswer};
  sluice_generate_options options = {.size = sizeof options,
                                     .sampling = &sampling,
                                     .ignore_eos = 1,
                                     .on_text = hear,
                                     .user = &all};
  int32_t answer[kAnswer];
  sluice_generate_result result = {.size = sizeof result};
  EXPECT_OK(sluice_generate(session, prompt.ids, prompt.count, &options, answer, kAnswer, &result));
  CHECK(memcmp(answer, expected, sizeof answer) == 0);
  CHECK(result.finish == SLUICE_MAX_TOKENS && result.answer_tokens == kAnswer);
  CHECK(result.pending == answer[kAnswer - 1]);
  char text[1024];
  EXPECT_OK(sluice_decode(engine, answer, kAnswer, 0, text, sizeof text, NULL));
  CHECK(strcmp(text, all.text) == 0);

  // Drafts change nothing but how many steps it takes; too many of them are refused.
  EXPECT_OK(sluice_session_truncate(session, 0));
  options.lookup_drafts = 4;
  EXPECT_OK(sluice_generate(session, prompt.ids, prompt.count, &options, answer, kAnswer, &result));
  CHECK(memcmp(answer, expected, sizeof answer) == 0);
  CHECK(result.accepted <= result.drafted);
  EXPECT_OK(sluice_session_truncate(session, 0));
  options.lookup_drafts = 64;
  EXPECT(SLUICE_USAGE,
         sluice_generate(session, prompt.ids, prompt.count, &options, NULL, 0, &result));
  options.lookup_drafts = 0;

  // Stopped by the callback, by a cancel, by a stop string.
  EXPECT_OK(sluice_session_truncate(session, 0));
  all = (heard){.most_calls = 2};
  EXPECT_OK(sluice_generate(session, prompt.ids, prompt.count, &options, NULL, 0, &result));
  CHECK(result.finish == SLUICE_INTERRUPTED && all.calls == 2);
  sluice_cancel* cancel = NULL;
  EXPECT_OK(sluice_cancel_create(&cancel));
  EXPECT_OK(sluice_cancel_set(cancel));
  EXPECT_OK(sluice_session_truncate(session, 0));
  options.cancel = cancel;
  EXPECT_OK(sluice_generate(session, prompt.ids, prompt.count, &options, NULL, 0, &result));
  CHECK(result.finish == SLUICE_INTERRUPTED && result.answer_tokens == 0);
  EXPECT_OK(sluice_cancel_free(cancel));
  EXPECT(SLUICE_USAGE,
         sluice_generate(session, prompt.ids, prompt.count, &options, NULL, 0, &result));
  options.cancel = NULL;
  EXPECT_OK(sluice_session_truncate(session, 0));
  const char* const stop[] = {" "};
  sampling.stop = stop;
  sampling.stop_count = 1;
  EXPECT_OK(sluice_generate(session, prompt.ids, prompt.count, &options, NULL, 0, &result));
  CHECK(result.finish == SLUICE_STOP_STRING);
  sampling.stop = NULL;
  EXPECT(SLUICE_USAGE, sluice_generate(session, prompt.ids, 1, &options, NULL, 0, NULL));
  sampling.stop_count = 0;

  EXPECT(SLUICE_USAGE, sluice_generate(session, prompt.ids, 1, NULL, NULL, 0, NULL));
  EXPECT(SLUICE_PROMPT, sluice_generate(session, prompt.ids, 0, &options, NULL, 0, NULL));
  EXPECT(SLUICE_TOO_SMALL, sluice_generate(session, prompt.ids, 1, &options, answer, 2, NULL));
  sampling.temperature = NAN;
  EXPECT(SLUICE_USAGE, sluice_generate(session, prompt.ids, 1, &options, NULL, 0, NULL));
  sampling.temperature = 0.0;
  sampling.max_tokens = -3;
  EXPECT(SLUICE_USAGE, sluice_generate(session, prompt.ids, 1, &options, NULL, 0, NULL));
  sampling.max_tokens = 4096;
  EXPECT(SLUICE_PROMPT, sluice_generate(session, prompt.ids, 1, &options, NULL, 0, NULL));
  sampling.size = 1;
  EXPECT(SLUICE_USAGE, sluice_generate(session, prompt.ids, 1, &options, NULL, 0, NULL));
  options.sampling = NULL;
  EXPECT(SLUICE_USAGE, sluice_generate(session, prompt.ids, 1, &options, NULL, 0, NULL));
  EXPECT_OK(sluice_session_free(session));
  EXPECT_OK(sluice_engine_free(engine));
}

static sluice_batcher* open_batcher(sluice_engine* engine) {
  const sluice_batcher_options options = {.size = sizeof options, .context = 512, .running = 4};
  sluice_batcher* batcher = NULL;
  EXPECT_OK(sluice_batcher_open(engine, &options, &batcher));
  return batcher;
}

// Reads a stream to its end; returns the number of its tokens.
static size_t read_all(sluice_stream* stream, int32_t* answer, sluice_finish* finish) {
  size_t count = 0;
  sluice_piece piece = {.size = sizeof piece};
  for (;;) {
    EXPECT_OK(sluice_stream_next(stream, -1, &piece));
    if (piece.state == SLUICE_ENDED) return count;
    CHECK(piece.state == SLUICE_PIECE && strlen(piece.text) == piece.text_bytes);
    for (size_t i = 0; i < piece.token_count; ++i) {
      CHECK(piece.logprobs == NULL || piece.logprobs[i] <= 0.0F);
      if (answer != NULL) answer[count] = piece.tokens[i];
      ++count;
    }
    if (piece.finish != SLUICE_NOT_FINISHED) *finish = piece.finish;
  }
}

// The text of an answer to the prompt under a constraint.
static void constrained_text(sluice_session* session, tokens prompt, sluice_constraint* constraint,
                             char* text, size_t capacity) {
  heard all = {.bytes = 0};
  sluice_sampling sampling = {.size = sizeof sampling, .max_tokens = 64};
  sluice_generate_options options = {.size = sizeof options,
                                     .sampling = &sampling,
                                     .on_text = hear,
                                     .user = &all,
                                     .constraint = constraint};
  sluice_generate_result result = {.size = sizeof result};
  EXPECT_OK(sluice_session_truncate(session, 0));
  EXPECT_OK(sluice_generate(session, prompt.ids, prompt.count, &options, NULL, 0, &result));
  CHECK(result.finish == SLUICE_END_OF_TEXT && all.bytes < capacity);
  memcpy(text, all.text, all.bytes + 1);
}

static sluice_constraint* compiled(sluice_engine* engine, sluice_constraint_kind kind,
                                   const char* text) {
  sluice_constraint* constraint = NULL;
  EXPECT_OK(sluice_constraint_create(engine, kind, text, strlen(text), &constraint));
  return constraint;
}

static void test_constraint(void) {
  sluice_engine* engine = open_engine();
  const tokens prompt = prompt_of(engine);
  sluice_session* session = open_session(engine);
  static const struct {
    sluice_constraint_kind kind;
    const char* text;
    const char* answer;
  } cases[] = {
      {SLUICE_REGEX, "(war|peace) and (war|peace)", " and "},
      {SLUICE_JSON_SCHEMA, "{\"enum\": [\"war\", \"peace\"]}", "\""},
      {SLUICE_GRAMMAR, "root ::= \"a\" [xyz] \"b\"", "a"},
  };
  char text[1024];
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    sluice_constraint* constraint = compiled(engine, cases[i].kind, cases[i].text);
    constrained_text(session, prompt, constraint, text, sizeof text);
    CHECK(strstr(text, cases[i].answer) != NULL);
    EXPECT_OK(sluice_constraint_free(constraint));
    EXPECT(SLUICE_USAGE, sluice_constraint_free(constraint));
  }

  // The same through the batcher, which keeps a constraint whose handle was freed.
  sluice_constraint* constraint = compiled(engine, SLUICE_REGEX, "[0-9]{3}");
  sluice_sampling sampling = {.size = sizeof sampling, .max_tokens = 16};
  sluice_request request = {.size = sizeof request,
                            .prompt = prompt.ids,
                            .prompt_count = prompt.count,
                            .sampling = &sampling,
                            .constraint = constraint};
  sluice_batcher* batcher = open_batcher(engine);
  sluice_stream* stream = NULL;
  EXPECT_OK(sluice_batcher_submit(batcher, &request, &stream));
  EXPECT_OK(sluice_constraint_free(constraint));
  int32_t answer[16];
  sluice_finish finish = SLUICE_NOT_FINISHED;
  const size_t count = read_all(stream, answer, &finish);
  EXPECT_OK(sluice_decode(engine, answer, count, 0, text, sizeof text, NULL));
  CHECK(finish == SLUICE_END_OF_TEXT && strlen(text) == 3 && strspn(text, "0123456789") == 3);
  EXPECT_OK(sluice_stream_free(stream));
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, &request, &stream));  // freed
  EXPECT_OK(sluice_batcher_free(batcher));

  // Refused: what is none, and one of another engine.
  constraint = NULL;
  const char* const regex = "(";
  EXPECT(SLUICE_USAGE, sluice_constraint_create(engine, SLUICE_REGEX, regex, 1, &constraint));
  EXPECT(SLUICE_USAGE, sluice_constraint_create(engine, SLUICE_REGEX, NULL, 1, &constraint));
  EXPECT(SLUICE_USAGE, sluice_constraint_create(engine, SLUICE_REGEX, regex, 1, NULL));
  EXPECT(SLUICE_USAGE, sluice_constraint_create(engine, SLUICE_JSON_OBJECT, regex, 1, &constraint));
  EXPECT(SLUICE_USAGE, sluice_constraint_create(engine, 17, regex, 1, &constraint));
  EXPECT(SLUICE_USAGE, sluice_constraint_create(NULL, SLUICE_REGEX, regex, 1, &constraint));
  CHECK(constraint == NULL);
  sluice_engine* other = open_engine();
  constraint = compiled(other, SLUICE_JSON_OBJECT, "");
  sluice_generate_options options = {
      .size = sizeof options, .sampling = &sampling, .constraint = constraint};
  EXPECT(SLUICE_USAGE, sluice_generate(session, prompt.ids, 1, &options, NULL, 0, NULL));
  EXPECT_OK(sluice_constraint_free(constraint));
  EXPECT_OK(sluice_engine_free(other));
  EXPECT_OK(sluice_session_free(session));
  EXPECT_OK(sluice_engine_free(engine));
}

// A thread that sets a cancel once the prompt is under way.
typedef struct canceller {
  sluice_cancel* cancel;
  double seconds;
} canceller;

static double seconds_now(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void* cancel_later(void* user) {
  const canceller* all = user;
  const double end = seconds_now() + all->seconds;
  while (seconds_now() < end) {
  }
  EXPECT_OK(sluice_cancel_set(all->cancel));
  return NULL;
}

// A cancel ends a prompt within its only step, which leaves nothing behind.
static void test_cancel(void) {
  enum { kCount = 3000 };
  const sluice_engine_options engine_options = {
      .size = sizeof engine_options, .model = model, .threads = 1, .chunk = kCount};
  sluice_engine* engine = NULL;
  EXPECT_OK(sluice_engine_open(&engine_options, &engine));
  const sluice_session_options session_options = {.size = sizeof session_options,
                                                  .context = kCount};
  sluice_session* session = NULL;
  EXPECT_OK(sluice_session_open(engine, &session_options, &session));
  int32_t* prompt = memory_for(kCount, sizeof *prompt);
  for (int i = 0; i < kCount; ++i) prompt[i] = i;
  sluice_cancel* cancel = NULL;
  EXPECT_OK(sluice_cancel_create(&cancel));

  const double begin = seconds_now();
  EXPECT_OK(sluice_session_prefill(session, prompt, kCount, NULL, NULL, cancel, NULL, 0));
  const double whole = seconds_now() - begin;
  EXPECT_OK(sluice_session_truncate(session, 0));
  canceller later = {.cancel = cancel, .seconds = whole / 8};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, cancel_later, &later) == 0);
  const double again = seconds_now();
  EXPECT(SLUICE_STOPPED,
         sluice_session_prefill(session, prompt, kCount, NULL, NULL, cancel, NULL, 0));
  CHECK(seconds_now() - again < 0.8 * whole);
  CHECK(pthread_join(thread, NULL) == 0);
  int64_t length = -1;
  EXPECT_OK(sluice_session_length(session, &length));
  CHECK(length == 0);
  EXPECT_OK(sluice_cancel_free(cancel));
  EXPECT(SLUICE_USAGE, sluice_session_prefill(session, prompt, 1, NULL, NULL, cancel, NULL, 0));
  EXPECT_OK(sluice_session_prefill(session, prompt, 8, NULL, NULL, NULL, NULL, 0));
  free(prompt);
  EXPECT_OK(sluice_session_free(session));
  EXPECT_OK(sluice_engine_free(engine));
}

static void test_batcher(void) {
  sluice_engine* engine = open_engine();
  const tokens prompt = prompt_of(engine);
  int32_t expected[kAnswer];
  decode_greedily(engine, expected);
  sluice_batcher* batcher = open_batcher(engine);
  sluice_sampling sampling = {.size = sizeof sampling, .max_tokens = kAnswer};
  sluice_request request = {.size = sizeof request,
                            .prompt = prompt.ids,
                            .prompt_count = prompt.count,
                            .sampling = &sampling,
                            .ignore_eos = 1,
                            .logprobs = 1};
  enum { kStreams = 3 };
  sluice_stream* streams[kStreams];
  for (int i = 0; i < kStreams; ++i) {
    EXPECT_OK(sluice_batcher_submit(batcher, &request, &streams[i]));
  }
  for (int i = 0; i < kStreams; ++i) {
    int32_t answer[kAnswer];
    sluice_finish finish = SLUICE_NOT_FINISHED;
    CHECK(read_all(streams[i], answer, &finish) == kAnswer);
    CHECK(finish == SLUICE_MAX_TOKENS && memcmp(answer, expected, sizeof answer) == 0);
    sluice_usage usage = {.size = sizeof usage};
    EXPECT_OK(sluice_stream_usage(streams[i], &usage));
    CHECK(usage.answer_tokens == kAnswer && usage.prompt_tokens == (int64_t)prompt.count);
    EXPECT_OK(sluice_stream_free(streams[i]));
  }
  sluice_batcher_stats stats = {.size = sizeof stats};
  EXPECT_OK(sluice_batcher_stats_read(batcher, &stats));
  CHECK(stats.submitted == kStreams && stats.answer_tokens == (uint64_t)kStreams * kAnswer);

  // Cancelled.
  sampling.max_tokens = 400;
  sluice_stream* stream = NULL;
  EXPECT_OK(sluice_batcher_submit(batcher, &request, &stream));
  EXPECT_OK(sluice_stream_cancel(stream));
  sluice_finish finish = SLUICE_NOT_FINISHED;
  read_all(stream, NULL, &finish);
  CHECK(finish == SLUICE_INTERRUPTED);
  sluice_piece piece = {.size = 3};
  EXPECT(SLUICE_USAGE, sluice_stream_next(stream, -1, &piece));
  EXPECT(SLUICE_USAGE, sluice_stream_next(stream, -1, NULL));
  piece.size = sizeof piece;
  EXPECT(SLUICE_USAGE, sluice_stream_next(stream, -2, &piece));
  EXPECT(SLUICE_USAGE, sluice_stream_next(stream, INT64_MAX, &piece));
  EXPECT(SLUICE_USAGE, sluice_stream_usage(stream, NULL));
  EXPECT_OK(sluice_stream_free(stream));
  EXPECT(SLUICE_USAGE, sluice_stream_next(stream, 0, &piece));
  // A deadline.
  request.timeout_ms = 1;
  EXPECT_OK(sluice_batcher_submit(batcher, &request, &stream));
  read_all(stream, NULL, &finish);
  CHECK(finish == SLUICE_DEADLINE);
  EXPECT_OK(sluice_stream_free(stream));
  request.timeout_ms = -1;
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, &request, &stream));
  request.timeout_ms = 0;

  sampling.max_tokens = 100000;
  EXPECT(SLUICE_PROMPT, sluice_batcher_submit(batcher, &request, &stream));
  sampling.max_tokens = kAnswer;
  request.choices = -1;
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, &request, &stream));
  request.choices = 0;
  request.policy = "values";  // not the batcher's
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, &request, &stream));
  request.policy = NULL;
  const sluice_bias bias = {.token = -5, .bias = 1.0};
  request.bias = &bias;
  request.bias_count = 1;
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, &request, &stream));
  request.bias = NULL;
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, &request, &stream));
  request.bias_count = 0;
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, &request, NULL));
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, NULL, &stream));
  request.prompt_count = 0;
  EXPECT(SLUICE_PROMPT, sluice_batcher_submit(batcher, &request, &stream));
  EXPECT(SLUICE_USAGE, sluice_batcher_drain(batcher, -1));
  EXPECT_OK(sluice_batcher_drain(batcher, 1000));
  request.prompt_count = prompt.count;
  EXPECT(SLUICE_MEMORY, sluice_batcher_submit(batcher, &request, &stream));
  EXPECT_OK(sluice_batcher_free(batcher));
  EXPECT(SLUICE_USAGE, sluice_batcher_submit(batcher, &request, &stream));

  sluice_batcher_options bad = {.size = sizeof bad, .context = 0};
  EXPECT(SLUICE_USAGE, sluice_batcher_open(engine, &bad, &batcher));
  bad.context = 512;
  bad.queued = -1;
  EXPECT(SLUICE_USAGE, sluice_batcher_open(engine, &bad, &batcher));
  bad.queued = 0;
  bad.running = -4;
  EXPECT(SLUICE_USAGE, sluice_batcher_open(engine, &bad, &batcher));
  EXPECT(SLUICE_USAGE, sluice_batcher_open(engine, NULL, &batcher));
  EXPECT(SLUICE_USAGE, sluice_batcher_open(engine, &bad, NULL));
  EXPECT_OK(sluice_engine_free(engine));
}

typedef struct only {
  int32_t token;
  size_t most;  // tokens, then the mask refuses
} only;

static int allow_only(void* user, const int32_t* answer, size_t count, float* logits,
                      size_t vocabulary) {
  const only* chosen = user;
  for (size_t i = 0; i < count; ++i) CHECK(answer[i] == chosen->token);
  for (size_t i = 0; i < vocabulary; ++i) {
    if (i != (size_t)chosen->token) logits[i] = -INFINITY;
  }
  return count == chosen->most;
}

static void test_mask(void) {
  sluice_engine* engine = open_engine();
  const tokens prompt = prompt_of(engine);
  sluice_batcher* batcher = open_batcher(engine);
  const sluice_sampling sampling = {.size = sizeof sampling, .max_tokens = 5};
  only chosen = {.token = prompt.ids[2], .most = SIZE_MAX};
  const sluice_request request = {.size = sizeof request,
                                  .prompt = prompt.ids,
                                  .prompt_count = prompt.count,
                                  .sampling = &sampling,
                                  .mask = allow_only,
                                  .mask_user = &chosen};
  sluice_stream* stream = NULL;
  int32_t answer[5];
  sluice_finish finish = SLUICE_NOT_FINISHED;
  EXPECT_OK(sluice_batcher_submit(batcher, &request, &stream));
  CHECK(read_all(stream, answer, &finish) == 5);
  for (int i = 0; i < 5; ++i) CHECK(answer[i] == chosen.token);
  EXPECT_OK(sluice_stream_free(stream));

  chosen.most = 2;
  EXPECT_OK(sluice_batcher_submit(batcher, &request, &stream));
  sluice_piece piece = {.size = sizeof piece};
  sluice_code code = SLUICE_OK;
  while (code == SLUICE_OK && piece.state != SLUICE_ENDED) {
    code = sluice_stream_next(stream, -1, &piece);
  }
  CHECK(code == SLUICE_USAGE && strstr(sluice_message(), "mask") != NULL);
  EXPECT_OK(sluice_stream_free(stream));
  EXPECT_OK(sluice_batcher_free(batcher));
  EXPECT_OK(sluice_engine_free(engine));
}

// Freed from the ground up: what is left keeps what it needs.
static void test_order(void) {
  sluice_engine* engine = open_engine();
  const tokens prompt = prompt_of(engine);
  sluice_session* session = open_session(engine);
  sluice_batcher* batcher = open_batcher(engine);
  const sluice_sampling sampling = {.size = sizeof sampling, .max_tokens = 300};
  const sluice_request request = {.size = sizeof request,
                                  .prompt = prompt.ids,
                                  .prompt_count = prompt.count,
                                  .sampling = &sampling,
                                  .ignore_eos = 1};
  sluice_stream* stream = NULL;
  EXPECT_OK(sluice_batcher_submit(batcher, &request, &stream));
  EXPECT_OK(sluice_engine_free(engine));
  EXPECT_OK(sluice_session_prefill(session, prompt.ids, prompt.count, NULL, NULL, NULL, NULL, 0));
  EXPECT_OK(sluice_batcher_free(batcher));
  sluice_piece piece = {.size = sizeof piece};
  sluice_code code = SLUICE_OK;
  while (code == SLUICE_OK && piece.state != SLUICE_ENDED) {
    code = sluice_stream_next(stream, 10000, &piece);
    CHECK(code != SLUICE_OK || piece.state != SLUICE_NO_PIECE);
  }
  EXPECT_OK(sluice_stream_free(stream));
  EXPECT_OK(sluice_session_free(session));
}

typedef struct waiting {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  bool is_inside;
  bool may_go_on;
  sluice_session* session;
  tokens prompt;
} waiting;

static int wait_inside(void* user, int64_t done, int64_t total) {
  (void)done;
  (void)total;
  waiting* all = user;
  pthread_mutex_lock(&all->mutex);
  all->is_inside = true;
  pthread_cond_broadcast(&all->changed);
  while (!all->may_go_on) pthread_cond_wait(&all->changed, &all->mutex);
  pthread_mutex_unlock(&all->mutex);
  return 0;
}

static void* prefill_slowly(void* user) {
  waiting* all = user;
  EXPECT_OK(sluice_session_prefill(all->session, all->prompt.ids, all->prompt.count, wait_inside,
                                   all, NULL, NULL, 0));
  return NULL;
}

static void test_threads(void) {
  sluice_engine* engine = open_engine();
  waiting all = {.mutex = PTHREAD_MUTEX_INITIALIZER,
                 .changed = PTHREAD_COND_INITIALIZER,
                 .session = open_session(engine),
                 .prompt = prompt_of(engine)};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, prefill_slowly, &all) == 0);
  pthread_mutex_lock(&all.mutex);
  while (!all.is_inside) pthread_cond_wait(&all.changed, &all.mutex);
  pthread_mutex_unlock(&all.mutex);
  int64_t length = 0;
  EXPECT(SLUICE_USAGE, sluice_session_length(all.session, &length));
  EXPECT(SLUICE_USAGE, sluice_session_truncate(all.session, 0));
  // The running call ends well, though its handle and the engine's are freed under it.
  EXPECT_OK(sluice_session_free(all.session));
  EXPECT_OK(sluice_engine_free(engine));
  pthread_mutex_lock(&all.mutex);
  all.may_go_on = true;
  pthread_cond_broadcast(&all.changed);
  pthread_mutex_unlock(&all.mutex);
  CHECK(pthread_join(thread, NULL) == 0);
}

typedef struct subject {
  const char* name;
  void (*run)(void);
} subject;

int main(int argc, char** argv) {
  const subject subjects[] = {{"handles", test_handles},
                              {"structs", test_structs},
                              {"recompute", test_recompute},
                              {"buffers", test_buffers},
                              {"text", test_text},
                              {"sessions", test_sessions},
                              {"steps", test_steps},
                              {"generate", test_generate},
                              {"constraint", test_constraint},
                              {"cancel", test_cancel},
                              {"batcher", test_batcher},
                              {"mask", test_mask},
                              {"order", test_order},
                              {"threads", test_threads},
                              {"kv_cache", test_kv_cache},
                              {"kv_misuse", test_kv_misuse},
                              {"chat", test_chat},
                              {"saved_sessions", test_saved_sessions}};
  if (argc != 3) return 2;
  model = argv[1];
  for (size_t i = 0; i < sizeof subjects / sizeof subjects[0]; ++i) {
    if (strcmp(argv[2], subjects[i].name) != 0) continue;
    subjects[i].run();
    return 0;
  }
  fprintf(stderr, "no subject %s\n", argv[2]);
  return 2;
}
