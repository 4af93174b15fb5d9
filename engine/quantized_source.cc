// Where codes lie (w: a word of 32 bits with n = 32 / bits codes, the lowest bits first):
//
//            codes                       zeros                    scales
//   gptq     w [inputs / n, outputs]     w [groups, outputs / n]  [groups, outputs]
//   awq      w [inputs, outputs / 8]     w [groups, outputs / 8]  [groups, outputs]
//   packed   w [outputs, inputs / n]     w [outputs / n, groups]  [outputs, groups]
//   fp8      bytes [outputs, inputs]     none                     [], [outputs] or by block
//
// Codes of AWQ's words are those of outputs 0, 2, 4, 6, 1, 3, 5, 7. Codes and zeros of packed
// weights are stored plus 2^(bits - 1); without zeros they are symmetric.
// Sources: AutoGPTQ's and GPTQModel's QuantLinear, AutoAWQ's packing_utils, compressed-tensors'
// pack_quantized and naive_quantized, transformers' finegrained_fp8; OCP 8-bit floating point 1.0.
#include "engine/quantized_source.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "lib/check.h"
#include "lib/text.h"
#include "lib/weight_code.h"
#include "sluice/errors.h"
#include "sluice/half.h"

namespace sluice {
namespace {

constexpr std::size_t kPiece = std::size_t{256} << 10;  // of codes that are read at a time
constexpr std::int64_t kTransposedRows = 256;           // outputs that are decoded at a time

float e4m3_to_float(std::uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

std::array<float, 256> all_e4m3() {
  std::array<float, 256> all{};
  for (std::size_t code = 0; code < all.size(); ++code) {
    all[code] = e4m3_to_float(static_cast<std::uint8_t>(code));
  }
  return all;
}

// Place in a word of the output `lane` of eight.
constexpr int awq_place(int lane) { return lane % 2 == 0 ? lane / 2 : 4 + lane / 2; }

int code_at(std::uint32_t word, int place, int bits) {
  return static_cast<int>(word >> (place * bits)) & ((1 << bits) - 1);
}

// A weight, and the tensors that it is made of.
struct Entry {
  TensorInfo info;
  SourceTensor codes;
  SourceTensor scales;
  SourceTensor zeros;  // without info: none
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;
  std::int64_t group = 0;           // inputs per scale
  std::int64_t rows_per_scale = 1;  // outputs per scale
  float largest_scale = 0.0f;

  std::int64_t groups() const { return (inputs + group - 1) / group; }
};

// Weights [first, end) of a tensor, decoded.
struct Elements {
  std::int64_t inputs;
  std::int64_t first;
  std::int64_t end;
  DType dtype;
  std::byte* to;

  void put(std::int64_t row, std::int64_t column, int code, int zero, float scale) const {
    put(row, column, static_cast<float>(code - zero) * scale);
  }
  void put(std::int64_t row, std::int64_t column, float value) const {
    const std::int64_t at = row * inputs + column;
    if (at < first || at >= end) return;
    const std::uint16_t bits = dtype == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
    std::memcpy(to + (at - first) * 2, &bits, 2);
  }
};

// Coded rows [first, end) of a tensor, whose columns come in ascending order.
struct CodedTarget {
  WeightFormat format;
  CodedRow at;
  std::size_t row_bytes;
  int middle;  // of the codes: what int8 has as zero
  std::int64_t first;
  std::int64_t end;
  std::byte* to;

  void put(std::int64_t row, std::int64_t column, int code, int zero, float scale) const {
    if (row < first || row >= end) return;
    std::byte* const here = to + static_cast<std::size_t>(row - first) * row_bytes;
    const auto c = static_cast<std::size_t>(column);
    if (column % kWeightGroup == 0) {
      const std::array line = {float_to_f16(scale),
                               float_to_f16(static_cast<float>(middle - zero) * scale)};
      const std::size_t group = c / kWeightGroup * sizeof line[0];
      std::memcpy(here + group, &line[0], sizeof line[0]);
      std::memcpy(here + at.offsets + group, &line[1], sizeof line[1]);
    }
    if (format.code == WeightCode::int8) {
      here[at.codes + c] = static_cast<std::byte>(code - middle);
    } else if (column % 2 == 0) {
      here[at.codes + c / 2] = static_cast<std::byte>(code);
    } else {
      here[at.codes + c / 2] |= static_cast<std::byte>(code << 4);
    }
  }
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

class QuantizedSource final : public TensorSource {
 public:
  QuantizedSource(std::unique_ptr<const TensorSource> stored, const Quantization& how)
      : stored_(std::move(stored)), how_(how), e4m3_(all_e4m3()), plain_(stored_->tensors()) {
    const std::string_view suffix = how.method == QuantMethod::packed ? ".weight_packed"
                                    : how.method == QuantMethod::fp8  ? ".weight"
                                                                      : ".qweight";
    const std::map<std::string_view, SourceTensor> all = plain_;
    for (const auto& [name, tensor] : all) {
      if (!name.ends_with(suffix)) continue;
      if (how.method == QuantMethod::fp8 && tensor.info->stored_dtype != "F8_E4M3") continue;
      add(std::string(name.substr(0, name.size() - suffix.size())), tensor);
    }
    if (entries_.empty()) {
      throw Error(ErrorCode::corrupt,
                  path().string() + ": has no tensor of " + how.name +
                      ", which the quantization_config of its config.json describes");
    }
  }

  const std::filesystem::path& path() const override { return stored_->path(); }
  std::string_view config_name() const override { return stored_->config_name(); }
  std::string_view layer_fields() const override { return stored_->layer_fields(); }
  std::string own_name(std::string_view name) const override { return stored_->own_name(name); }

  std::map<std::string_view, SourceTensor> tensors() const override {
    std::map<std::string_view, SourceTensor> all = plain_;
    for (const auto& [name, entry] : entries_) {
      const std::uint64_t zeros = entry.zeros.info == nullptr ? 0 : entry.zeros.stored_bytes;
      all.insert_or_assign(
          name, SourceTensor{&entry.info, entry.codes.file, entry.codes.part,
                             entry.codes.stored_bytes + entry.scales.stored_bytes + zeros,
                             code_of(entry)});
    }
    return all;
  }

  void require_loadable(const SourceTensor& tensor) const override {
    if (find(tensor) == nullptr) stored_->require_loadable(tensor);
  }

  void read(const SourceTensor& tensor, std::uint64_t first,
            std::span<std::byte> destination) const override {
    const Entry* const entry = find(tensor);
    if (entry == nullptr) return stored_->read(tensor, first, destination);
    check(first % 2 == 0 && destination.size() % 2 == 0, "a part of an element");
    const auto begin = static_cast<std::int64_t>(first / 2);
    const Elements target = {entry->inputs, begin,
                             begin + static_cast<std::int64_t>(destination.size() / 2),
                             *entry->info.dtype, destination.data()};
    if (target.end == target.first) return;
    const std::int64_t rows = target.first / entry->inputs;
    const std::int64_t end = (target.end + entry->inputs - 1) / entry->inputs;
    read_into(target, *entry, rows, end);
  }

  void read_codes(const SourceTensor& tensor, std::int64_t first, WeightCode code,
                  std::span<std::byte> destination) const override {
    const Entry& entry = entries_.at(tensor.info->name);
    const WeightFormat format = code;
    const std::size_t row_bytes = format.row_bytes(entry.inputs);
    const std::int64_t end = first + static_cast<std::int64_t>(destination.size() / row_bytes);
    const int middle = how_.bits == 8 ? 128 : 0;
    read_into(CodedTarget{format, CodedRow(format, entry.inputs), row_bytes, middle, first, end,
                          destination.data()},
              entry, first, end);
  }

  std::uint64_t scratch_bytes() const override {
    std::uint64_t most = 0;
    for (const auto& [name, entry] : entries_) most = std::max(most, scratch_of(entry));
    return std::max(most, stored_->scratch_bytes());
  }

  void require_unchanged() const override { stored_->require_unchanged(); }

 private:
  bool is_transposed() const {
    return how_.method == QuantMethod::gptq || how_.method == QuantMethod::awq;
  }
  std::int64_t codes_in_word() const { return 32 / how_.bits; }

  // E4M3 has no line of codes, and a coded row no scales for less than a group. Scales and offsets
  // are f16 there, which has no steps of less than 2^-24 and ends at 65504.
  WeightCode code_of(const Entry& entry) const {
    constexpr float kLeastScale = 0x1p-16f;
    constexpr float kMostScale = 128.0f;
    const bool is_in_groups = entry.inputs % kWeightGroup == 0 && entry.group % kWeightGroup == 0;
    const bool is_in_range =
        entry.largest_scale >= kLeastScale && entry.largest_scale <= kMostScale;
    if (how_.method == QuantMethod::fp8 || !is_in_groups || !is_in_range) {
      return WeightCode::elements;
    }
    return how_.bits == 8 ? WeightCode::int8 : WeightCode::uint4;
  }

  const Entry* find(const SourceTensor& tensor) const {
    const auto found = entries_.find(tensor.info->name);
    return found != entries_.end() && &found->second.info == tensor.info ? &found->second : nullptr;
  }

  // ---- Headers

  [[noreturn]] void corrupt(const std::string& name, const std::string& what) const {
    throw Error(ErrorCode::corrupt, path().string() + ": tensor " + in_quotes(name) + " " + what +
                                        "; download the checkpoint again");
  }

  // Takes a tensor out of those that are read as they are.
  std::optional<SourceTensor> take(const std::string& name) {
    const auto found = plain_.find(name);
    if (found == plain_.end()) return std::nullopt;
    const SourceTensor tensor = found->second;
    plain_.erase(found);
    return tensor;
  }

  SourceTensor require(const std::string& name, const std::string& of) {
    const std::optional<SourceTensor> tensor = take(name);
    if (!tensor) corrupt(of, "has no " + in_quotes(name));
    return *tensor;
  }

  void require_shape(const SourceTensor& tensor, std::string_view dtype,
                     const std::vector<std::int64_t>& shape) const {
    const TensorInfo& info = *tensor.info;
    if (!dtype.empty() && info.stored_dtype != dtype) {
      corrupt(info.name, "is " + info.stored_dtype + ", not " + std::string(dtype));
    }
    if (info.shape != shape) {
      corrupt(info.name, "has the shape " + shape_text(info.shape) + ", not " + shape_text(shape));
    }
  }

  void add(const std::string& base, const SourceTensor& codes) {
    const std::string name = codes.info->name;
    if (codes.info->shape.size() != 2 || codes.info->elements() == 0) {
      corrupt(name, "has the shape " + shape_text(codes.info->shape) + ", which is no matrix");
    }
    plain_.erase(codes.info->name);
    Entry entry;
    entry.codes = codes;
    if (how_.method == QuantMethod::fp8) {
      add_fp8(base, entry);
    } else if (how_.method == QuantMethod::packed) {
      add_packed(base, entry);
    } else {
      add_transposed(base, entry);
    }
    entry.largest_scale = largest_scale(entry);
    const DType scale = entry.scales.info->dtype.value();
    entry.info.name = base + ".weight";
    entry.info.stored_dtype = how_.name;
    entry.info.dtype = scale == DType::f16 ? DType::f16 : DType::bf16;
    entry.info.shape = {entry.outputs, entry.inputs};
    entry.info.end = static_cast<std::uint64_t>(entry.outputs * entry.inputs) * 2;
    if (plain_.contains(entry.info.name)) corrupt(entry.info.name, "is there beside its codes");
    entries_.emplace(entry.info.name, std::move(entry));
  }

  void set_group(Entry& entry) const {
    entry.group = how_.group == 0 ? entry.inputs : how_.group;
    if (entry.inputs % entry.group == 0) return;
    corrupt(entry.codes.info->name, "has " + std::to_string(entry.inputs) +
                                        " inputs, which groups of " + std::to_string(entry.group) +
                                        " do not divide");
  }

  void add_transposed(const std::string& base, Entry& entry) {
    const std::vector<std::int64_t>& shape = entry.codes.info->shape;
    const std::int64_t n = codes_in_word();
    const bool is_gptq = how_.method == QuantMethod::gptq;
    entry.inputs = is_gptq ? shape[0] * n : shape[0];
    entry.outputs = is_gptq ? shape[1] : shape[1] * n;
    require_shape(entry.codes, "I32", shape);
    if (entry.outputs % n != 0)
      corrupt(entry.codes.info->name, "has outputs that words do not fit");
    set_group(entry);
    entry.scales = require(base + ".scales", entry.codes.info->name);
    require_shape(entry.scales, "", {entry.groups(), entry.outputs});
    entry.zeros = require(base + ".qzeros", entry.codes.info->name);
    require_shape(entry.zeros, "I32", {entry.groups(), entry.outputs / n});
    if (const std::optional<SourceTensor> order = take(base + ".g_idx")) {
      require_order(*order, entry);
    }
  }

  void add_packed(const std::string& base, Entry& entry) {
    const std::string& name = entry.codes.info->name;
    const std::int64_t n = codes_in_word();
    const SourceTensor size = require(base + ".weight_shape", name);
    require_shape(size, "I64", {2});
    std::array<std::int64_t, 2> shape{};
    stored_->read(size, 0, std::as_writable_bytes(std::span(shape)));
    const std::vector<std::int64_t>& words = entry.codes.info->shape;
    const std::int64_t most = words[1] * n;
    if (shape[0] != words[0] || shape[1] > most || shape[1] <= most - n) {
      corrupt(size.info->name, "says " + shape_text({shape.begin(), shape.end()}) +
                                   ", which are not in words " + shape_text(words));
    }
    entry.outputs = shape[0];
    entry.inputs = shape[1];
    require_shape(entry.codes, "I32", words);
    set_group(entry);
    entry.scales = require(base + ".weight_scale", name);
    require_shape(entry.scales, "", {entry.outputs, entry.groups()});
    if (const std::optional<SourceTensor> zeros = take(base + ".weight_zero_point")) {
      entry.zeros = *zeros;
      require_shape(entry.zeros, "I32", {(entry.outputs + n - 1) / n, entry.groups()});
    }
    if (const std::optional<SourceTensor> order = take(base + ".weight_g_idx")) {
      require_order(*order, entry);
    }
  }

  void add_fp8(const std::string& base, Entry& entry) {
    const std::string& name = entry.codes.info->name;
    entry.outputs = entry.codes.info->shape[0];
    entry.inputs = entry.group = entry.codes.info->shape[1];
    std::optional<SourceTensor> scales = take(base + ".weight_scale_inv");
    entry.scales = scales ? *scales : require(base + ".weight_scale", name);
    take(base + ".input_scale");  // of activations, which stay as they are
    const std::vector<std::int64_t>& shape = entry.scales.info->shape;
    if (how_.block > 0) {
      entry.group = entry.rows_per_scale = how_.block;
      return require_shape(entry.scales, "",
                           {(entry.outputs + how_.block - 1) / how_.block, entry.groups()});
    }
    if (entry.scales.info->elements() == 1 && shape.size() <= 2) {
      entry.rows_per_scale = entry.outputs;
    } else if (shape != std::vector{entry.outputs}) {
      require_shape(entry.scales, "", {entry.outputs, 1});
    }
  }

  // Groups must be runs of inputs.
  void require_order(const SourceTensor& order, const Entry& entry) const {
    require_shape(order, "I32", {entry.inputs});
    std::vector<std::int32_t> groups(static_cast<std::size_t>(entry.inputs));
    stored_->read(order, 0, std::as_writable_bytes(std::span(groups)));
    for (std::int64_t i = 0; i < entry.inputs; ++i) {
      if (groups[static_cast<std::size_t>(i)] == i / entry.group) continue;
      throw Error(ErrorCode::unsupported,
                  path().string() + ": tensor " + in_quotes(order.info->name) + " puts input " +
                      std::to_string(i) +
                      " into another group than its neighbours (desc_act or actorder), which "
                      "Sluice does not compute");
    }
  }

  // Throws Error{corrupt} if a scale is NaN or infinite.
  float largest_scale(const Entry& entry) const {
    float largest = 0.0f;
    const TensorInfo& info = *entry.scales.info;
    if (!info.dtype) corrupt(info.name, "is " + info.stored_dtype + ", not F16, BF16 or F32");
    const std::int64_t count = info.elements();
    const std::int64_t most = static_cast<std::int64_t>(kPiece / sizeof(float));
    for (std::int64_t first = 0; first < count; first += most) {
      for (const float scale : floats(entry.scales, first, std::min(most, count - first))) {
        if (!std::isfinite(scale)) corrupt(info.name, "has a scale that is NaN or infinite");
        largest = std::max(largest, std::abs(scale));
      }
    }
    return largest;
  }

  // ---- Elements

  std::vector<float> floats(const SourceTensor& tensor, std::int64_t first,
                            std::int64_t count) const {
    const DType dtype = *tensor.info->dtype;
    std::vector<float> values(static_cast<std::size_t>(count));
    if (dtype == DType::f32) {
      stored_->read(tensor, static_cast<std::uint64_t>(first) * 4,
                    std::as_writable_bytes(std::span(values)));
      return values;
    }
    std::vector<std::uint16_t> raw(values.size());
    stored_->read(tensor, static_cast<std::uint64_t>(first) * 2,
                  std::as_writable_bytes(std::span(raw)));
    std::transform(raw.begin(), raw.end(), values.begin(),
                   dtype == DType::f16 ? f16_to_float : bf16_to_float);
    return values;
  }

  std::vector<std::uint32_t> words(const SourceTensor& tensor, std::int64_t first,
                                   std::int64_t count) const {
    std::vector<std::uint32_t> values(static_cast<std::size_t>(count));
    stored_->read(tensor, static_cast<std::uint64_t>(first) * 4,
                  std::as_writable_bytes(std::span(values)));
    return values;
  }

  // Rows [first, end).
  template <typename Target>
  void read_into(const Target& target, const Entry& entry, std::int64_t first,
                 std::int64_t end) const {
    is_transposed() ? read_transposed(entry, first, end, target)
                    : read_rows(entry, first, end, target);
  }

  // Rows [first, end) of a GPTQ or AWQ weight, which are columns of the stored matrix.
  template <typename Target>
  void read_transposed(const Entry& entry, std::int64_t first, std::int64_t end,
                       const Target& target) const {
    // Whole words, because those of AWQ hold several outputs.
    first -= first % 8;
    for (; first < end; first += kTransposedRows) {
      const std::int64_t rows = std::min(kTransposedRows, entry.outputs - first);
      how_.method == QuantMethod::gptq ? read_gptq(entry, first, rows, target)
                                       : read_awq(entry, first, rows, target);
    }
  }

  // The zeros of outputs [first, first + rows) in a group.
  std::vector<int> zeros(const Entry& entry, std::int64_t group, std::int64_t first,
                         std::int64_t rows) const {
    const std::int64_t n = codes_in_word();
    const std::int64_t word = first / n;
    const std::int64_t end = (first + rows + n - 1) / n;
    const std::vector<std::uint32_t> stored =
        words(entry.zeros, group * (entry.outputs / n) + word, end - word);
    std::vector<int> result;
    for (std::int64_t row = first; row < first + rows; ++row) {
      const auto lane = static_cast<int>(row % n);
      const int place = how_.method == QuantMethod::awq ? awq_place(lane) : lane;
      result.push_back(code_at(stored[static_cast<std::size_t>(row / n - word)], place, how_.bits) +
                       how_.zero_offset);
    }
    return result;
  }

  template <typename Target>
  void read_gptq(const Entry& entry, std::int64_t first, std::int64_t rows,
                 const Target& target) const {
    const std::int64_t n = codes_in_word();
    for (std::int64_t group = 0; group < entry.groups(); ++group) {
      const std::vector<float> scales = floats(entry.scales, group * entry.outputs + first, rows);
      const std::vector<int> zeros = this->zeros(entry, group, first, rows);
      for (std::int64_t input = group * entry.group; input < (group + 1) * entry.group;
           input += n) {
        const std::vector<std::uint32_t> codes =
            words(entry.codes, input / n * entry.outputs + first, rows);
        for (std::int64_t row = 0; row < rows; ++row) {
          const auto r = static_cast<std::size_t>(row);
          for (int i = 0; i < static_cast<int>(n); ++i) {
            target.put(first + row, input + i, code_at(codes[r], i, how_.bits), zeros[r],
                       scales[r]);
          }
        }
      }
    }
  }

  template <typename Target>
  void read_awq(const Entry& entry, std::int64_t first, std::int64_t rows,
                const Target& target) const {
    const std::int64_t width = entry.outputs / 8;
    for (std::int64_t group = 0; group < entry.groups(); ++group) {
      const std::vector<float> scales = floats(entry.scales, group * entry.outputs + first, rows);
      const std::vector<int> zeros = this->zeros(entry, group, first, rows);
      for (std::int64_t input = group * entry.group; input < (group + 1) * entry.group; ++input) {
        const std::vector<std::uint32_t> codes =
            words(entry.codes, input * width + first / 8, rows / 8);
        for (std::int64_t row = 0; row < rows; ++row) {
          const auto r = static_cast<std::size_t>(row);
          const int place = awq_place(static_cast<int>(row % 8));
          target.put(first + row, input, code_at(codes[r / 8], place, 4), zeros[r], scales[r]);
        }
      }
    }
  }

  // Rows [first, end) of a packed or fp8 weight, as they are stored.
  template <typename Target>
  void read_rows(const Entry& entry, std::int64_t first, std::int64_t end,
                 const Target& target) const {
    const std::int64_t most = rows_at_once(entry);
    for (; first < end; first += most) {
      const std::int64_t rows = std::min(most, end - first);
      if (how_.method != QuantMethod::fp8) {
        read_packed(entry, first, rows, target);
      } else if constexpr (std::is_same_v<Target, Elements>) {
        read_fp8(entry, first, rows, target);
      }
    }
  }

  std::int64_t rows_at_once(const Entry& entry) const {
    const auto row = static_cast<std::int64_t>(entry.codes.info->bytes()) / entry.outputs;
    return std::max<std::int64_t>(
        static_cast<std::int64_t>(kPiece) / std::max<std::int64_t>(row, 1), 1);
  }

  void read_fp8(const Entry& entry, std::int64_t first, std::int64_t rows,
                const Elements& target) const {
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * entry.inputs));
    stored_->read(entry.codes, static_cast<std::uint64_t>(first * entry.inputs),
                  std::as_writable_bytes(std::span(codes)));
    const std::int64_t scale_row = first / entry.rows_per_scale;
    const std::int64_t scale_end = (first + rows - 1) / entry.rows_per_scale + 1;
    const std::int64_t groups = entry.groups();
    const std::vector<float> scales =
        floats(entry.scales, scale_row * groups, (scale_end - scale_row) * groups);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t at = ((first + row) / entry.rows_per_scale - scale_row) * groups;
      for (std::int64_t column = 0; column < entry.inputs; ++column) {
        const float value = e4m3_[codes[static_cast<std::size_t>(row * entry.inputs + column)]];
        target.put(first + row, column,
                   value * scales[static_cast<std::size_t>(at + column / entry.group)]);
      }
    }
  }

