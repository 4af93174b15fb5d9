#include "cpu/linear.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <dnnl.hpp>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "cpu/elementwise.h"
#include "cpu/half_weights.h"
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
  std::int64_t y_stride;  // floats from token to token
  bool bias, accumulate;
  auto operator<=>(const Shape&) const = default;
};

memory::desc weights_of(std::int64_t inputs, std::int64_t outputs, DType dtype,
                        memory::format_tag layout) {
  return memory::desc(memory::dims{inputs, outputs}, to_dnnl(dtype), layout);
}

// Weights as a checkpoint has them: [outputs, inputs] row-major is [inputs, outputs] column-major.
constexpr memory::format_tag kPlain = memory::format_tag::ba;

// Versions 2 and 3 of oneDNN differ in how a matmul is described.
dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const Shape& shape,
                                      memory::format_tag layout, DType compute) {
  const SingleThreadedOpenMp single_threaded;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (shape.accumulate) {
    dnnl::post_ops post_ops;
    post_ops.append_sum();
    attributes.set_post_ops(post_ops);
  }
  const memory::desc x = dense(shape.tokens, shape.inputs, compute);
  const memory::desc weights = weights_of(shape.inputs, shape.outputs, compute, layout);
  const memory::desc bias = shape.bias ? dense(1, shape.outputs, DType::f32) : memory::desc();
  const memory::desc y(memory::dims{shape.tokens, shape.outputs}, to_dnnl(DType::f32),
                       memory::dims{shape.y_stride, 1});
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
  // `dense`: the dtype of its rows, if they are not packed.
  PackedWeight(std::int64_t outputs, std::int64_t inputs, Buffer packed, std::optional<DType> dense)
      : outputs_(outputs), inputs_(inputs), packed_(std::move(packed)), dense_(dense) {}

  std::int64_t outputs() const override { return outputs_; }
  std::int64_t inputs() const override { return inputs_; }
  Matrix dense_rows() const override {
    if (!dense_) return {};
    return {packed_.data(), *dense_, outputs_, inputs_, inputs_};
  }

  // The packed bytes of the outputs from `first`, a multiple of `block`, on.
  std::byte* from(std::int64_t first, std::int64_t block) const {
    const std::int64_t blocks = (outputs_ + block - 1) / block;
    return packed_.data() + static_cast<std::size_t>(first / block) *
                                (packed_.bytes() / static_cast<std::size_t>(blocks));
  }

 private:
  std::int64_t outputs_;
  std::int64_t inputs_;
  Buffer packed_;
  std::optional<DType> dense_;
};

// How dense rows of weights are packed.
struct Packing {
  explicit Packing(const dnnl::reorder::primitive_desc& d)
      : reorder(d), plain(d.src_desc()), packed(d.dst_desc()), scratch(d.scratchpad_desc()) {}
  dnnl::reorder reorder;
  memory::desc plain, packed, scratch;
  bool transposes = false;  // words: transpose() does the same, many times faster
};

// A word is what AVX-512 and AMX multiply at once: one f32, or two bf16 of the same output.
constexpr std::size_t kWordBytes = 4;
constexpr std::int64_t kLineWords = 16;  // of a cache line

// [kBlockOutputs, words] to [words, kBlockOutputs]. Source lines are read once and targets written
// while they are in the first cache.
void transpose(const std::uint32_t* from, std::int64_t words, std::uint32_t* to) {
  for (std::int64_t first = 0; first < words; first += kLineWords) {
    for (std::int64_t output = 0; output < kBlockOutputs; ++output) {
      const std::uint32_t* const line = from + output * words + first;
      std::uint32_t* const column = to + first * kBlockOutputs + output;
      for (std::int64_t i = 0; i < kLineWords; ++i) column[i * kBlockOutputs] = line[i];
    }
  }
}

// Memory of the calling thread; never null. It grows to what was asked for, and keeps it.
std::byte* grown(std::vector<std::byte>& memory, std::size_t bytes) {
  if (memory.size() <= bytes) memory.resize(bytes + 1);
  return memory.data();
}
std::byte* scratch_of(std::size_t bytes) {
  thread_local std::vector<std::byte> scratch;
  return grown(scratch, bytes);
}
float* widened_of(std::int64_t floats) {
  thread_local std::vector<std::byte> widened;
  return reinterpret_cast<float*>(grown(widened, static_cast<std::size_t>(floats) * sizeof(float)));
}

// A part of one product: some tokens, some outputs.
struct Piece {
  std::int64_t token, tokens, output, outputs;
};

