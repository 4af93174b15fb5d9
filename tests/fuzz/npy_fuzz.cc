// An npy file, as it is and with the sizes that its header should have. An accepted array has as
// many bytes as dtype and shape say, and every one of them can be read.
#include <algorithm>
#include <string>
#include <vector>

#include "io/npy.h"
#include "tests/fuzz/fuzz.h"

namespace sluice::fuzz {
namespace {

constexpr std::size_t kStart = 10;  // of the header's text, in format 1.0

std::string hold(const NpyFile& file) {
  std::uint64_t bytes = size_of(file.dtype());
  for (const std::int64_t size : file.shape()) {
    require(size >= 0, "sizes are not negative");
    bytes *= static_cast<std::uint64_t>(size);
  }
  require(bytes == file.bytes(), "an array has the bytes of its shape");
  std::vector<std::byte> all(static_cast<std::size_t>(bytes));
  file.read(0, all);
  return std::string(to_string(file.dtype())) + " " + std::to_string(file.shape().size());
}

Answer answer_file(std::string_view bytes, const std::filesystem::path& path) {
  write_file(path, bytes);
  return answer_of(
      {ErrorCode::corrupt, ErrorCode::unsupported}, [&] { return NpyFile::open(path); }, hold);
}

// The same file in format 1.0 with the length of header that ends at its last '}', because most
// changes would otherwise be refused for the length alone.
std::string with_npy_length(std::string_view bytes) {
  std::string file(bytes);
  const std::size_t end = file.rfind('}');
  if (file.size() < kStart || end == std::string::npos || end < kStart) return file;
  const std::size_t length = end + 1 - kStart;
  file.replace(0, kStart,
               std::string("\x93NUMPY\x01\0", 8) + static_cast<char>(length & 0xff) +
                   static_cast<char>((length >> 8) & 0xff));
  return file;
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  Answer as_it_is = answer_file(input, folder / "k.npy");
  if (as_it_is.accepted) return as_it_is;
  return answer_file(with_npy_length(input), folder / "k.npy");
}

}  // namespace sluice::fuzz
