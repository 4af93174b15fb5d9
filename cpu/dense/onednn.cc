#include "cpu/dense/onednn.h"

#include <omp.h>

#include <algorithm>
#include <future>
#include <vector>

#include "lib/check.h"
#include "lib/process_limits.h"

namespace sluice::cpu {
namespace {

using dnnl::memory;

memory::data_type to_dnnl(DType dtype) {
  return dtype == DType::f32 ? memory::data_type::f32 : memory::data_type::bf16;
}

// Debian's oneDNN parallelises with OpenMP. Each call here is one thread's share of the work, so an
// OpenMP team would only compete with our threads for the cores. A primitive uses the thread count
// at the time it was described, and the layout of packed weights depends on that count, too. The
// destructor restores the caller's setting.
class SingleThreadedOpenMp {
 public:
  SingleThreadedOpenMp() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  SingleThreadedOpenMp(const SingleThreadedOpenMp&) = delete;
  SingleThreadedOpenMp& operator=(const SingleThreadedOpenMp&) = delete;
  ~SingleThreadedOpenMp() { omp_set_num_threads(before_); }

 private:
  int before_;
};

memory::desc dense(std::int64_t rows, std::int64_t columns, DType dtype) {
  return memory::desc(memory::dims{rows, columns}, to_dnnl(dtype), memory::format_tag::ab);
}

memory::desc weights_of(std::int64_t inputs, std::int64_t outputs, DType dtype,
                        memory::format_tag layout) {
  return memory::desc(memory::dims{inputs, outputs}, to_dnnl(dtype), layout);
}

// Weights in a checkpoint's layout: [outputs, inputs] row-major is [inputs, outputs] column-major.
constexpr memory::format_tag kPlain = memory::format_tag::ba;

// A word is the unit that AVX-512 and AMX multiply: one f32, or two bf16 of the same output.
constexpr std::size_t kWordBytes = 4;
constexpr std::int64_t kLineWords = 16;  // per cache line

// [kBlockOutputs, words] to [words, kBlockOutputs]. Source lines are read once, and target lines
// are completed while they are in the L1 cache.
void transpose(const std::uint32_t* from, std::int64_t words, std::uint32_t* to) {
  for (std::int64_t first = 0; first < words; first += kLineWords) {
    for (std::int64_t output = 0; output < kBlockOutputs; ++output) {
      const std::uint32_t* const line = from + output * words + first;
      std::uint32_t* const column = to + first * kBlockOutputs + output;
      for (std::int64_t i = 0; i < kLineWords; ++i) column[i * kBlockOutputs] = line[i];
    }
  }
}

// Memory of the calling thread; never null. It grows to the largest request and is kept.
std::byte* scratch_of(std::size_t bytes) {
  thread_local std::vector<std::byte> scratch;
  if (scratch.size() <= bytes) scratch.resize(bytes + 1);
  return scratch.data();
}
float* results_of(std::size_t floats) {
  thread_local std::vector<float> results;
  if (results.size() < floats) results.resize(floats);
  return results.data();
}

// What make() makes with oneDNN. Where memory ran out in the middle of that, oneDNN's cache keeps a
// promise that nobody fulfils, for good unless the cache is emptied.
template <typename Make>
auto made(const Make& make) {
  try {
    return make();
  } catch (const std::future_error&) {
    const int capacity = dnnl::get_primitive_cache_capacity();
    dnnl::set_primitive_cache_capacity(0);
    dnnl::set_primitive_cache_capacity(capacity);
    return make();
  }
}

}  // namespace

OneDnn::OneDnn(DType compute, Weights weights) : compute_(compute), weights_(weights) {
  if (weights == Weights::packed && is_consecutive()) return;
  if (weights == Weights::packed) weights_ = Weights::rows;
  block_ = 1;
  packings_.clear();
}

std::uint64_t OneDnn::packed_bytes(std::int64_t outputs, std::int64_t inputs) const {
  return layout(inputs, outputs).get_size();
}

bool OneDnn::transposes(std::int64_t inputs) {
  return block_ == kBlockOutputs && packing(inputs, kBlockOutputs).transposes;
}

std::string OneDnn::kernel_name(std::int64_t tokens, std::int64_t inputs,
                                std::int64_t outputs) const {
  return describe({tokens, inputs, outputs, false, false}).impl_info_str();
}

// Versions 2 and 3 of oneDNN differ in how a matmul is described.
dnnl::matmul::primitive_desc OneDnn::describe(const Shape& shape) const {
  const memory::format_tag layout = weights_ == Weights::packed ? memory::format_tag::any
                                    : weights_ == Weights::rows ? kPlain
                                                                : memory::format_tag::ab;
  const SingleThreadedOpenMp single_threaded;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (shape.accumulate) {
    dnnl::post_ops post_ops;
    post_ops.append_sum();
    attributes.set_post_ops(post_ops);
  }
  const memory::desc x = dense(shape.tokens, shape.inputs, compute_);
  const memory::desc weights = weights_of(shape.inputs, shape.outputs, compute_, layout);
  const memory::desc bias = shape.bias ? dense(1, shape.outputs, DType::f32) : memory::desc();
  const memory::desc y = dense(shape.tokens, shape.outputs, DType::f32);
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine_, x, weights, bias, y, attributes);
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(x, weights, bias, y), attributes, engine_);
#endif
}

