#include "cpu/dense/linear.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "cpu/dense/coded_linear.h"
#include "cpu/dense/half_weights.h"
#include "cpu/dense/onednn.h"
#include "cpu/dense/pair_weights.h"
#include "cpu/runtime/elementwise.h"
#include "cpu/runtime/threads.h"
#include "lib/bytes.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Up to this many tokens, reading weights takes longer than multiplying them without AMX.
constexpr std::int64_t kPairTokens = 4;
// Block of weights widened at a time: 1 MiB per thread, but at least the 16 outputs that oneDNN
// needs to be fast.
constexpr std::int64_t kWidenedFloats = std::int64_t{1} << 18;
constexpr std::int64_t kLeastWidened = 16;
// From this many tokens per thread on, it costs nothing that every thread reads all weights.
constexpr std::int64_t kManyTokens = 16;

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

  // The packed bytes from output `first` on; `first` is a multiple of `block`.
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

// Memory of the calling thread. It grows to the largest request and is kept.
float* widened_of(std::int64_t floats) {
  thread_local std::vector<float> widened;
  if (std::ssize(widened) < floats) widened.resize(static_cast<std::size_t>(floats));
  return widened.data();
}

// A part of one product: some tokens, some outputs.
struct Piece {
  std::int64_t token, tokens, output, outputs;
};

float* y_of(const LinearParams& p, const Piece& piece) {
  return static_cast<float*>(p.y.data) + piece.token * p.y.stride + piece.output;
}
const float* bias_of(const LinearParams& p, const Piece& piece) {
  return p.bias == nullptr ? nullptr : p.bias + piece.output;
}

// The largest power of two <= `number`.
std::int64_t power_below(std::int64_t number) {
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(number)));
}

}  // namespace

struct Linear::Impl {
  Threads& threads;
  DType compute;
  DType stored;
  OneDnn onednn;
  CodedLinear coded;
  MultiplyPairs multiply_pairs;

  Impl(Threads& pool, DType compute_dtype, DType stored_dtype)
      : threads(pool),
        compute(compute_dtype),
        stored(stored_dtype),
        onednn(compute_dtype,
               stored_dtype == compute_dtype ? OneDnn::Weights::packed : OneDnn::Weights::rows),
        coded(pool, compute_dtype),
        multiply_pairs(stored_dtype == DType::bf16 ? pair_multiplier() : nullptr) {
    check(!widens() || compute == DType::f32, "linear: weights of a dtype to compute with in f32");
  }

  bool widens() const { return stored != compute; }
  // Returns true if weights with `inputs` inputs are packed in pairs that multiply_pairs can use.
  bool has_pairs(std::int64_t inputs) {
    return !widens() && multiply_pairs != nullptr && onednn.transposes(inputs);
  }

  // `weights` are those of the piece's outputs.
  void multiply(const LinearParams& p, std::byte* weights, const Piece& piece) {
    onednn.multiply({piece.tokens, p.x.columns, piece.outputs, p.y.stride, row_of(p.x, piece.token),
                     weights, bias_of(p, piece), y_of(p, piece), p.accumulate});
  }
  void multiply(const LinearParams& p, const PackedWeight& weight, const Piece& piece) {
    multiply(p, weight.from(piece.output, onednn.block()), piece);
  }

  void multiply_few(const LinearParams& p, const PackedWeight& weight, const Piece& piece) const {
    FewProduct product;
    product.weights =
        reinterpret_cast<const std::uint16_t*>(weight.from(piece.output, onednn.block()));
    product.dtype = stored;
    product.outputs = piece.outputs;
    product.inputs = weight.inputs();
    product.x = reinterpret_cast<const float*>(row_of(p.x, piece.token));
    product.tokens = piece.tokens;
    product.bias = bias_of(p, piece);
    product.y = y_of(p, piece);
    product.y_stride = p.y.stride;
    product.accumulate = p.accumulate;
    cpu::multiply_few(product);
  }

  // Whole blocks use our own kernel, the remaining outputs oneDNN's.
  void multiply_few_pairs(const LinearParams& p, const PackedWeight& weight, const Piece& piece) {
    const std::int64_t rest = piece.outputs % kBlockOutputs;
    PairProduct product;
    product.weights =
        reinterpret_cast<const std::uint16_t*>(weight.from(piece.output, onednn.block()));
    product.outputs = piece.outputs - rest;
    product.inputs = weight.inputs();
    product.x = reinterpret_cast<const std::uint16_t*>(row_of(p.x, piece.token));
    product.tokens = piece.tokens;
    product.bias = bias_of(p, piece);
    product.y = y_of(p, piece);
    product.y_stride = p.y.stride;
    product.accumulate = p.accumulate;
    multiply_pairs(product);
    if (rest == 0) return;
    multiply(p, weight, {piece.token, piece.tokens, piece.output + product.outputs, rest});
  }

