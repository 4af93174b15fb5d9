// One block draws a row's token, in a few passes over the logits, which lie in the L2 cache. The
// ends of top-k and top-p are found by bisection among the heaviest logits, which fit the threads'
// registers, or among all if those are too few. The drawn token is the remaining one with the
// largest sum of logit / temperature and noise (lib/gumbel.h).
#include <algorithm>
#include <cfloat>
#include <climits>

#include "kernels/dense/dense.h"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "lib/check.h"
#include "lib/gumbel.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kOwn = 8;  // heaviest logits per thread
constexpr int kListed = kOwn * kThreads;
constexpr int kBins = 4096;  // bins of grades, by their upper bits
constexpr int kBinShift = 20;
constexpr int kUnroll = 8;

// Sampling parameters of a row, from TokenDraw.
struct SampleRule {
  double temperature;  // 0: greedy
  float sharpness;     // 1 / temperature
  int top_k;           // 0: all
  float top_p;
  float min_p;
  std::uint64_t seed;
  std::uint64_t position;
};

struct SampleBatch {
  const float* logits;  // [rows, count], `stride` floats from row to row
  std::int64_t stride;
  int count;
  SampledToken* results;  // [rows], reported
  SampleRule rules[kSampleRows];
};

// The work of one block.
struct SampleCall {
  const float* logits;  // [count]
  int count;
  SampleRule rule;
};

struct Shared {
  union {
    std::uint32_t bins[kBins];
    std::uint32_t listed[kListed];
  };
  std::uint32_t part[kWarp];
  float sums[kWarps];
  double scores[kWarps];
  int ids[kWarps];
  int bad;
  int found;
  std::uint32_t edge;
  std::uint32_t listed_count;
};

// Grades: integers in the order of their logits.
__device__ __forceinline__ std::uint32_t grade_of(float logit) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 and 0 are one
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(std::uint32_t grade) {
  return __uint_as_float((grade & 0x80000000u) != 0 ? grade & 0x7fffffffu : ~grade);
}

// A set of the most likely tokens, given by its last one.
struct Cut {
  std::uint32_t grade;
  int id;

  __device__ __forceinline__ bool has(std::uint32_t other, int at) const {
    return other > grade || (other == grade && at <= id);
  }
};

struct Weights {
  float most;
  float sharpness;

  // 0 for the most likely token, at most 0 for others.
  __device__ __forceinline__ float scaled(float logit) const {
    return fmaxf(logit - most, -FLT_MAX) * sharpness;
  }
  // Weight relative to the most likely token, which has 1.
  __device__ __forceinline__ float operator()(float logit) const {
    return exp2_fast(scaled(logit) * kLog2E);
  }
};

// Calls body(id, logit) for this thread's tokens.
template <typename Body>
__device__ __forceinline__ void for_tokens(const SampleCall& call, const Body& body) {
#pragma unroll kUnroll
  for (int i = static_cast<int>(threadIdx.x); i < call.count; i += kThreads) {
    body(i, call.logits[i]);
  }
}

// Sum over the block; all threads call it, and every one gets the sum.
__device__ float block_total(float x, Shared* shared) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared->sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  return warp_sum(shared->sums[threadIdx.x % kWarp]);
}

// The sum of measure(id, logit) over all tokens.
template <typename Measure>
__device__ float total(const SampleCall& call, Shared* shared, const Measure& measure) {
  float sum = 0.0f;
  for_tokens(call, [&](int i, float logit) { sum += measure(i, logit); });
  return block_total(sum, shared);
}