float* y_of(const LinearParams& p, const Piece& piece) {
  return static_cast<float*>(p.y.data) + piece.token * p.y.stride + piece.output;
}

// The largest power of two up to a number.
std::int64_t power_below(std::int64_t number) {
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(number)));
}

}  // namespace

struct Linear::Impl {
  Threads& threads;
  DType compute;
  DType stored;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  std::int64_t block = kBlockOutputs;  // outputs that are packed together
  std::mutex mutex;                    // guards the maps
  std::map<Shape, Primitive> primitives;
  std::map<std::pair<std::int64_t, std::int64_t>, Packing> packings;  // by inputs and outputs

  Impl(Threads& pool, DType compute_dtype, DType stored_dtype)
      : threads(pool), compute(compute_dtype), stored(stored_dtype) {
    check(!widens() || compute == DType::f32, "linear: weights of a dtype to compute with in f32");
    if (!widens() && packing_is_consecutive()) return;
    block = 1;
    packings.clear();
  }

  bool widens() const { return stored != compute; }

  dnnl::matmul::primitive_desc describe(const Shape& shape) const {
    return cpu::describe(engine, shape, block == 1 ? kPlain : memory::format_tag::any, compute);
  }

  // oneDNN chooses one layout for the weights whatever the number of tokens, but promises nothing:
  // primitive() checks that it did. Where that would not have outputs one after the other, weights
  // stay plain.
  memory::desc layout(std::int64_t inputs, std::int64_t outputs) const {
    return describe({kMaxTokens, inputs, outputs, outputs, false, false}).weights_desc();
  }

  const Packing& packing(std::int64_t inputs, std::int64_t outputs) {
    const std::lock_guard lock(mutex);
    const auto found = packings.find({inputs, outputs});
    if (found != packings.end()) return found->second;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    Packing packing(dnnl::reorder::primitive_desc(engine,
                                                  weights_of(inputs, outputs, compute, kPlain),
                                                  engine, layout(inputs, outputs), attributes));
    packing.transposes = is_transpose(packing, inputs, outputs);
    return packings.try_emplace({inputs, outputs}, std::move(packing)).first->second;
  }

