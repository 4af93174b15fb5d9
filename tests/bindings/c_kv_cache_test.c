// KvCache through the C interface, against attention in double precision, and misused.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "c_test.h"

enum { kLayers = 2, kQueryHeads = 4, kKvHeads = 2, kHeadDim = 64, kPrompt = 200, kDecoded = 3 };
enum { kTokens = kPrompt + kDecoded };

static float keys[kLayers][kTokens][kKvHeads][kHeadDim];
static float values[kLayers][kTokens][kKvHeads][kHeadDim];
static float queries[kLayers][kTokens][kQueryHeads][kHeadDim];

// A fixed sequence of numbers in -1 to 1.
static float next_number(void) {
  static uint32_t state = 41;
  state = state * 1664525U + 1013904223U;
  return (float)(state >> 8) / (float)(1 << 23) - 1.0F;
}

static void fill(float* numbers, size_t count) {
  for (size_t i = 0; i < count; ++i) numbers[i] = next_number();
}

static sluice_array array_of(float* data, size_t floats) {
  const sluice_array array = {
      .size = sizeof array, .data = data, .bytes = floats * sizeof(float), .dtype = SLUICE_F32};
  return array;
}

static sluice_kv_options options_of(void) {
  const sluice_kv_options options = {.size = sizeof options,
                                     .layers = kLayers,
                                     .query_heads = kQueryHeads,
                                     .kv_heads = kKvHeads,
                                     .head_dim = kHeadDim,
                                     .rows = SLUICE_F32,
                                     .context = 512,
                                     .sequences = 2};
  return options;
}

// Attention of one query to the tokens up to its own.
static void attend_plainly(int layer, int token, int head, double* out, double* lse) {
  static double weights[kTokens];
  double most = -INFINITY;
  double sum = 0.0;
  const int kv = head / (kQueryHeads / kKvHeads);
  for (int t = 0; t <= token; ++t) {
    double dot = 0.0;
    for (int d = 0; d < kHeadDim; ++d) {
      dot += (double)queries[layer][token][head][d] * (double)keys[layer][t][kv][d];
    }
    weights[t] = dot / sqrt((double)kHeadDim);
    most = fmax(most, weights[t]);
  }
  memset(out, 0, kHeadDim * sizeof *out);
  for (int t = 0; t <= token; ++t) {
    const double weight = exp(weights[t] - most);
    sum += weight;
    for (int d = 0; d < kHeadDim; ++d) out[d] += weight * (double)values[layer][t][kv][d];
  }
  for (int d = 0; d < kHeadDim; ++d) out[d] /= sum;
  *lse = most + log(sum);
}

// Appends tokens [first, first + count) and holds the answers to plain attention.
static void run_step(sluice_kv_sequence* sequence, sluice_phase phase, int first, int count) {
  sluice_kv_step* step = NULL;
  EXPECT_OK(sluice_kv_step_begin(sequence, phase, count, &step));
  const size_t rows = (size_t)count * kQueryHeads;
  float* out = memory_for(rows * kHeadDim, sizeof *out);
  float* lse = memory_for(rows, sizeof *lse);
  for (int layer = 0; layer < kLayers; ++layer) {
    const size_t kv_floats = (size_t)count * kKvHeads * kHeadDim;
    sluice_array k = array_of(&keys[layer][first][0][0], kv_floats);
    sluice_array v = array_of(&values[layer][first][0][0], kv_floats);
    sluice_array q = array_of(&queries[layer][first][0][0], rows * kHeadDim);
    sluice_array o = array_of(out, rows * kHeadDim);
    EXPECT_OK(sluice_kv_step_append(step, layer, &k, &v));
    EXPECT_OK(sluice_kv_step_attend(step, layer, &q, &o, lse, rows));
    for (int i = 0; i < count; ++i) {
      for (int head = 0; head < kQueryHeads; ++head) {
        double exact[kHeadDim];
        double exact_lse = 0.0;
        attend_plainly(layer, first + i, head, exact, &exact_lse);
        const int row = i * kQueryHeads + head;
        // fp32 sums of at most 203 products of numbers up to 1.
        CHECK(fabs((double)lse[row] - exact_lse) < 1e-4);
        for (int d = 0; d < kHeadDim; ++d) {
          CHECK(fabs((double)out[row * kHeadDim + d] - exact[d]) < 1e-4);
        }
      }
    }
  }
  EXPECT_OK(sluice_kv_step_end(step));
  EXPECT_OK(sluice_kv_step_free(step));
  free(out);
  free(lse);
}

