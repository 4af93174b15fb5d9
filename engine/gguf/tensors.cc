#include "engine/gguf/tensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "engine/gguf/config.h"
#include "engine/gguf/names.h"
#include "lib/check.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/half.h"

namespace sluice::gguf {
namespace {

constexpr std::int64_t kRun = 256;  // weights decoded at a time: one block of the largest
constexpr std::uint64_t kRawBytes = std::uint64_t{64} << 10;  // read at a time

// See make_tensor_source().
DType matrix_dtype(const std::vector<GgufFile>& parts) {
  std::optional<DType> shared;
  for (const GgufFile& part : parts) {
    for (const auto& [name, tensor] : part.tensors()) {
      const std::optional<DType> element = tensor.type->element;
      if (!element || tensor.shape.size() < 2) continue;
      if (shared.value_or(*element) != *element) return DType::f32;
      shared = element;
    }
  }
  return shared.value_or(DType::bf16);
}

// Writes `count` weights as elements of `dtype`.
void store(const float* from, std::int64_t count, DType dtype, std::byte* to) {
  std::array<std::uint16_t, kRun> halves{};
  if (dtype == DType::f32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    halves[static_cast<std::size_t>(i)] =
        dtype == DType::bf16 ? float_to_bf16(from[i]) : float_to_f16(from[i]);
  }
  std::memcpy(to, halves.data(), static_cast<std::size_t>(count) * sizeof(std::uint16_t));
}

// Decodes weights [first, first + count) of a tensor.
void decode(const GgufFile& file, const GgufTensor& tensor, std::int64_t first, std::int64_t count,
            DType dtype, std::byte* to) {
  const GgufType& type = *tensor.type;
  const std::int64_t blocks_in_run = kRun / type.block;
  const std::int64_t most_blocks =
      static_cast<std::int64_t>(kRawBytes) / type.bytes / blocks_in_run * blocks_in_run;
  const std::int64_t end = first + count;
  const std::int64_t end_block = (end + type.block - 1) / type.block;
  std::int64_t block = first / type.block;
  std::vector<std::byte> raw(
      static_cast<std::size_t>(std::min(most_blocks, end_block - block) * type.bytes));
  std::array<float, kRun> run{};
  while (block < end_block) {
    const std::int64_t blocks = std::min(most_blocks, end_block - block);
    file.read(tensor, static_cast<std::uint64_t>(block * type.bytes),
              std::span(raw).first(static_cast<std::size_t>(blocks * type.bytes)));
    for (std::int64_t at = 0; at < blocks; at += blocks_in_run) {
      const std::int64_t some = std::min(blocks_in_run, blocks - at);
      type.decode(raw.data() + at * type.bytes, some, run.data());
      const std::int64_t begin = (block + at) * type.block;  // the weight that the run begins with
      const std::int64_t from = std::max(first, begin);
      const std::int64_t until = std::min(end, begin + some * type.block);
      store(run.data() + (from - begin), until - from, dtype, to);
      to += static_cast<std::size_t>(until - from) * size_of(dtype);
    }
    block += blocks;
  }
}

// Reads coded rows [first, first + rows) of a matrix with codes.
void read_coded_rows(const GgufFile& file, const GgufTensor& tensor, std::int64_t first,
                     std::int64_t rows, WeightCode code, std::byte* to) {
  const GgufType& type = *tensor.type;
  const std::int64_t inputs = tensor.shape.back();
  const WeightFormat format = code;
  const CodedRow at(format, inputs);
  const auto groups_of_block = static_cast<std::size_t>(type.block / kWeightGroup);
  std::array<CodedGroup, kRun / kWeightGroup> groups{};
  const std::int64_t row_blocks = inputs / type.block;
  std::int64_t block = first * row_blocks;
  const std::int64_t end = block + rows * row_blocks;
  const std::int64_t most = static_cast<std::int64_t>(kRawBytes) / type.bytes;
  std::vector<std::byte> raw(static_cast<std::size_t>(std::min(most, end - block) * type.bytes));
  while (block < end) {
    const std::int64_t some = std::min(most, end - block);
    file.read(tensor, static_cast<std::uint64_t>(block * type.bytes),
              std::span(raw).first(static_cast<std::size_t>(some * type.bytes)));
    for (std::int64_t i = 0; i < some; ++i, ++block) {
      type.groups(raw.data() + i * type.bytes, groups.data());
      const auto row = static_cast<std::size_t>(block / row_blocks - first);
      const std::size_t group = static_cast<std::size_t>(block % row_blocks) * groups_of_block;
      for (std::size_t g = 0; g < groups_of_block; ++g) {
        put_group(groups[g], group + g, format, at, to + row * format.row_bytes(inputs));
      }
    }
  }
}

class GgufTensorSource final : public TensorSource {
 public:
  GgufTensorSource(std::shared_ptr<const std::vector<GgufFile>> parts, const ModelConfig& config)
      : parts_(std::move(parts)) {
    const DType of_matrices = matrix_dtype(*parts_);
    for (std::size_t i = 0; i < parts_->size(); ++i) {
      for (const auto& [name, tensor] : (*parts_)[i].tensors()) {
        if (name != kRopeFactors) add(i, tensor, of_matrices, config);
      }
    }
  }