// The id of the n-th token of grade `grade` in `cut`, counted from 1 in the order of ids; the last
// one if there are fewer, -1 if there is none. Every warp takes a run of ids.
__device__ int find_equal(const SampleCall& call, std::uint32_t grade, const Cut& cut,
                          std::uint32_t n, Shared* shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int run = (call.count + kThreads - 1) / kThreads * kWarp;
  const int first = warp * run;
  const int last = min(call.count, first + run);
  const auto is_equal = [&](int i) {
    return i < last && grade_of(call.logits[i]) == grade && cut.has(grade, i);
  };
  std::uint32_t own = 0;
#pragma unroll kUnroll
  for (int i = first + lane; i < last; i += kWarp) own += is_equal(i) ? 1u : 0u;
  __syncthreads();
  std::uint32_t all = 0;
  std::uint32_t before = block_exclusive(own, shared->part, all);  // of lane 0: before the run
  const std::uint32_t in_run = __reduce_add_sync(kAllLanes, own);
  before = __shfl_sync(kAllLanes, before, 0);
  const std::uint32_t wanted = min(n, all);
  if (wanted == 0) return -1;
  if (before < wanted && wanted <= before + in_run) {
    int base = first;
    unsigned equal = __ballot_sync(kAllLanes, is_equal(base + lane));
    while (before + __popc(equal) < wanted) {
      before += __popc(equal);
      base += kWarp;
      equal = __ballot_sync(kAllLanes, is_equal(base + lane));
    }
    if (lane == 0) {
      shared->found = base + static_cast<int>(__fns(equal, 0, static_cast<int>(wanted - before)));
    }
  }
  __syncthreads();
  return shared->found;
}

// Grades from `edge` on, in the threads' registers, among which the ends of sets are searched.
// Unused registers hold kOutside.
struct Heaviest {
  static constexpr std::uint32_t kOutside = 0;
  std::uint32_t edge;
  std::uint32_t own[kOwn];

  // Sum of measure(grade) over these grades; all threads call it.
  template <typename Measure>
  __device__ __forceinline__ float sum(Shared* shared, const Measure& measure) const {
    float result = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) result += measure(own[i]);
    return block_total(result, shared);
  }
};

// Finds the edge: the heaviest bins, as many whole ones as fit the registers.
__device__ void find_edge(Shared* shared) {
  constexpr int kEach = kBins / kThreads;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  std::uint32_t own = 0;
  for (int i = 0; i < kEach; ++i) own += shared->bins[top - i];
  std::uint32_t all = 0;
  std::uint32_t before = block_exclusive(own, shared->part, all);
  if (before <= kListed && before + own > kListed) {
    int bin = top;
    while (before + shared->bins[bin] <= kListed) before += shared->bins[bin--];
    // The edge lies above the first bin that does not fit.
    shared->edge = bin + 1 < kBins ? static_cast<std::uint32_t>(bin + 1) << kBinShift : UINT_MAX;
  }
  if (threadIdx.x == 0 && all <= kListed) shared->edge = 0;
  __syncthreads();
}

__device__ Heaviest list_heaviest(const SampleCall& call, Shared* shared) {
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) shared->bins[i] = 0;
  if (threadIdx.x == 0) shared->listed_count = 0;
  __syncthreads();
  for_tokens(call,
             [&](int, float logit) { atomicAdd(&shared->bins[grade_of(logit) >> kBinShift], 1u); });
  __syncthreads();
  find_edge(shared);
  Heaviest result;
  result.edge = shared->edge;
  for (int i = static_cast<int>(threadIdx.x); i < kListed; i += kThreads) {
    shared->listed[i] = Heaviest::kOutside;
  }
  __syncthreads();
  for_tokens(call, [&](int, float logit) {
    const std::uint32_t grade = grade_of(logit);
    if (grade >= result.edge) shared->listed[atomicAdd(&shared->listed_count, 1u)] = grade;
  });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    result.own[i] = shared->listed[static_cast<int>(threadIdx.x) + i * kThreads];
  }
  return result;
}

