#include "cpu/linear.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <dnnl.hpp>
#include <map>
#include <mutex>
#include <vector>

#include "cpu/elementwise.h"
#include "cpu/threads.h"
#include "lib/bytes.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

using dnnl::memory;

constexpr std::int64_t kBlockOutputs = 64;  // outputs of a block of oneDNN's packed layouts
constexpr std::int64_t kMaxTokens = 256;    // tokens of one oneDNN call

memory::data_type to_dnnl(DType dtype) {
  return dtype == DType::f32 ? memory::data_type::f32 : memory::data_type::bf16;
}

// oneDNN parallelises with OpenMP in Debian's build. Here each call is one thread's piece of work,
// so a team of its own would only fight with ours for the cores. The layout of packed weights
// follows from the number of threads, too. The caller's setting is restored.
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

// What one primitive is specialised for.
struct Shape {
  std::int64_t tokens, inputs, outputs;
  bool bias, accumulate;
  auto operator<=>(const Shape&) const = default;
};

// Versions 2 and 3 of oneDNN differ in how a matmul is described.
dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const Shape& shape,
                                      DType compute) {
  const SingleThreadedOpenMp single_threaded;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (shape.accumulate) {
    dnnl::post_ops post_ops;
    post_ops.append_sum();
    attributes.set_post_ops(post_ops);
  }
  const memory::desc x = dense(shape.tokens, shape.inputs, compute);
  const memory::desc weights(memory::dims{shape.inputs, shape.outputs}, to_dnnl(compute),
                             memory::format_tag::any);
  const memory::desc bias = shape.bias ? dense(1, shape.outputs, DType::f32) : memory::desc();
  const memory::desc y = dense(shape.tokens, shape.outputs, DType::f32);
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine, x, weights, bias, y, attributes);
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(x, weights, bias, y), attributes, engine);
#endif
}

struct Primitive {
  explicit Primitive(const dnnl::matmul::primitive_desc& d)
      : matmul(d),
        x(d.src_desc()),
        weights(d.weights_desc()),
        bias(d.bias_desc()),
        y(d.dst_desc()),
        scratch(d.scratchpad_desc()) {}
  dnnl::matmul matmul;
  memory::desc x, weights, bias, y, scratch;
};

class PackedWeight : public Weight {
 public:
  PackedWeight(std::int64_t outputs, std::int64_t inputs, memory packed, MemoryAccount& account)
      : outputs_(outputs), inputs_(inputs), packed_(std::move(packed)), account_(&account) {}
  PackedWeight(const PackedWeight&) = delete;
  PackedWeight& operator=(const PackedWeight&) = delete;
  ~PackedWeight() override { account_->release(packed_.get_desc().get_size()); }

  std::int64_t outputs() const override { return outputs_; }
  std::int64_t inputs() const override { return inputs_; }

  // The packed bytes of the outputs from `first`, a multiple of kBlockOutputs, on.
  std::byte* from(std::int64_t first) const {
    const std::size_t blocks =
        round_up(static_cast<std::uint64_t>(outputs_), kBlockOutputs) / kBlockOutputs;
    const std::size_t block_bytes = packed_.get_desc().get_size() / blocks;
    return static_cast<std::byte*>(packed_.get_data_handle()) +
           static_cast<std::size_t>(first / kBlockOutputs) * block_bytes;
  }

 private:
  std::int64_t outputs_;
  std::int64_t inputs_;
  memory packed_;
  MemoryAccount* account_;
};

// A part of one product: some tokens, some outputs.
struct Piece {
  std::int64_t token, tokens, output, outputs;
};

}  // namespace

struct Linear::Impl {
  Threads& threads;
  DType compute;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  bool sliceable = false;  // packed outputs are consecutive, so a product can use some of them
  std::mutex mutex;        // guards `primitives`
  std::map<Shape, Primitive> primitives;

  Impl(Threads& pool, DType dtype) : threads(pool), compute(dtype) {
    sliceable = packing_is_consecutive();
  }

  // oneDNN chooses one layout for the weights whatever the number of tokens, but promises nothing:
  // primitive() checks that it did.
  memory::desc layout(std::int64_t inputs, std::int64_t outputs) const {
    return describe(engine, {kMaxTokens, inputs, outputs, false, false}, compute).weights_desc();
  }

  // Packs `outputs` rows of dense weights in the compute dtype.
  memory pack(std::byte* plain, std::int64_t inputs, std::int64_t outputs) const {
    const SingleThreadedOpenMp single_threaded;
    // [outputs, inputs] row-major is [inputs, outputs] column-major.
    memory source({memory::dims{inputs, outputs}, to_dnnl(compute), memory::format_tag::ba}, engine,
                  plain);
    memory packed(layout(inputs, outputs), engine);
    dnnl::stream stream(engine);
    dnnl::reorder(source, packed).execute(stream, source, packed);
    stream.wait();
    return packed;
  }

  // Whether packing two blocks of outputs gives the bytes of packing them one by one.
  bool packing_is_consecutive() const {
    constexpr std::int64_t kInputs = 64;
    std::vector<std::uint16_t> plain(2 * kBlockOutputs * kInputs * size_of(compute) / 2);
    for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<std::uint16_t>(i);
    auto* bytes = reinterpret_cast<std::byte*>(plain.data());
    const std::size_t half = plain.size();  // two bytes each, so this is half of the bytes
    const memory both = pack(bytes, kInputs, 2 * kBlockOutputs);
    const memory second = pack(bytes + half, kInputs, kBlockOutputs);
    return both.get_desc().get_size() == 2 * half && second.get_desc().get_size() == half &&
           std::memcmp(static_cast<std::byte*>(both.get_data_handle()) + half,
                       second.get_data_handle(), half) == 0;
  }

