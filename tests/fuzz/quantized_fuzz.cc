// A config.json with a quantization_config, a line "---", and a safetensors file, as it is and with
// a corrected header length. In an accepted checkpoint every weight has the bytes of its shape and
// the same elements, and codes if it has some, whether it is read at once or in parts.
#include <algorithm>
#include <memory>
#include <vector>

#include "engine/folder_source.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/safetensors_input.h"

namespace sluice::fuzz {
namespace {

using Source = std::unique_ptr<const TensorSource>;

// In parts that end in the middle of rows, words and groups.
std::vector<std::byte> read_in_parts(const TensorSource& source, const SourceTensor& tensor) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.info->bytes()));
  const std::size_t element = size_of(*tensor.info->dtype);
  for (std::size_t first = 0, elements = 1; first < bytes.size(); elements = 2 * elements + 1) {
    const std::size_t part = std::min(elements * element, bytes.size() - first);
    source.read(tensor, first, std::span(bytes).subspan(first, part));
    first += part;
  }
  return bytes;
}

// Rows of codes, in the tensor's own code and in int8, are the same at once and one by one.
void hold_codes(const TensorSource& source, const SourceTensor& tensor) {
  const std::int64_t rows = tensor.info->shape[0];
  for (const WeightFormat& format : {WeightFormat(tensor.code), WeightFormat(WeightCode::int8)}) {
    const std::size_t row_bytes = format.row_bytes(tensor.info->shape[1]);
    std::vector<std::byte> whole(static_cast<std::size_t>(rows) * row_bytes);
    source.read_codes(tensor, 0, format.code, whole);
    std::vector<std::byte> row(row_bytes);
    for (std::int64_t i = 0; i < rows; ++i) {
      source.read_codes(tensor, i, format.code, row);
      require(std::equal(row.begin(), row.end(),
                         whole.begin() + i * static_cast<std::ptrdiff_t>(row_bytes)),
              "a row of codes is the same by itself");
    }
  }
}

std::string read_tensor(const TensorSource& source, const SourceTensor& tensor) {
  const TensorInfo& info = *tensor.info;
  const auto load = [&] { return source.require_loadable(tensor), true; };
  const Answer loadable =
      answer_of({ErrorCode::unsupported}, load, [](bool) { return std::string(); });
  require(loadable.accepted == info.dtype.has_value(), "a dtype says whether it is loaded");
  if (!info.dtype) return "";
  require(static_cast<std::uint64_t>(info.elements()) * size_of(*info.dtype) == info.bytes(),
          "a weight has the bytes of its shape");
  std::vector<std::byte> whole(static_cast<std::size_t>(info.bytes()));
  source.read(tensor, 0, whole);
  require(whole == read_in_parts(source, tensor), "a weight read in parts is the same");
  if (tensor.code != WeightCode::elements) hold_codes(source, tensor);
  return info.stored_dtype + " ";
}

std::string hold(const Source& source) {
  std::string dtypes;
  for (const auto& [name, tensor] : source->tensors()) {
    require(tensor.info->name == name, "a tensor has the name that it is found by");
    dtypes += read_tensor(*source, tensor);
  }
  require(source->scratch_bytes() <= std::uint64_t{64} << 20, "reading takes little memory");
  return dtypes;
}

Answer answer_folder(std::string_view file, const std::filesystem::path& folder) {
  write_file(folder / "model.safetensors", file);
  return answer_of(
      {ErrorCode::corrupt, ErrorCode::unsupported}, [&] { return FolderSource(folder).tensors(); },
      hold);
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  const Parts parts = split_parts(input);
  write_file(folder / "config.json", parts.first);
  Answer as_it_is = answer_folder(parts.second, folder);
  if (as_it_is.accepted) return as_it_is;
  return answer_folder(with_length(parts.second), folder);
}

}  // namespace sluice::fuzz