// Returns the largest grade, at least `low`, with sum(grade) of at least `wanted`; sum(grade) is
// the measure of all tokens from that grade up.
template <typename Sum>
__device__ std::uint32_t bisect(std::uint32_t low, std::uint32_t high, float wanted,
                                const Sum& sum) {
  while (low < high) {
    const std::uint32_t middle = low + (high - low) / 2 + 1;
    if (sum(middle) >= wanted) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Shrinks `cut` to the fewest of its most likely tokens whose measure(logit) add up to `wanted`.
template <typename Measure>
__device__ Cut shrink(const SampleCall& call, const Heaviest& heaviest, std::uint32_t highest,
                      float wanted, const Cut& cut, const Measure& measure, Shared* shared) {
  const auto sum_listed = [&](std::uint32_t grade) {
    return heaviest.sum(
        shared, [&](std::uint32_t own) { return own >= grade ? measure(logit_of(own)) : 0.0f; });
  };
  const auto sum_all = [&](std::uint32_t grade) {
    return total(call, shared, [&](int, float logit) {
      return grade_of(logit) >= grade ? measure(logit) : 0.0f;
    });
  };
  const std::uint32_t edge = max(heaviest.edge, cut.grade);
  const bool listed = edge <= highest && sum_listed(edge) >= wanted;
  const std::uint32_t grade = listed ? bisect(edge, highest, wanted, sum_listed)
                                     : bisect(cut.grade, highest, wanted, sum_all);
  const float above = grade == highest ? 0.0f : listed ? sum_listed(grade + 1) : sum_all(grade + 1);
  const float needed = ceilf((wanted - above) / measure(logit_of(grade)));
  const float missing = fminf(fmaxf(needed, 1.0f), static_cast<float>(call.count));
  const auto is_equal = [&](std::uint32_t own) { return own == grade ? 1.0f : 0.0f; };
  // Usually no other token equals the last one.
  if (listed && heaviest.sum(shared, is_equal) <= missing) {
    return {grade, grade == cut.grade ? cut.id : INT_MAX};
  }
  const int id = find_equal(call, grade, cut, static_cast<std::uint32_t>(missing), shared);
  return {grade, id};
}

// The token with the highest score; ties go to the lowest id.
template <typename Score>
struct Best {
  Score score = -INFINITY;
  int id = INT_MAX;

  __device__ __forceinline__ void take(const Best& other) {
    const bool better = other.score > score || (other.score == score && other.id < id);
    if (better) *this = other;
  }
  __device__ __forceinline__ void take_from_warp() {
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) {
      take({__shfl_xor_sync(kAllLanes, score, lane), __shfl_xor_sync(kAllLanes, id, lane)});
    }
  }
  // All threads call it; every one gets the best of the block.
  __device__ void take_from_block(Shared* shared) {
    take_from_warp();
    __syncthreads();
    if (threadIdx.x % kWarp == 0) {
      shared->scores[threadIdx.x / kWarp] = score;
      shared->ids[threadIdx.x / kWarp] = id;
    }
    __syncthreads();
    *this = {static_cast<Score>(shared->scores[threadIdx.x % kWarp]),
             shared->ids[threadIdx.x % kWarp]};
    take_from_warp();
  }
};

// Finds the likeliest token; records the first bad logit.
__device__ Best<float> find_likeliest(const SampleCall& call, Shared* shared) {
  if (threadIdx.x == 0) shared->bad = INT_MAX;
  __syncthreads();
  Best<float> best;
  int bad = INT_MAX;
  for_tokens(call, [&](int id, float logit) {
    if (!(logit < INFINITY)) bad = min(bad, id);
    if (logit > best.score) best = {logit, id};
  });
  if (bad != INT_MAX) atomicMin(&shared->bad, bad);
  best.take_from_block(shared);
  return best;
}

// Finds the token with the largest sum of scaled logit and noise, among those for which
// keep(id, logit) is true. A bound in f32, whose rounding error is below kSlack where it can
// matter, avoids most of the sums in fp64.
template <typename Keep>
__device__ int find_drawn(const SampleCall& call, const Weights& weights, const Keep& keep,
                          Shared* shared) {
  constexpr float kSlack = 1e-3f;
  const SampleRule& rule = call.rule;
  Best<double> best;
  const int groups = (call.count + kNoiseGroup - 1) / kNoiseGroup;
  for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
    const int first = group * kNoiseGroup;
    float logits[kNoiseGroup];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kNoiseGroup; ++i) {
      logits[i] = first + i < call.count ? call.logits[first + i] : -INFINITY;
      if (!keep(first + i, logits[i])) logits[i] = -INFINITY;
      any = any || logits[i] > -INFINITY;
    }
    if (!any) continue;
    const auto words = noise_words(rule.seed, rule.position, static_cast<std::uint32_t>(group));
#pragma unroll
    for (int i = 0; i < kNoiseGroup; ++i) {
      if (logits[i] == -INFINITY) continue;
      const float bound = weights.scaled(logits[i]) + gumbel_bound(__clz(words[i]));
      if (bound + kSlack < static_cast<float>(best.score)) continue;
      const double above = static_cast<double>(logits[i]) - static_cast<double>(weights.most);
      best.take({above / rule.temperature + gumbel(words[i]), first + i});
    }
  }
  best.take_from_block(shared);
  return best.id;
}