  const Primitive& primitive(const Shape& shape) {
    const std::lock_guard lock(mutex);
    auto found = primitives.find(shape);
    if (found == primitives.end()) {
      found = primitives.try_emplace(shape, describe(engine, shape, compute)).first;
      check(found->second.weights == layout(shape.inputs, shape.outputs),
            "oneDNN wants weights packed differently for different numbers of tokens");
    }
    return found->second;
  }

  void multiply(const LinearParams& p, const PackedWeight& weight, const Piece& piece) {
    const SingleThreadedOpenMp single_threaded;
    const Primitive& primitive = this->primitive(
        {piece.tokens, weight.inputs(), piece.outputs, p.bias != nullptr, p.accumulate});
    thread_local std::vector<std::byte> scratch;
    scratch.resize(std::max(scratch.size(), primitive.scratch.get_size() + 1));
    std::byte* const x = row_of(p.x, piece.token);
    float* const y = static_cast<float*>(p.y.data) + piece.token * p.y.stride + piece.output;
    std::unordered_map<int, memory> arguments{
        {DNNL_ARG_SRC, memory(primitive.x, engine, x)},
        {DNNL_ARG_WEIGHTS, memory(primitive.weights, engine, weight.from(piece.output))},
        {DNNL_ARG_DST, memory(primitive.y, engine, y)},
        {DNNL_ARG_SCRATCHPAD, memory(primitive.scratch, engine, scratch.data())}};
    if (p.bias != nullptr) {
      // oneDNN takes a mutable pointer but only reads it.
      auto* bias = const_cast<float*>(p.bias + piece.output);
      arguments.emplace(DNNL_ARG_BIAS, memory(primitive.bias, engine, bias));
    }
    dnnl::stream stream(engine);
    primitive.matmul.execute(stream, arguments);
    stream.wait();
  }

  // One piece per thread where the work can be divided like that.
  std::vector<Piece> divide(std::int64_t tokens, std::int64_t outputs) const {
    std::vector<Piece> pieces;
    const auto share = [&](std::int64_t items) {
      return static_cast<std::uint64_t>((items + threads.count() - 1) / threads.count());
    };
    if (tokens == 1) {
      const auto width =
          static_cast<std::int64_t>(sliceable ? round_up(share(outputs), kBlockOutputs)
                                              : static_cast<std::uint64_t>(outputs));
      for (std::int64_t first = 0; first < outputs; first += width) {
        pieces.push_back({0, 1, first, std::min(width, outputs - first)});
      }
      return pieces;
    }
    const auto most = std::min(kMaxTokens, static_cast<std::int64_t>(std::bit_ceil(share(tokens))));
    for (std::int64_t token = 0; token < tokens;) {
      const auto left = static_cast<std::uint64_t>(tokens - token);
      const std::int64_t count = std::min(most, static_cast<std::int64_t>(std::bit_floor(left)));
      pieces.push_back({token, count, 0, outputs});
      token += count;
    }
    return pieces;
  }
};

Linear::Linear(Threads& threads, DType compute) : impl_(std::make_unique<Impl>(threads, compute)) {}

Linear::~Linear() = default;

std::uint64_t Linear::packed_bytes(std::int64_t outputs, std::int64_t inputs) const {
  return impl_->layout(inputs, outputs).get_size();
}

std::unique_ptr<Weight> Linear::pack(const Matrix& host, MemoryAccount& account) {
  const std::uint64_t bytes = packed_bytes(host.rows, host.columns);
  account.charge(bytes);
  try {
    std::vector<std::byte> plain(static_cast<std::size_t>(host.rows * host.columns) *
                                 size_of(impl_->compute));
    cast(host, {plain.data(), impl_->compute, host.rows, host.columns, host.columns});
    return std::make_unique<PackedWeight>(
        host.rows, host.columns, impl_->pack(plain.data(), host.columns, host.rows), account);
  } catch (...) {
    account.release(bytes);
    throw;
  }
}

void Linear::run(const LinearParams& p) {
  const auto* weight = dynamic_cast<const PackedWeight*>(p.weight);
  check(weight != nullptr, "a weight of another backend");
  check(p.x.dtype == impl_->compute && p.y.dtype == DType::f32, "linear: wrong dtypes");
  check(p.x.columns == weight->inputs() && p.y.columns == weight->outputs() && p.x.rows == p.y.rows,
        "linear: shapes disagree");
  check(p.x.stride == p.x.columns && p.y.stride == p.y.columns, "linear: rows are not dense");
  const std::vector<Piece> pieces = impl_->divide(p.x.rows, weight->outputs());
  // Every eight tokens are worth a pass over the weights: from there on arithmetic is the limit.
  const std::int64_t passes = 1 + p.x.rows / 8;
  const std::int64_t bytes = weight->outputs() * weight->inputs() *
                             static_cast<std::int64_t>(size_of(impl_->compute)) * passes;
  impl_->threads.for_each(
      static_cast<std::int64_t>(pieces.size()),
      [&](std::int64_t i) { impl_->multiply(p, *weight, pieces[static_cast<std::size_t>(i)]); },
      bytes);
}

bool Linear::bf16_is_fast() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
}

std::string Linear::kernel_name(std::int64_t tokens, std::int64_t inputs,
                                std::int64_t outputs) const {
  return describe(impl_->engine, {tokens, inputs, outputs, false, false}, impl_->compute)
      .impl_info_str();
}

}  // namespace sluice::cpu
