#include "offload/kv_cache/caller_arrays.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "lib/read_heads.h"
#include "offload/plan/planner.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::int64_t kMaxStride = std::int64_t{1} << 40;

// Most heads read at a time: those of queries, or of keys and values together.
std::int64_t heads_in(const KvShape& shape) {
  return std::max(shape.query_heads, 2 * shape.kv_heads);
}

std::size_t in_bytes(const KvShape& shape, std::int64_t tokens) {
  return static_cast<std::size_t>(tokens * heads_in(shape) * shape.head_dim) * sizeof(float);
}
std::size_t out_bytes(const KvShape& shape, std::int64_t tokens) {
  return static_cast<std::size_t>(tokens * shape.query_heads * shape.head_dim) * sizeof(float);
}
std::size_t lse_bytes(const KvShape& shape, std::int64_t tokens) {
  return static_cast<std::size_t>(tokens * shape.query_heads) * sizeof(float);
}
std::size_t bad_bytes(const KvShape& shape, std::int64_t tokens) {
  const std::int64_t heads = 2 * shape.kv_heads + shape.query_heads;
  return static_cast<std::size_t>(shape.layers * tokens * heads) * sizeof(std::int32_t);
}

HeadArray array_of(void* data, const ArrayLayout& layout, std::int64_t tokens, int heads,
                   int head_dim) {
  HeadArray array{
      data, layout.dtype, tokens, heads, head_dim, layout.token_stride, layout.head_stride};
  if (array.head_stride == 0) array.head_stride = head_dim;
  if (array.token_stride == 0) array.token_stride = heads * array.head_stride;
  return array;
}

// Heads may be interleaved within a token, or tokens within a head; anything else overlaps.
bool overlaps(const HeadArray& a) {
  if (a.tokens > 1 && a.token_stride < a.head_dim) return true;
  if (a.heads > 1 && a.head_stride < a.head_dim) return true;
  const std::int64_t token = (a.heads - 1) * a.head_stride + a.head_dim;
  const std::int64_t head = (a.tokens - 1) * a.token_stride + a.head_dim;
  return a.tokens > 1 && a.heads > 1 && a.token_stride < token && a.head_stride < head;
}

void require_array(std::string_view name, const void* data, const ArrayLayout& layout, int heads,
                   std::int64_t tokens, int head_dim, const BackendInfo& info) {
  const auto require = [&](bool holds, ErrorCode code, const std::string& what) {
    if (!holds) throw Error(code, std::string(name) + ": " + what);
  };
  require(data != nullptr, ErrorCode::usage, "a null pointer");
  require(is_known(layout.dtype), ErrorCode::unsupported, "dtype must be f32, f16 or bf16");
  require(reinterpret_cast<std::uintptr_t>(data) % size_of(layout.dtype) == 0, ErrorCode::usage,
          "the pointer is not aligned to its elements");
  require(layout.tier == Tier::host || layout.tier == Tier::device, ErrorCode::usage,
          "tier must be host or device");
  require(layout.tier == Tier::host || info.compute_tier == Tier::device, ErrorCode::usage,
          "device " + info.name + " has no memory of its own; tier must be host");
  const auto in_range = [](std::int64_t stride) { return stride >= 0 && stride <= kMaxStride; };
  require(in_range(layout.token_stride) && in_range(layout.head_stride), ErrorCode::usage,
          "strides must be 0 (dense) to 2^40 elements");
  const HeadArray array = array_of(const_cast<void*>(data), layout, tokens, heads, head_dim);
  require(!overlaps(array), ErrorCode::usage,
          "heads overlap with a token_stride of " + std::to_string(array.token_stride) +
              " and a head_stride of " + std::to_string(array.head_stride) + " elements");
}

// Casts a dense f32 array to an array of any dtype and strides, in as few matrices as possible:
// rows are tokens or heads.
void cast_heads(Queue& queue, float* from, const HeadArray& to) {
  const std::int64_t dim = to.head_dim;
  const std::int64_t width = to.heads * dim;
  auto* const data = static_cast<std::byte*>(to.data);
  const auto at = [&](std::int64_t elements) {
    return data + static_cast<std::size_t>(elements) * size_of(to.dtype);
  };
  if (to.head_stride == dim || to.heads == 1) {
    return queue.run(CastParams{{from, DType::f32, to.tokens, width, width},
                                {data, to.dtype, to.tokens, width, to.token_stride}});
  }
  if (to.tokens < to.heads) {
    for (std::int64_t token = 0; token < to.tokens; ++token) {
      queue.run(CastParams{{from + token * width, DType::f32, to.heads, dim, dim},
                           {at(token * to.token_stride), to.dtype, to.heads, dim, to.head_stride}});
    }
    return;
  }
  for (std::int64_t head = 0; head < to.heads; ++head) {
    queue.run(CastParams{{from + head * dim, DType::f32, to.tokens, dim, width},
                         {at(head * to.head_stride), to.dtype, to.tokens, dim, to.token_stride}});
  }
}

}  // namespace

CallerArrays::CallerArrays(Queue& queue, const KvShape& shape, std::int64_t tokens, float factor)
    : queue_(&queue), shape_(shape), factor_(factor), tokens_(tokens) {
  Backend& backend = queue.backend();
  const Tier tier = backend.info().compute_tier;
  in_ = backend.allocate(tier, in_bytes(shape, tokens));
  out_ = backend.allocate(tier, out_bytes(shape, tokens));
  lse_ = backend.allocate(tier, lse_bytes(shape, tokens));
  bad_ = backend.allocate(Tier::host, bad_bytes(shape, tokens));
  if (tier == Tier::host) return;
  host_in_ = backend.allocate(Tier::host, in_bytes(shape, tokens));
  host_out_ = backend.allocate(Tier::host, out_bytes(shape, tokens));
}