  template <typename Target>
  void read_packed(const Entry& entry, std::int64_t first, std::int64_t rows,
                   const Target& target) const {
    const std::int64_t n = codes_in_word();
    const std::int64_t width = entry.codes.info->shape[1];
    const std::int64_t groups = entry.groups();
    const std::vector<std::uint32_t> codes = words(entry.codes, first * width, rows * width);
    const std::vector<float> scales = floats(entry.scales, first * groups, rows * groups);
    std::vector<std::uint32_t> zeros;
    if (entry.zeros.info != nullptr) {
      zeros =
          words(entry.zeros, first / n * groups, ((first + rows + n - 1) / n - first / n) * groups);
    }
    const int middle = 1 << (how_.bits - 1);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t column = 0; column < entry.inputs; ++column) {
        const std::int64_t group = column / entry.group;
        int zero = middle;
        if (!zeros.empty()) {
          const std::int64_t at = ((first + row) / n - first / n) * groups + group;
          zero = code_at(zeros[static_cast<std::size_t>(at)], static_cast<int>((first + row) % n),
                         how_.bits);
        }
        const std::uint32_t word = codes[static_cast<std::size_t>(row * width + column / n)];
        target.put(first + row, column, code_at(word, static_cast<int>(column % n), how_.bits),
                   zero, scales[static_cast<std::size_t>(row * groups + group)]);
      }
    }
  }

  // Bytes that read() takes for a weight.
  std::uint64_t scratch_of(const Entry& entry) const {
    const auto groups = static_cast<std::uint64_t>(entry.groups());
    if (is_transposed()) return static_cast<std::uint64_t>(kTransposedRows) * 16;
    const auto rows = static_cast<std::uint64_t>(rows_at_once(entry));
    const std::uint64_t codes =
        entry.codes.info->bytes() / static_cast<std::uint64_t>(entry.outputs);
    return rows * (codes + groups * 10);
  }

  std::unique_ptr<const TensorSource> stored_;
  Quantization how_;
  std::array<float, 256> e4m3_;
  std::map<std::string_view, SourceTensor> plain_;     // tensors that are read as they are
  std::map<std::string, Entry, std::less<>> entries_;  // by the name of the weight
};

}  // namespace

std::unique_ptr<const TensorSource> make_quantized_source(
    std::unique_ptr<const TensorSource> stored, const Quantization& how) {
  return std::make_unique<QuantizedSource>(std::move(stored), how);
}

}  // namespace sluice
