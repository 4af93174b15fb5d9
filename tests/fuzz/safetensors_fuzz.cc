// A safetensors file, as it is and with a corrected header length. In an accepted file the tensors
// lie side by side, cover the data and have as many bytes as their shapes say; those of a supported
// dtype can be read.
#include <map>
#include <vector>

#include "io/safetensors.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/safetensors_input.h"

namespace sluice::fuzz {
namespace {

void read_tensor(const SafetensorsFile& file, const TensorInfo& tensor) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.bytes()));
  const auto read = [&] { return file.read(tensor, 0, bytes), true; };
  const Answer read_answer =
      answer_of({ErrorCode::unsupported}, read, [](bool) { return std::string(); });
  require(read_answer.accepted == tensor.dtype.has_value(), "a dtype says whether it is loaded");
  if (!tensor.dtype) return;
  require(static_cast<std::uint64_t>(tensor.elements()) * size_of(*tensor.dtype) == tensor.bytes(),
          "a tensor has the bytes of its shape");
}

std::string hold(const SafetensorsFile& file) {
  std::multimap<std::uint64_t, std::uint64_t> ranges;
  std::string dtypes;
  for (const auto& [name, tensor] : file.tensors()) {
    require(file.find(name) == &tensor, "a tensor is found by its name");
    read_tensor(file, tensor);
    if (tensor.bytes() > 0) ranges.emplace(tensor.begin, tensor.end);
    dtypes += tensor.stored_dtype + " ";
  }
  std::uint64_t covered = 0;
  for (const auto& [begin, end] : ranges) {
    require(begin == covered, "tensors lie side by side");
    covered = end;
  }
  return dtypes;
}

Answer answer_file(std::string_view file, const std::filesystem::path& path) {
  write_file(path, file);
  return answer_of(
      {ErrorCode::corrupt}, [&] { return SafetensorsFile::open(path); }, hold);
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  Answer as_it_is = answer_file(input, folder / "model.safetensors");
  if (as_it_is.accepted) return as_it_is;
  return answer_file(with_length(input), folder / "model.safetensors");
}

}  // namespace sluice::fuzz