  // Whether it is, found out by doing it.
  bool is_transpose(const Packing& packing, std::int64_t inputs, std::int64_t outputs) const {
    const std::size_t bytes = packing.plain.get_size();
    if (outputs != kBlockOutputs || packing.packed.get_size() != bytes ||
        static_cast<std::size_t>(inputs) * size_of(compute) % (kLineWords * kWordBytes) != 0) {
      return false;
    }
    std::vector<std::uint32_t> plain(bytes / kWordBytes);
    // Finite numbers in any dtype, and no two halves of a word alike.
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

  void reorder(const Packing& packing, std::byte* plain, std::byte* to) const {
    const SingleThreadedOpenMp single_threaded;
    dnnl::stream stream(engine);
    std::byte* const scratch = scratch_of(packing.scratch.get_size());
    packing.reorder.execute(stream,
                            {{DNNL_ARG_FROM, memory(packing.plain, engine, plain)},
                             {DNNL_ARG_TO, memory(packing.packed, engine, to)},
                             {DNNL_ARG_SCRATCHPAD, memory(packing.scratch, engine, scratch)}});
    stream.wait();
  }

  // Packs dense rows in the compute dtype.
  void pack(std::byte* plain, std::int64_t inputs, std::int64_t outputs, std::byte* to) {
    const Packing& packing = this->packing(inputs, outputs);
    if (packing.transposes) {
      const auto words = static_cast<std::int64_t>(static_cast<std::size_t>(inputs) *
                                                   size_of(compute) / kWordBytes);
      transpose(reinterpret_cast<std::uint32_t*>(plain), words,
                reinterpret_cast<std::uint32_t*>(to));
    } else {
      reorder(packing, plain, to);
    }
  }

  // Whether packing two blocks of outputs gives the bytes of packing them one by one.
  bool packing_is_consecutive() {
    constexpr std::int64_t kInputs = 64;
    const std::size_t half = kBlockOutputs * kInputs * size_of(compute);
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

  const Primitive& primitive(const Shape& shape) {
    const std::lock_guard lock(mutex);
    auto found = primitives.find(shape);
    if (found == primitives.end()) {
      found = primitives.try_emplace(shape, describe(shape)).first;
      check(found->second.weights == layout(shape.inputs, shape.outputs),
            "oneDNN wants weights packed differently for different numbers of tokens");
    }
    return found->second;
  }

  // `weights`: those of the piece's outputs.
  void multiply(const LinearParams& p, std::byte* weights, const Piece& piece) {
    const SingleThreadedOpenMp single_threaded;
    const Primitive& primitive = this->primitive({piece.tokens, p.x.columns, piece.outputs,
                                                  piece.tokens == 1 ? piece.outputs : p.y.stride,
                                                  p.bias != nullptr, p.accumulate});
    std::byte* const scratch = scratch_of(primitive.scratch.get_size());
    std::byte* const x = row_of(p.x, piece.token);
    float* const y = y_of(p, piece);
    std::unordered_map<int, memory> arguments{
        {DNNL_ARG_SRC, memory(primitive.x, engine, x)},
        {DNNL_ARG_WEIGHTS, memory(primitive.weights, engine, weights)},
        {DNNL_ARG_DST, memory(primitive.y, engine, y)},
        {DNNL_ARG_SCRATCHPAD, memory(primitive.scratch, engine, scratch)}};
    if (p.bias != nullptr) {
      // oneDNN takes a mutable pointer but only reads it.
      auto* bias = const_cast<float*>(p.bias + piece.output);
      arguments.emplace(DNNL_ARG_BIAS, memory(primitive.bias, engine, bias));
    }
    dnnl::stream stream(engine);
    primitive.matmul.execute(stream, arguments);
    stream.wait();
  }

  void multiply(const LinearParams& p, const PackedWeight& weight, const Piece& piece) {
    multiply(p, weight.from(piece.output, block), piece);
  }

  HalfRows half_rows(const PackedWeight& weight, const Piece& piece) const {
    return {reinterpret_cast<const std::uint16_t*>(weight.from(piece.output, block)), stored,
            piece.outputs, weight.inputs()};
  }

  void multiply_few(const LinearParams& p, const PackedWeight& weight, const Piece& piece) const {
    FewProduct product;
    product.rows = half_rows(weight, piece);
    product.x = reinterpret_cast<const float*>(row_of(p.x, piece.token));
    product.tokens = piece.tokens;
    product.bias = p.bias == nullptr ? nullptr : p.bias + piece.output;
    product.y = y_of(p, piece);
    product.y_stride = p.y.stride;
    product.accumulate = p.accumulate;
    cpu::multiply_few(product);
  }

  // Tokens in powers of two.
  void multiply_widened(const LinearParams& p, const PackedWeight& weight, const Piece& piece) {
    float* const widened = widened_of(piece.outputs * weight.inputs());
    widen(half_rows(weight, piece), widened);
    for (std::int64_t done = 0; done < piece.tokens;) {
      const std::int64_t tokens = power_below(piece.tokens - done);
      multiply(p, reinterpret_cast<std::byte*>(widened),
               {piece.token + done, tokens, piece.output, piece.outputs});
      done += tokens;
    }
  }

  std::int64_t share(std::int64_t items) const {
    return (items + threads.count() - 1) / threads.count();
  }

  // Outputs of `tokens`, a piece per thread.
  std::vector<Piece> divide_outputs(std::int64_t tokens, std::int64_t outputs) const {
    std::vector<Piece> pieces;
    const auto width = static_cast<std::int64_t>(
        round_up(static_cast<std::uint64_t>(share(outputs)), kBlockOutputs));
    for (std::int64_t first = 0; first < outputs; first += width) {
      pieces.push_back({0, tokens, first, std::min(width, outputs - first)});
    }
    return pieces;
  }

  // Tokens, a piece per thread where they can be divided like that.
  std::vector<Piece> divide_tokens(std::int64_t tokens, std::int64_t outputs) const {
    std::vector<Piece> pieces;
    const auto most = std::min(
        kMaxTokens,
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(share(tokens)))));
    for (std::int64_t token = 0; token < tokens;) {
      const std::int64_t count = std::min(most, power_below(tokens - token));
      pieces.push_back({token, count, 0, outputs});
      token += count;
    }
    return pieces;
  }

  // Blocks of outputs, for so many tokens at a time that widening them counts little.
  static std::vector<Piece> divide_blocks(std::int64_t tokens, std::int64_t outputs) {
    std::vector<Piece> pieces;
    for (std::int64_t token = 0; token < tokens; token += kMaxTokens) {
      const std::int64_t count = std::min(kMaxTokens, tokens - token);
      for (std::int64_t first = 0; first < outputs; first += kBlockOutputs) {
        pieces.push_back({token, count, first, std::min(kBlockOutputs, outputs - first)});
      }
    }
    return pieces;
  }