  const std::filesystem::path& path() const override { return parts_->front().path(); }
  std::string_view config_name() const override { return "metadata"; }
  std::string_view layer_fields() const override {
    return "general.architecture, block_count or the tensors";
  }
  std::string own_name(std::string_view name) const override {
    return gguf_name(name).value_or(std::string(name));
  }

  std::map<std::string_view, SourceTensor> tensors() const override {
    std::map<std::string_view, SourceTensor> all;
    for (const auto& [name, entry] : entries_) {
      all.emplace(name, SourceTensor{&entry.info, &(*parts_)[entry.part].path(), entry.part,
                                     entry.stored->bytes, code_of(entry)});
    }
    return all;
  }

  void require_loadable(const SourceTensor& tensor) const override {
    if (tensor.info->dtype) return;
    throw Error(ErrorCode::unsupported, tensor.file->string() + ": tensor " +
                                            in_quotes(own_name(tensor.info->name)) + " is " +
                                            tensor.info->stored_dtype + ", but Sluice decodes " +
                                            std::string(kDecodedGgufTypes));
  }

  void read(const SourceTensor& tensor, std::uint64_t first,
            std::span<std::byte> destination) const override {
    require_loadable(tensor);
    const Entry& entry = entries_.at(tensor.info->name);
    const std::size_t element = size_of(*entry.info.dtype);
    check(first % element == 0 && destination.size() % element == 0, "a part of an element");
    read_weights(entry, static_cast<std::int64_t>(first / element),
                 static_cast<std::int64_t>(destination.size() / element), destination.data());
  }

  void read_codes(const SourceTensor& tensor, std::int64_t first, WeightCode code,
                  std::span<std::byte> destination) const override {
    const Entry& entry = entries_.at(tensor.info->name);
    const GgufFile& file = (*parts_)[entry.part];
    const std::size_t row_bytes = WeightFormat(code).row_bytes(entry.info.shape.back());
    const auto rows = static_cast<std::int64_t>(destination.size() / row_bytes);
    std::byte* const to = destination.data();
    if (entry.paired == 0) return read_coded_rows(file, *entry.stored, first, rows, code, to);
    for (std::int64_t row = 0; row < rows; ++row) {
      read_coded_rows(file, *entry.stored, stored_row(entry, first + row), 1, code,
                      to + static_cast<std::size_t>(row) * row_bytes);
    }
  }

  std::uint64_t scratch_bytes() const override {
    const bool decodes = std::any_of(entries_.begin(), entries_.end(), [](const auto& entry) {
      return entry.second.info.dtype != entry.second.stored->type->element;
    });
    return decodes ? kRawBytes : 0;
  }

  void require_unchanged() const override {
    for (const GgufFile& part : *parts_) part.require_unchanged();
  }