static void fill_all(void) {
  fill(&keys[0][0][0][0], sizeof keys / sizeof(float));
  fill(&values[0][0][0][0], sizeof values / sizeof(float));
  fill(&queries[0][0][0][0], sizeof queries / sizeof(float));
}

void test_kv_cache(void) {
  fill_all();
  sluice_kv_options options = options_of();
  sluice_kv_cache* cache = NULL;
  sluice_kv_sequence* sequence = NULL;
  EXPECT_OK(sluice_kv_cache_open(&options, &cache));
  EXPECT_OK(sluice_kv_sequence_open(cache, &sequence));
  // The sequence keeps what it needs.
  EXPECT_OK(sluice_kv_cache_free(cache));
  run_step(sequence, SLUICE_PREFILL, 0, kPrompt);

  sluice_kv_sequence* fork = NULL;
  EXPECT_OK(sluice_kv_sequence_fork(sequence, &fork));
  for (int i = 0; i < kDecoded; ++i) run_step(sequence, SLUICE_DECODE, kPrompt + i, 1);
  // A fork has the prompt alone, and a truncated sequence goes on from there.
  int64_t length = 0;
  EXPECT_OK(sluice_kv_sequence_length(fork, &length));
  CHECK(length == kPrompt);
  run_step(fork, SLUICE_DECODE, kPrompt, 1);
  EXPECT_OK(sluice_kv_sequence_truncate(sequence, kPrompt));
  run_step(sequence, SLUICE_DECODE, kPrompt, 1);

  size_t bytes = 0;
  EXPECT(SLUICE_TOO_SMALL, sluice_kv_sequence_ledger_json(sequence, NULL, 0, &bytes));
  char* json = memory_for(bytes + 1, 1);
  EXPECT_OK(sluice_kv_sequence_ledger_json(sequence, json, bytes + 1, &bytes));
  CHECK(strlen(json) == bytes && json[0] == '{');
  free(json);
  EXPECT_OK(sluice_kv_sequence_free(sequence));
  EXPECT_OK(sluice_kv_sequence_free(fork));
}

// A policy that keeps half of the components, with a basis from made-up weights.
static void test_value_basis(void) {
  sluice_kv_cache* cache = NULL;
  sluice_kv_options options = options_of();
  const size_t weights_count = (size_t)(kHeadDim * 3 * kHeadDim);
  const size_t of_head = (size_t)(kHeadDim / 2 * kHeadDim);
  const size_t heads = (size_t)(kLayers * kKvHeads);
  float* weights = memory_for(weights_count, sizeof(float));
  float* basis = memory_for(heads * of_head, sizeof(float));
  for (size_t head = 0; head < heads; ++head) {
    fill(weights, weights_count);
    EXPECT_OK(sluice_value_basis(weights, weights_count * sizeof(float), SLUICE_F32, kHeadDim,
                                 basis + head * of_head, of_head));
  }
  EXPECT(SLUICE_USAGE, sluice_value_basis(NULL, 64, SLUICE_F32, kHeadDim, basis, of_head));
  EXPECT(SLUICE_USAGE, sluice_value_basis(weights, 3, SLUICE_F32, kHeadDim, basis, of_head));
  EXPECT(SLUICE_USAGE, sluice_value_basis(weights, weights_count * sizeof(float), SLUICE_F32,
                                          kHeadDim, basis, of_head - 1));
  const char* policy = "compact";
  options.policies = &policy;
  options.policy_count = 1;
  EXPECT(SLUICE_UNSUPPORTED, sluice_kv_cache_open(&options, &cache));
  options.value_basis = basis;
  options.value_basis_count = heads * of_head;
  EXPECT_OK(sluice_kv_cache_open(&options, &cache));
  EXPECT_OK(sluice_kv_cache_free(cache));
  options.value_basis_count -= 1;
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(&options, &cache));
  options.value_basis = NULL;
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(&options, &cache));
  free(weights);
  free(basis);
}