  // Tokens are processed in powers of two, so that few primitives serve every token count.
  void multiply_widened(const LinearParams& p, const PackedWeight& weight, const Piece& piece) {
    float* const widened = widened_of(piece.outputs * weight.inputs());
    convert(weight.from(piece.output, onednn.block()), stored, widened, DType::f32,
            piece.outputs * weight.inputs());
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

  // Outputs per thread, rounded up to whole blocks.
  std::int64_t outputs_of_thread(std::int64_t outputs) const {
    return static_cast<std::int64_t>(
        round_up(static_cast<std::uint64_t>(share(outputs)), kBlockOutputs));
  }

  // One piece of whole blocks per thread, for up to kMaxTokens tokens at a time. Above kManyTokens
  // the token counts are powers of two, so that few primitives serve every count.
  std::vector<Piece> divide_outputs(std::int64_t tokens, std::int64_t outputs) const {
    std::vector<Piece> pieces;
    const std::int64_t part = outputs_of_thread(outputs);
    for (std::int64_t token = 0; token < tokens;) {
      const std::int64_t left = tokens - token;
      const std::int64_t count =
          left <= kManyTokens ? left : std::min(kMaxTokens, power_below(left));
      for (std::int64_t first = 0; first < outputs; first += part) {
        pieces.push_back({token, count, first, std::min(part, outputs - first)});
      }
      token += count;
    }
    return pieces;
  }

  // Pieces of all outputs, with tokens divided among the threads in powers of two.
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

  // Outputs that are widened together.
  static std::int64_t widened_outputs(std::int64_t inputs) {
    const std::int64_t fit = kWidenedFloats / inputs / kLeastWidened * kLeastWidened;
    return std::clamp(fit, kLeastWidened, kBlockOutputs);
  }

  // Blocks of outputs, each for enough tokens that widening the weights costs little.
  static std::vector<Piece> divide_blocks(std::int64_t tokens, const PackedWeight& weight) {
    std::vector<Piece> pieces;
    const std::int64_t block = widened_outputs(weight.inputs());
    for (std::int64_t token = 0; token < tokens; token += kMaxTokens) {
      const std::int64_t count = std::min(kMaxTokens, tokens - token);
      for (std::int64_t first = 0; first < weight.outputs(); first += block) {
        pieces.push_back({token, count, first, std::min(block, weight.outputs() - first)});
      }
    }
    return pieces;
  }

  // Calls body(piece) for every piece, on all threads.
  void for_pieces(const std::vector<Piece>& pieces, std::int64_t bytes, const auto& body) {
    threads.for_each(
        static_cast<std::int64_t>(pieces.size()),
        [&](std::int64_t i) { body(pieces[static_cast<std::size_t>(i)]); }, bytes);
  }

  void run(const LinearParams& p, const PackedWeight& weight) {
    const std::int64_t tokens = p.x.rows;
    // Every eight tokens count as one more pass over the weights, because arithmetic is the limit
    // then.
    const std::int64_t bytes = weight.outputs() * weight.inputs() *
                               static_cast<std::int64_t>(size_of(stored)) * (1 + tokens / 8);
    if (widens() && tokens > kFewTokens) {
      return for_pieces(divide_blocks(tokens, weight), bytes,
                        [&](const Piece& piece) { multiply_widened(p, weight, piece); });
    }
    if (!widens() && share(tokens) >= kManyTokens) {
      return for_pieces(divide_tokens(tokens, weight.outputs()), bytes,
                        [&](const Piece& piece) { multiply(p, weight, piece); });
    }
    const std::vector<Piece> pieces = divide_outputs(tokens, weight.outputs());
    if (widens()) {
      return for_pieces(pieces, bytes, [&](const Piece& piece) { multiply_few(p, weight, piece); });
    }
    if (tokens <= kPairTokens && has_pairs(weight.inputs())) {
      return for_pieces(pieces, bytes,
                        [&](const Piece& piece) { multiply_few_pairs(p, weight, piece); });
    }
    for_pieces(pieces, bytes, [&](const Piece& piece) { multiply(p, weight, piece); });
  }
};

Linear::Linear(Threads& threads, DType compute, DType stored)
    : impl_(std::make_unique<Impl>(threads, compute, stored)) {}

Linear::~Linear() = default;

WeightFormat Linear::format() const { return impl_->stored; }

std::uint64_t Linear::packed_bytes(const WeightShape& shape) const {
  if (shape.format.is_coded()) return CodedLinear::bytes(shape);
  if (!impl_->widens()) return impl_->onednn.packed_bytes(shape.outputs, shape.inputs);
  return static_cast<std::uint64_t>(shape.outputs) * shape.format.row_bytes(shape.inputs);
}

std::uint64_t Linear::widened_bytes(const WeightShape& shape) const {
  if (shape.format.is_coded()) return impl_->coded.widened_bytes(shape);
  if (!impl_->widens()) return 0;
  const std::int64_t inputs = shape.inputs;
  const std::int64_t floats = Impl::widened_outputs(inputs) * inputs * impl_->threads.count();
  return static_cast<std::uint64_t>(floats) * sizeof(float);
}

// Scratch for the longest pieces of divide_blocks(), or of divide_tokens() and divide_outputs().
std::uint64_t Linear::scratch_bytes(const WeightShape& shape) const {
  const Impl& impl = *impl_;
  if (shape.format.is_coded()) return impl.coded.scratch_bytes(shape);
  const auto [outputs, inputs, format] = shape;
  const std::int64_t threads = impl.threads.count();
  if (impl.widens()) {
    const std::int64_t block = Impl::widened_outputs(inputs);
    return static_cast<std::uint64_t>(threads) *
           impl.onednn.scratch_bytes(kMaxTokens, inputs, block, outputs > block);
  }
  const std::uint64_t whole = impl.onednn.scratch_bytes(kMaxTokens, inputs, outputs, false);
  const std::int64_t part = impl.outputs_of_thread(outputs);
  const std::int64_t shared = power_below((kManyTokens - 1) * threads);
  const std::int64_t tokens = std::clamp(shared, kManyTokens, kMaxTokens);
  const std::uint64_t parts = impl.onednn.scratch_bytes(tokens, inputs, part, part < outputs);
  return static_cast<std::uint64_t>(threads) * std::max(whole, parts);
}

std::optional<DType> Linear::dense_dtype() const {
  return impl_->onednn.block() == 1 ? std::optional(impl_->stored) : std::nullopt;
}

std::unique_ptr<Weight> Linear::make_weight(const WeightShape& shape, Buffer memory) const {
  if (shape.format.is_coded()) return std::make_unique<CodedWeight>(shape, std::move(memory));
  return std::make_unique<PackedWeight>(shape.outputs, shape.inputs, std::move(memory),
                                        dense_dtype());
}

std::int64_t Linear::block_outputs(const WeightFormat& format) const {
  return format.is_coded() ? kCodedBlock : impl_->onednn.block();
}

void Linear::write(const WriteWeightParams& p) {
  if (const auto* coded = dynamic_cast<const CodedWeight*>(p.weight)) {
    return CodedLinear::write(*coded, p.first, p.rows);
  }
  auto& packed = dynamic_cast<PackedWeight&>(*p.weight);
  const WeightRows& rows = p.rows;
  check(!rows.format.is_coded(), "write_weight: coded rows of a weight that is not");
  const DType dtype = rows.format.element;
  const std::int64_t first = p.first;
  const std::int64_t block = impl_->onednn.block();
  const std::int64_t end = first + rows.rows;
  check(rows.inputs == packed.inputs() && end <= packed.outputs(), "write_weight: shapes disagree");
  check(first % block == 0 && (end % block == 0 || end == packed.outputs()),
        "write_weight: a part of a block");
  if (block == 1) {
    convert(rows.data, dtype, packed.from(first, block), impl_->stored, rows.rows * rows.inputs);
    return;
  }
  const bool converts = dtype != impl_->compute;
  std::unique_ptr<std::byte[]> converted;
  if (converts) {
    converted = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<std::size_t>(kBlockOutputs * rows.inputs) * size_of(impl_->compute));
  }
  // One block at a time, so that converted rows are still in the cache when they are packed.
  for (std::int64_t row = 0; row < rows.rows; row += kBlockOutputs) {
    const std::int64_t count = std::min(kBlockOutputs, rows.rows - row);
    std::byte* plain = static_cast<std::byte*>(rows.data) +
                       static_cast<std::size_t>(row) * rows.format.row_bytes(rows.inputs);
    if (converts) {
      convert(plain, dtype, converted.get(), impl_->compute, count * rows.inputs);
      plain = converted.get();
    }
    impl_->onednn.pack(plain, rows.inputs, count, packed.from(first + row, block));
  }
}

void Linear::run(const LinearParams& p) {
  const Weight& of = *p.weight;
  check(p.x.dtype == impl_->compute && p.y.dtype == DType::f32, "linear: wrong dtypes");
  check(p.x.columns == of.inputs() && p.y.columns == of.outputs() && p.x.rows == p.y.rows,
        "linear: shapes disagree");
  check(p.x.stride == p.x.columns && p.y.stride == p.y.columns, "linear: rows are not dense");
  if (const auto* coded = dynamic_cast<const CodedWeight*>(&of)) return impl_->coded.run(p, *coded);
  const auto* weight = dynamic_cast<const PackedWeight*>(&of);
  check(weight != nullptr, "a weight of another backend");
  impl_->run(p, *weight);
}

bool Linear::bf16_is_fast() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
}

std::string Linear::kernel_name(std::int64_t tokens, std::int64_t inputs,
                                std::int64_t outputs) const {
  return impl_->onednn.kernel_name(tokens, inputs, outputs);
}

}  // namespace sluice::cpu