 private:
  struct Entry {
    TensorInfo info;
    const GgufTensor* stored = nullptr;
    std::size_t part = 0;
    std::int64_t paired = 0;  // rows of a head that are in pairs of channels; 0: in halves
  };

  void add(std::size_t part, const GgufTensor& tensor, DType of_matrices,
           const ModelConfig& config) {
    if (gguf_name(tensor.name)) {
      throw Error(ErrorCode::unsupported, (*parts_)[part].path().string() + ": tensor " +
                                              in_quotes(tensor.name) +
                                              " has a name of the Hugging Face format; convert "
                                              "the model again");
    }
    Entry entry;
    entry.info.name = folder_name(tensor.name).value_or(tensor.name);
    entry.info.stored_dtype = tensor.type->name;
    entry.info.shape = tensor.shape;
    entry.stored = &tensor;
    entry.part = part;
    if (tensor.type->decode != nullptr) {
      const bool is_matrix = tensor.shape.size() > 1;
      entry.info.dtype = is_matrix ? of_matrices : tensor.type->element.value_or(DType::f32);
      entry.info.end = static_cast<std::uint64_t>(tensor.elements()) * size_of(*entry.info.dtype);
    }
    const bool turns = entry.info.name.find(".self_attn.q_proj.") != std::string::npos ||
                       entry.info.name.find(".self_attn.k_proj.") != std::string::npos;
    // Other numbers of rows are refused when shapes are compared.
    const bool are_whole_heads = tensor.shape.front() % config.head_dim == 0;
    if (turns && are_whole_heads && has_paired_rows(config)) entry.paired = config.head_dim;
    std::string name = entry.info.name;
    entries_.emplace(std::move(name), std::move(entry));
  }

  // Vectors are elements in every backend.
  static WeightCode code_of(const Entry& entry) {
    return entry.info.shape.size() == 2 ? entry.stored->type->code : WeightCode::elements;
  }

  // Row i of the first half of a head is its row 2 i in the file, and row i of the second 2 i + 1.
  static std::int64_t stored_row(const Entry& entry, std::int64_t row) {
    if (entry.paired == 0) return row;
    const std::int64_t half = entry.paired / 2;
    const std::int64_t in_head = row % entry.paired;
    return row - in_head + 2 * (in_head % half) + in_head / half;
  }

  // Weights [first, first + count) of the tensor as a folder has it.
  void read_weights(const Entry& entry, std::int64_t first, std::int64_t count,
                    std::byte* to) const {
    const std::vector<std::int64_t>& shape = entry.info.shape;
    const std::int64_t columns = shape.size() > 1 ? shape.back() : 1;
    if (entry.paired == 0) return read_stored(entry, first, count, to);
    for (std::int64_t some = 0; count > 0; first += some, count -= some) {
      const std::int64_t column = first % columns;
      some = std::min(count, columns - column);
      read_stored(entry, stored_row(entry, first / columns) * columns + column, some, to);
      to += static_cast<std::size_t>(some) * size_of(*entry.info.dtype);
    }
  }

  // Weights [first, first + count) of the tensor as the file has it.
  void read_stored(const Entry& entry, std::int64_t first, std::int64_t count,
                   std::byte* to) const {
    const GgufFile& file = (*parts_)[entry.part];
    const DType dtype = *entry.info.dtype;
    if (entry.stored->type->element != dtype) {
      return decode(file, *entry.stored, first, count, dtype, to);
    }
    const std::size_t element = size_of(dtype);
    file.read(*entry.stored, static_cast<std::uint64_t>(first) * element,
              {to, static_cast<std::size_t>(count) * element});
  }

  std::shared_ptr<const std::vector<GgufFile>> parts_;
  std::map<std::string, Entry, std::less<>> entries_;  // by the name in a folder
};

}  // namespace

std::unique_ptr<const TensorSource> make_tensor_source(
    std::shared_ptr<const std::vector<GgufFile>> parts, const ModelConfig& config) {
  return std::make_unique<GgufTensorSource>(std::move(parts), config);
}

}  // namespace sluice::gguf