static void expect_bad_options(void) {
  sluice_kv_cache* cache = NULL;
  sluice_kv_options options = options_of();
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(NULL, &cache));
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(&options, NULL));
  options.rows = (sluice_dtype)9;
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(&options, &cache));
  options = options_of();
  options.kv_heads = 0;
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(&options, &cache));
  options = options_of();
  options.context = -1;
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(&options, &cache));
  options = options_of();
  options.device = "tpu";
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(&options, &cache));
  options = options_of();
  options.device_memory = 1;
  EXPECT(SLUICE_MEMORY, sluice_kv_cache_open(&options, &cache));
  options = options_of();
  options.policy_count = 1;
  EXPECT(SLUICE_USAGE, sluice_kv_cache_open(&options, &cache));
  CHECK(cache == NULL);
}

static void expect_bad_arrays(sluice_kv_step* step) {
  sluice_array k = array_of(&keys[0][0][0][0], (size_t)kPrompt * kKvHeads * kHeadDim);
  sluice_array bad = k;
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, NULL, &k));
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, &k, NULL));
  bad.data = NULL;
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, &bad, &k));
  bad = k;
  bad.bytes -= 1;
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, &bad, &k));
  bad = k;
  bad.size = 8;
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, &bad, &k));
  bad = k;
  bad.dtype = (sluice_dtype)7;
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, &bad, &k));
  bad = k;
  bad.data = (char*)k.data + 1;
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, &bad, &k));
  bad = k;
  bad.token_stride = INT64_MAX;
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, &bad, &k));
  bad = k;
  bad.head_stride = -kHeadDim;
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, 0, &bad, &k));
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, kLayers, &k, &k));
  EXPECT(SLUICE_USAGE, sluice_kv_step_append(step, -1, &k, &k));
  EXPECT(SLUICE_USAGE, sluice_kv_step_attend(step, 0, &k, &k, NULL, 0));  // too few heads
}

void test_kv_misuse(void) {
  fill_all();
  test_value_basis();
  expect_bad_options();
  sluice_kv_options options = options_of();
  sluice_kv_cache* cache = NULL;
  sluice_kv_sequence* sequence = NULL;
  sluice_kv_step* step = NULL;
  EXPECT_OK(sluice_kv_cache_open(&options, &cache));
  EXPECT(SLUICE_USAGE, sluice_kv_sequence_open(cache, NULL));
  EXPECT_OK(sluice_kv_sequence_open(cache, &sequence));
  EXPECT(SLUICE_USAGE, sluice_kv_step_begin(sequence, (sluice_phase)9, 1, &step));
  EXPECT(SLUICE_USAGE, sluice_kv_step_begin(sequence, SLUICE_PREFILL, 0, &step));
  EXPECT(SLUICE_USAGE, sluice_kv_step_begin(sequence, SLUICE_PREFILL, kPrompt, NULL));
  EXPECT(SLUICE_USAGE, sluice_kv_step_begin_batch(cache, NULL, 1, &step));
  EXPECT(SLUICE_USAGE, sluice_kv_step_begin_batch(cache, NULL, 0, &step));
  EXPECT(SLUICE_USAGE, sluice_kv_sequence_truncate(sequence, 1));
  EXPECT(SLUICE_USAGE, sluice_kv_sequence_use(sequence, "values"));
  EXPECT(SLUICE_USAGE, sluice_kv_sequence_use(sequence, NULL));
  CHECK(step == NULL);

  EXPECT_OK(sluice_kv_step_begin(sequence, SLUICE_PREFILL, kPrompt, &step));
  expect_bad_arrays(step);
  EXPECT(SLUICE_USAGE, sluice_kv_step_end(step));  // layers without rows
  sluice_array k = array_of(&keys[0][0][0][0], (size_t)kPrompt * kKvHeads * kHeadDim);
  keys[0][0][0][0] = NAN;
  EXPECT(SLUICE_NUMERIC, sluice_kv_step_append(step, 0, &k, &k));
  // Freed before its end, and in the wrong order.
  EXPECT_OK(sluice_kv_sequence_free(sequence));
  EXPECT_OK(sluice_kv_step_free(step));
  EXPECT(SLUICE_USAGE, sluice_kv_step_end(step));

  // The step's failure left the cache usable.
  fill_all();
  EXPECT_OK(sluice_kv_sequence_open(cache, &sequence));
  run_step(sequence, SLUICE_PREFILL, 0, kPrompt);
  EXPECT_OK(sluice_kv_sequence_reset(sequence));
  run_step(sequence, SLUICE_PREFILL, 0, kPrompt);
  EXPECT_OK(sluice_kv_sequence_free(sequence));
  EXPECT_OK(sluice_kv_cache_free(cache));
}