// oneDNN chooses the same weight layout for every number of tokens, but does not guarantee it, so
// primitive() checks it. If the layout does not store blocks of outputs consecutively, weights stay
// plain.
memory::desc OneDnn::layout(std::int64_t inputs, std::int64_t outputs) const {
  return describe({kMaxTokens, inputs, outputs, false, false}).weights_desc();
}

const OneDnn::Packing& OneDnn::packing(std::int64_t inputs, std::int64_t outputs) {
  const std::lock_guard lock(mutex_);
  const auto found = packings_.find({inputs, outputs});
  if (found != packings_.end()) return found->second;
  const SingleThreadedOpenMp single_threaded;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  Packing packing = made([&] {
    return Packing(dnnl::reorder::primitive_desc(engine_,
                                                 weights_of(inputs, outputs, compute_, kPlain),
                                                 engine_, layout(inputs, outputs), attributes));
  });
  packing.transposes = is_transpose(packing, inputs, outputs);
  return packings_.try_emplace({inputs, outputs}, std::move(packing)).first->second;
}

// Returns true if this packing is a transpose, tested by packing a pattern.
bool OneDnn::is_transpose(const Packing& packing, std::int64_t inputs, std::int64_t outputs) const {
  const std::size_t bytes = packing.plain.get_size();
  if (outputs != kBlockOutputs || packing.packed.get_size() != bytes ||
      static_cast<std::size_t>(inputs) * size_of(compute_) % (kLineWords * kWordBytes) != 0) {
    return false;
  }
  std::vector<std::uint32_t> plain(bytes / kWordBytes);
  // The pattern is finite in any dtype, and the halves of a word always differ.
  for (std::size_t i = 0; i < plain.size(); ++i) {
    plain[i] = static_cast<std::uint32_t>(i % 0x3f7f * 0x10001 + 1);
  }
  std::vector<std::uint32_t> expected(plain.size());
  std::vector<std::uint32_t> actual(plain.size());
  reorder(packing, reinterpret_cast<std::byte*>(plain.data()),
          reinterpret_cast<std::byte*>(expected.data()));
  transpose(plain.data(), static_cast<std::int64_t>(plain.size()) / kBlockOutputs, actual.data());
  return actual == expected;
}

void OneDnn::reorder(const Packing& packing, std::byte* plain, std::byte* to) const {
  const SingleThreadedOpenMp single_threaded;
  dnnl::stream stream(engine_);
  std::byte* const scratch = scratch_of(packing.scratch.get_size());
  packing.reorder.execute(stream,
                          {{DNNL_ARG_FROM, memory(packing.plain, engine_, plain)},
                           {DNNL_ARG_TO, memory(packing.packed, engine_, to)},
                           {DNNL_ARG_SCRATCHPAD, memory(packing.scratch, engine_, scratch)}});
  stream.wait();
}

// Packs dense rows in the compute dtype.
void OneDnn::pack(std::byte* plain, std::int64_t inputs, std::int64_t outputs, std::byte* to) {
  const Packing& packing = this->packing(inputs, outputs);
  if (packing.transposes) {
    const auto words = static_cast<std::int64_t>(static_cast<std::size_t>(inputs) *
                                                 size_of(compute_) / kWordBytes);
    transpose(reinterpret_cast<std::uint32_t*>(plain), words, reinterpret_cast<std::uint32_t*>(to));
  } else {
    reorder(packing, plain, to);
  }
}