std::uint64_t CallerArrays::compute_bytes(const KvShape& shape, std::int64_t tokens) {
  return in_bytes(shape, tokens) + out_bytes(shape, tokens) + lse_bytes(shape, tokens);
}

std::uint64_t CallerArrays::host_bytes(const BackendInfo& info, const KvShape& shape,
                                       std::int64_t tokens) {
  const std::uint64_t through = in_bytes(shape, tokens) + out_bytes(shape, tokens);
  return bad_bytes(shape, tokens) +
         (info.compute_tier == Tier::host ? compute_bytes(shape, tokens) : through);
}

void CallerArrays::require(std::string_view name, const KvInput& array, int heads,
                           std::int64_t tokens) const {
  require_array(name, array.data, array.layout, heads, tokens, shape_.head_dim,
                queue_->backend().info());
}

void CallerArrays::require(std::string_view name, const KvOutput& array, int heads,
                           std::int64_t tokens) const {
  require_array(name, array.data, array.layout, heads, tokens, shape_.head_dim,
                queue_->backend().info());
}

void CallerArrays::copy(void* to, const void* from, std::size_t bytes) {
  const CopyOp op = {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes};
  queue_->copy({&op, 1});
}

std::int32_t* CallerArrays::bad_rows_of(int layer) const {
  return reinterpret_cast<std::int32_t*>(bad_.data()) +
         layer * tokens_ * (2 * shape_.kv_heads + shape_.query_heads);
}

std::int32_t* CallerArrays::bad_queries_of(int layer) const {
  return bad_rows_of(layer) + tokens_ * 2 * shape_.kv_heads;
}

// Reads into the vectors from index `at` on.
void CallerArrays::read(const KvInput& array, std::int64_t tokens, int heads, float factor,
                        std::int64_t at, std::int32_t* bad) {
  ReadHeadsParams params;
  params.from =
      array_of(const_cast<void*>(array.data), array.layout, tokens, heads, shape_.head_dim);
  params.factor = factor;
  params.limit = magnitude_limit(shape_.rows);
  params.to = in_.floats() + at * shape_.head_dim;
  params.bad = bad;
  const std::int64_t vectors = tokens * heads;
  std::fill_n(params.bad, vectors, 0);
  if (array.layout.tier == queue_->backend().info().compute_tier) return queue_->run(params);
  float* const to = params.to;
  params.to = host_in_.floats() + at * shape_.head_dim;
  read_heads(params);
  copy(to, params.to, static_cast<std::size_t>(vectors * shape_.head_dim) * sizeof(float));
}

NewRows CallerArrays::read_rows(int layer, const KvInput& keys, const KvInput& values,
                                std::int64_t tokens) {
  const std::int64_t heads = tokens * shape_.kv_heads;
  read(keys, tokens, shape_.kv_heads, 1.0f, 0, bad_rows_of(layer));
  read(values, tokens, shape_.kv_heads, 1.0f, heads, bad_rows_of(layer) + heads);
  return {in_.floats(), in_.floats() + heads * shape_.head_dim,
          std::int64_t{shape_.kv_heads} * shape_.head_dim};
}

Queries CallerArrays::read_queries(int layer, const KvInput& queries, std::int64_t tokens) {
  read(queries, tokens, shape_.query_heads, factor_, 0, bad_queries_of(layer));
  return {in_.floats(), std::int64_t{shape_.query_heads} * shape_.head_dim, out_.floats(),
          lse_.floats()};
}

void CallerArrays::write(const KvOutput& out, float* lse, std::int64_t tokens) {
  if (out.layout.tier == Tier::device) return to_device(out, lse, tokens);
  to_host(out, lse, tokens);
}

void CallerArrays::to_device(const KvOutput& out, float* lse, std::int64_t tokens) {
  cast_heads(*queue_, out_.floats(),
             array_of(out.data, out.layout, tokens, shape_.query_heads, shape_.head_dim));
  if (lse != nullptr) copy(lse, lse_.data(), lse_bytes(shape_, tokens));
}

void CallerArrays::to_host(const KvOutput& out, float* lse, std::int64_t tokens) {
  const bool passes = host_out_.data() != nullptr;
  if (passes) copy(host_out_.data(), out_.data(), out_bytes(shape_, tokens));
  if (lse != nullptr) copy(lse, lse_.data(), lse_bytes(shape_, tokens));
  queue_->synchronize();
  write_heads(passes ? host_out_.floats() : out_.floats(),
              array_of(out.data, out.layout, tokens, shape_.query_heads, shape_.head_dim));
}

std::optional<CallerArrays::Bad> CallerArrays::bad_rows(int layer, std::int64_t tokens,
                                                        std::int64_t token) const {
  const std::int32_t* const keys = bad_rows_of(layer);
  const std::int32_t* const values = keys + tokens * shape_.kv_heads;
  for (int head = 0; head < shape_.kv_heads; ++head) {
    const std::int64_t at = token * shape_.kv_heads + head;
    if (keys[at] != 0) return {{"keys", head}};
    if (values[at] != 0) return {{"values", head}};
  }
  return std::nullopt;
}

std::optional<CallerArrays::Bad> CallerArrays::bad_queries(int layer, std::int64_t token) const {
  const std::int32_t* const bad = bad_queries_of(layer) + token * shape_.query_heads;
  for (int head = 0; head < shape_.query_heads; ++head) {
    if (bad[head] != 0) return {{"queries", head / shape_.group()}};
  }
  return std::nullopt;
}

}  // namespace sluice