__device__ int draw(const SampleCall& call, float most, Shared* shared) {
  const Weights weights{most, call.rule.sharpness};
  Cut cut{grade_of(-FLT_MAX), INT_MAX};
  const auto weigh = [&](int i, float logit) {
    return cut.has(grade_of(logit), i) ? weights(logit) : 0.0f;
  };
  const bool by_count = call.rule.top_k > 0 && call.rule.top_k < call.count;
  const bool by_weight = call.rule.top_p < 1.0f;
  if (by_count || by_weight) {
    const Heaviest heaviest = list_heaviest(call, shared);
    const auto shrunk = [&](float wanted, const auto& measure) {
      return shrink(call, heaviest, grade_of(most), wanted, cut, measure, shared);
    };
    if (by_count) cut = shrunk(static_cast<float>(call.rule.top_k), [](float) { return 1.0f; });
    if (by_weight) cut = shrunk(call.rule.top_p * total(call, shared, weigh), weights);
  }
  const auto keep = [&](int i, float logit) {
    return cut.has(grade_of(logit), i) && weights(logit) >= call.rule.min_p;
  };
  return find_drawn(call, weights, keep, shared);
}

SampleRule rule_of(const TokenDraw& p) {
  SampleRule rule{};
  rule.temperature = p.temperature;
  // Below 1e-30, weights are 0 or 1 anyway.
  rule.sharpness = static_cast<float>(1.0 / std::max(p.temperature, 1e-30));
  rule.top_k = p.top_k;
  rule.top_p = static_cast<float>(p.top_p);
  rule.min_p = static_cast<float>(p.min_p);
  rule.seed = p.seed;
  rule.position = static_cast<std::uint64_t>(p.position);
  return rule;
}

__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(const __grid_constant__ SampleBatch batch) {
  __shared__ Shared shared;
  const SampleCall call{batch.logits + blockIdx.x * batch.stride, batch.count,
                        batch.rules[blockIdx.x]};
  wait_for_kernel_before();
  const Best<float> best = find_likeliest(call, &shared);
  SampledToken result;
  if (shared.bad != INT_MAX) {
    result.bad = shared.bad;
    result.bad_logit = call.logits[shared.bad];
  } else if (best.score > -INFINITY) {
    result.id = call.rule.temperature == 0.0 ? best.id : draw(call, best.score, &shared);
  }
  if (threadIdx.x == 0) batch.results[blockIdx.x] = result;
}

}  // namespace

void sample(const Matrix& logits, std::span<const TokenDraw> params, SampledToken* results,
            const Launch& launch) {
  check(logits.rows == static_cast<std::int64_t>(params.size()) && logits.rows <= kSampleRows &&
            logits.columns < INT_MAX / 2,
        "sample: logits of a few tokens");
  SampleBatch batch{};
  batch.logits = static_cast<const float*>(logits.data);
  batch.stride = logits.stride;
  batch.count = static_cast<int>(logits.columns);
  batch.results = results;
  std::transform(params.begin(), params.end(), batch.rules, rule_of);
  launch_early("sample", sample_kernel, dim3(static_cast<unsigned>(logits.rows)), dim3(kThreads), 0,
               launch, batch);
}

}  // namespace sluice::cuda