// Returns true if packing two blocks of outputs together gives the same bytes as one by one.
bool OneDnn::is_consecutive() {
  constexpr std::int64_t kInputs = 64;
  const std::size_t half = kBlockOutputs * kInputs * size_of(compute_);
  const auto bytes = [&](std::int64_t outputs) { return layout(kInputs, outputs).get_size(); };
  if (bytes(kBlockOutputs) != half || bytes(2 * kBlockOutputs) != 2 * half) return false;
  std::vector<std::byte> plain(2 * half);
  for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<std::byte>(i % 251);
  std::vector<std::byte> whole(2 * half);
  std::vector<std::byte> parts(2 * half);
  pack(plain.data(), kInputs, 2 * kBlockOutputs, whole.data());
  pack(plain.data(), kInputs, kBlockOutputs, parts.data());
  pack(plain.data() + half, kInputs, kBlockOutputs, parts.data() + half);
  return whole == parts;
}

namespace {

// oneDNN compiles a product for its shape, and does not notice that memory for the code is refused.
void require_code_room() {
  constexpr std::uint64_t kMost = std::uint64_t{16} << 20;
  require_memory(kMost, Counted::reserved, "code of matrix products needs", "raise the limit");
}

}  // namespace

const OneDnn::Primitive& OneDnn::primitive(const Shape& shape) {
  const std::lock_guard lock(mutex_);
  auto found = primitives_.find(shape);
  if (found == primitives_.end()) {
    require_code_room();
    const SingleThreadedOpenMp single_threaded;
    found = primitives_.try_emplace(shape, made([&] { return Primitive(describe(shape)); })).first;
    check(found->second.weights == layout(shape.inputs, shape.outputs),
          "oneDNN wants weights packed differently for different numbers of tokens");
  }
  return found->second;
}

// Accumulating takes the most scratch.
std::uint64_t OneDnn::scratch_bytes(std::int64_t tokens, std::int64_t inputs, std::int64_t outputs,
                                    bool scatters) const {
  const std::uint64_t own =
      describe({tokens, inputs, outputs, false, true}).scratchpad_desc().get_size();
  return own + (scatters ? static_cast<std::uint64_t>(tokens * outputs) * sizeof(float) : 0);
}

// Results that are not dense are computed in scratch first, because oneDNN wants other weight
// layouts for them.
void OneDnn::multiply(const Product& p) {
  if (p.tokens == 1 || p.y_stride == p.outputs) return multiply_dense(p);
  Product dense = p;
  dense.y = results_of(static_cast<std::size_t>(p.tokens * p.outputs));
  dense.y_stride = p.outputs;
  dense.accumulate = false;
  multiply_dense(dense);
  for (std::int64_t token = 0; token < p.tokens; ++token) {
    const float* const from = dense.y + token * p.outputs;
    float* const to = p.y + token * p.y_stride;
    if (p.accumulate) {
      for (std::int64_t o = 0; o < p.outputs; ++o) to[o] += from[o];
    } else {
      std::copy_n(from, p.outputs, to);
    }
  }
}

void OneDnn::multiply_dense(const Product& p) {
  const SingleThreadedOpenMp single_threaded;
  const Primitive& primitive =
      this->primitive({p.tokens, p.inputs, p.outputs, p.bias != nullptr, p.accumulate});
  std::byte* const scratch = scratch_of(primitive.scratch.get_size());
  std::unordered_map<int, memory> arguments{
      {DNNL_ARG_SRC, memory(primitive.x, engine_, p.x)},
      {DNNL_ARG_WEIGHTS, memory(primitive.weights, engine_, p.weights)},
      {DNNL_ARG_DST, memory(primitive.y, engine_, p.y)},
      {DNNL_ARG_SCRATCHPAD, memory(primitive.scratch, engine_, scratch)}};
  if (p.bias != nullptr) {
    // oneDNN takes a mutable pointer but only reads it.
    arguments.emplace(DNNL_ARG_BIAS, memory(primitive.bias, engine_, const_cast<float*>(p.bias)));
  }
  dnnl::stream stream(engine_);
  primitive.matmul.execute(stream, arguments);
  stream.wait();
}

}  // namespace sluice::cpu
