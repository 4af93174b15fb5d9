// The scorer on a GPU. Its arguments work in kernels unchanged (--expt-relaxed-constexpr).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <sluice/errors.h>

#include <string>

#include "signs.h"

namespace signs {
namespace {

using sluice::kPageTokens;

constexpr int kMostChannels = 256;

__device__ float key_of(const std::byte* row, sluice::DType dtype, int channel) {
  switch (dtype) {
    case sluice::DType::bf16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[channel]);
    case sluice::DType::f16:
      return __half2float(reinterpret_cast<const __half*>(row)[channel]);
    default:
      return reinterpret_cast<const float*>(row)[channel];
  }
}

__device__ Page page_at(const PageLayout& layout, std::byte* page) {
  return {layout, reinterpret_cast<float*>(page), reinterpret_cast<std::uint32_t*>(page)};
}

// One block per page and KV head, one thread per token.
__global__ void __launch_bounds__(kPageTokens)
    build_kernel(const sluice::WholePages pages, const sluice::ScorerMemory memory,
                 sluice::DType dtype, int head_dim, std::int64_t row_bytes) {
  const std::int64_t i = blockIdx.x;
  const auto head = static_cast<int>(blockIdx.y);
  if (!pages.exists(i)) return;
  const std::byte* const rows = pages.rows(i, head, row_bytes);
  const PageLayout layout{head_dim};
  const Page page = page_at(layout, memory.page(head, pages.sequence(i), pages.number(i)));
  const auto thread = static_cast<int>(threadIdx.x);
  for (int c = thread; c < head_dim; c += kPageTokens) {
    float sum = 0.0f;
    for (int t = 0; t < kPageTokens; ++t) sum += key_of(rows + t * row_bytes, dtype, c);
    const float mean = sum / kPageTokens;
    float distance = 0.0f;
    for (int t = 0; t < kPageTokens; ++t) {
      distance += fabsf(key_of(rows + t * row_bytes, dtype, c) - mean);
    }
    page.mean[c] = mean;
    page.size[c] = distance / kPageTokens;
  }
  __syncthreads();
  for (int word = 0; word < layout.words(); ++word) {
    std::uint32_t bits = 0;
    for (int c = word * 32; c < min(head_dim, word * 32 + 32); ++c) {
      const float key = key_of(rows + thread * row_bytes, dtype, c);
      bits |= (key > page.mean[c] ? 1u : 0u) << (c % 32);
    }
    page.signs[thread * layout.words() + word] = bits;
  }
}

struct ScoreArgs {
  sluice::ScorerMemory memory;
  sluice::TokenBatch batch;
  sluice::LogitRows logits;
  const float* q;
  std::int64_t q_stride;
  int kv_heads;
  int group;
  int head_dim;
};

// One block per page, KV head and token of the batch, one thread per token of the page. A block
// reads the page once for all query heads.
__global__ void __launch_bounds__(kPageTokens) score_kernel(const ScoreArgs a) {
  __shared__ float above[kMostChannels];
  __shared__ float below[kMostChannels];
  const std::int64_t number = blockIdx.x;
  const auto head = static_cast<int>(blockIdx.y);
  const sluice::BatchToken token = a.batch.tokens[blockIdx.z];
  if (number >= token.pages()) return;
  const PageLayout layout{a.head_dim};
  const Page page = page_at(layout, a.memory.page(head, token.sequence, number));
  const auto thread = static_cast<int>(threadIdx.x);
  const float scale = rsqrtf(static_cast<float>(a.head_dim));
  for (int g = 0; g < a.group; ++g) {
    const int query = head * a.group + g;
    const float* const q = a.q + blockIdx.z * a.q_stride + query * a.head_dim;
    for (int c = thread; c < a.head_dim; c += kPageTokens) {
      const float mean = q[c] * page.mean[c] * scale;
      const float weight = q[c] * page.size[c] * scale;
      above[c] = mean + weight;
      below[c] = mean - weight;
    }
    __syncthreads();
    float logit = 0.0f;
    for (int c = 0; c < a.head_dim; ++c) {
      const std::uint32_t word = page.signs[thread * layout.words() + c / 32];
      logit += (word >> (c % 32) & 1u) != 0 ? above[c] : below[c];
    }
    const std::int64_t row = std::int64_t{blockIdx.z} * a.kv_heads * a.group + query;
    a.logits.row<__half>(row)[number * kPageTokens + thread] = __float2half(logit);
    __syncthreads();
  }
}

unsigned unsigned_of(std::int64_t count) { return static_cast<unsigned>(count); }

void require_launched(const char* what) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw sluice::Error(sluice::ErrorCode::internal,
                      std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

void build_on_gpu(const sluice::BuildScorer& call) {
  const sluice::KvShape& shape = call.use.shape;
  if (call.pages.count == 0) return;
  const dim3 grid(unsigned_of(call.pages.count), unsigned_of(shape.kv_heads));
  build_kernel<<<grid, kPageTokens, 0, static_cast<cudaStream_t>(call.stream)>>>(
      call.pages, call.memory, shape.rows.element, shape.head_dim,
      static_cast<std::int64_t>(shape.row_bytes()));
  require_launched("building signs");
}

void score_on_gpu(const sluice::RunScorer& call) {
  const sluice::KvShape& shape = call.use.shape;
  const std::int64_t pages = (call.batch.capacity - 1) / kPageTokens;
  if (pages <= 0 || call.batch.count == 0) return;
  const ScoreArgs args{call.memory,   call.batch,     call.logits,   call.q,
                       call.q_stride, shape.kv_heads, shape.group(), shape.head_dim};
  const dim3 grid(unsigned_of(pages), unsigned_of(shape.kv_heads), unsigned_of(call.batch.count));
  score_kernel<<<grid, kPageTokens, 0, static_cast<cudaStream_t>(call.stream)>>>(args);
  require_launched("scoring by signs");
}

}  // namespace signs
