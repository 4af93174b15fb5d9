// A config.json with a quantization_config, a line "---", and a safetensors file, as it is and with
// a corrected header length. In an accepted checkpoint every weight has the bytes of its shape and
// the same elements whether it is read at once or in parts.
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