  // Calls body(piece) for all of them, on all threads.
  void for_pieces(const std::vector<Piece>& pieces, std::int64_t bytes, const auto& body) {
    threads.for_each(
        static_cast<std::int64_t>(pieces.size()),
        [&](std::int64_t i) { body(pieces[static_cast<std::size_t>(i)]); }, bytes);
  }

  void run(const LinearParams& p, const PackedWeight& weight) {
    const std::int64_t tokens = p.x.rows;
    // Every eight tokens are worth a pass over the weights: from there on arithmetic is the limit.
    const std::int64_t bytes = weight.outputs() * weight.inputs() *
                               static_cast<std::int64_t>(size_of(stored)) * (1 + tokens / 8);
    if (widens() && tokens <= kFewTokens) {
      return for_pieces(divide_outputs(tokens, weight.outputs()), bytes,
                        [&](const Piece& piece) { multiply_few(p, weight, piece); });
    }
    if (widens()) {
      return for_pieces(divide_blocks(tokens, weight.outputs()), bytes,
                        [&](const Piece& piece) { multiply_widened(p, weight, piece); });
    }
    for_pieces(tokens == 1 ? divide_outputs(tokens, weight.outputs())
                           : divide_tokens(tokens, weight.outputs()),
               bytes, [&](const Piece& piece) { multiply(p, weight, piece); });
  }
};

Linear::Linear(Threads& threads, DType compute, DType stored)
    : impl_(std::make_unique<Impl>(threads, compute, stored)) {}

Linear::~Linear() = default;

std::uint64_t Linear::packed_bytes(std::int64_t outputs, std::int64_t inputs) const {
  if (impl_->widens()) return static_cast<std::uint64_t>(outputs * inputs) * size_of(impl_->stored);
  return impl_->layout(inputs, outputs).get_size();
}

std::optional<DType> Linear::dense_dtype() const {
  return impl_->block == 1 ? std::optional(impl_->stored) : std::nullopt;
}

std::unique_ptr<Weight> Linear::make_weight(std::int64_t outputs, std::int64_t inputs,
                                            Buffer memory) const {
  return std::make_unique<PackedWeight>(outputs, inputs, std::move(memory), dense_dtype());
}

std::int64_t Linear::block_outputs() const { return impl_->block; }

void Linear::write(Weight& weight, std::int64_t first, const Matrix& rows) {
  auto& packed = dynamic_cast<PackedWeight&>(weight);
  const std::int64_t block = impl_->block;
  const std::int64_t end = first + rows.rows;
  check(rows.columns == packed.inputs() && rows.stride == rows.columns && end <= packed.outputs(),
        "write_weight: shapes disagree");
  check(first % block == 0 && (end % block == 0 || end == packed.outputs()),
        "write_weight: a part of a block");
  if (impl_->widens()) {
    convert(row_of(rows, 0), rows.dtype, packed.from(first, block), impl_->stored,
            rows.rows * rows.columns);
    return;
  }
  const bool converts = rows.dtype != impl_->compute;
  std::unique_ptr<std::byte[]> converted;
  if (converts) {
    converted = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<std::size_t>(kBlockOutputs * rows.columns) * size_of(impl_->compute));
  }
  // A block at a time: it is in the cache still when what was converted is packed.
  for (std::int64_t row = 0; row < rows.rows; row += kBlockOutputs) {
    const std::int64_t count = std::min(kBlockOutputs, rows.rows - row);
    std::byte* plain = row_of(rows, row);
    if (converts) {
      convert(plain, rows.dtype, converted.get(), impl_->compute, count * rows.columns);
      plain = converted.get();
    }
    impl_->pack(plain, rows.columns, count, packed.from(first + row, block));
  }
}

void Linear::run(const LinearParams& p) {
  const auto* weight = dynamic_cast<const PackedWeight*>(p.weight);
  check(weight != nullptr, "a weight of another backend");
  check(p.x.dtype == impl_->compute && p.y.dtype == DType::f32, "linear: wrong dtypes");
  check(p.x.columns == weight->inputs() && p.y.columns == weight->outputs() && p.x.rows == p.y.rows,
        "linear: shapes disagree");
  check(p.x.stride == p.x.columns && p.y.stride == p.y.columns, "linear: rows are not dense");
  impl_->run(p, *weight);
}

bool Linear::bf16_is_fast() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
}

std::string Linear::kernel_name(std::int64_t tokens, std::int64_t inputs,
                                std::int64_t outputs) const {
  return impl_->describe({tokens, inputs, outputs, outputs, false, false}).impl_info_str();
}

}  // namespace sluice::cpu
