#include "io/npy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <string>

#include "lib/check.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::string_view kNpyMagic = "\x93NUMPY";
constexpr std::size_t kNpyVersionBytes = 2;
constexpr std::uint64_t kMostNpyHeader = 65536;  // what numpy writes for 32 dimensions has 1 KiB
constexpr std::size_t kMostNpyDimensions = 32;   // as numpy before version 2

// The dict of a header, which numpy writes by repr(): keys and dtype in quotes, an order, a tuple.
class NpyDict {
 public:
  NpyDict(std::string_view text, const std::filesystem::path& path) : text_(text), path_(&path) {}

  NpyHeader read() {
    require(take('{'), "does not begin with {");
    while (!take('}')) {
      read_entry();
      if (take(',')) continue;
      require(take('}'), "has no } after its last entry");
      break;
    }
    skip_space();
    require(text_.empty(), "goes on after its }");
    require(descr_.has_value(), "has no 'descr'");
    require(fortran_order_.has_value(), "has no 'fortran_order'");
    require(shape_.has_value(), "has no 'shape'");
    return header();
  }

 private:
  void require(bool holds, const std::string& what) const {
    if (holds) return;
    throw Error(ErrorCode::corrupt, path_->string() + ": its npy header " + what +
                                        "; write the file with numpy.save() again");
  }
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::unsupported, path_->string() + ": " + what);
  }

  void skip_space() { text_.remove_prefix(std::min(text_.find_first_not_of(" \n"), text_.size())); }
  bool take(char c) {
    skip_space();
    if (text_.empty() || text_.front() != c) return false;
    text_.remove_prefix(1);
    return true;
  }
  bool take_word(std::string_view word) {
    skip_space();
    if (!text_.starts_with(word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }

  // A string without escapes, in quotes of either kind.
  std::string read_string(const char* what) {
    skip_space();
    const char quote = text_.empty() ? '\0' : text_.front();
    require(quote == '\'' || quote == '"', std::string("has ") + what + " that is no string");
    const std::size_t end = text_.find(quote, 1);
    require(end != std::string_view::npos, std::string("ends inside ") + what);
    std::string string(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return string;
  }

  void read_entry() {
    const std::string key = read_string("a key");
    require(take(':'), "has no : after the key " + in_quotes(key));
    const auto once = [&](const auto& value) {
      require(!value.has_value(), "has the key " + in_quotes(key) + " twice");
    };
    if (key == "descr") {
      once(descr_);
      descr_ = read_descr();
    } else if (key == "fortran_order") {
      once(fortran_order_);
      fortran_order_ = take_word("True");
      require(*fortran_order_ || take_word("False"), "has a 'fortran_order' that is no bool");
    } else if (key == "shape") {
      once(shape_);
      shape_ = read_shape();
    } else {
      require(false, "has the unknown key " + in_quotes(key));
    }
  }

  std::string read_descr() {
    skip_space();
    if (!text_.empty() && text_.front() == '[') refuse("has records, not plain numbers");
    return read_string("a 'descr'");
  }

  std::vector<std::int64_t> read_shape() {
    require(take('('), "has a 'shape' that is no tuple");
    std::vector<std::int64_t> shape;
    while (!take(')')) {
      require(shape.size() < kMostNpyDimensions,
              "has more than " + std::to_string(kMostNpyDimensions) + " dimensions");
      shape.push_back(read_size());
      if (take(',')) continue;
      require(take(')'), "has no ) after its 'shape'");
      break;
    }
    return shape;
  }

  std::int64_t read_size() {
    skip_space();
    std::int64_t size = 0;
    const auto [stop, status] = std::from_chars(text_.begin(), text_.end(), size);
    require(status == std::errc{} && size >= 0, "has a size in 'shape' that is no 63-bit number");
    text_.remove_prefix(static_cast<std::size_t>(stop - text_.begin()));
    return size;
  }

  NpyHeader header() const {
    NpyHeader header;
    if (*descr_ == "<f2") {
      header.dtype = DType::f16;
    } else if (*descr_ != "<f4") {
      const bool is_big = *descr_ == ">f4" || *descr_ == ">f2";
      refuse("its dtype is " + in_quotes(*descr_) + (is_big ? ", big-endian" : "") +
             "; convert it to '<f4' or '<f2', as astype('<f4') does");
    }
    if (*fortran_order_) {
      refuse("is in Fortran order; save numpy.ascontiguousarray() of it, which is in C order");
    }
    header.shape = *shape_;
    require_bytes(header);
    return header;
  }

  void require_bytes(const NpyHeader& header) const {
    const std::uint64_t most = std::numeric_limits<std::int64_t>::max() / size_of(header.dtype);
    std::uint64_t product = 1;
    for (const std::int64_t size : header.shape) {
      const auto count = static_cast<std::uint64_t>(size);
      require(count == 0 || product <= most / count, "has a shape whose product overflows");
      product *= count;
    }
  }

  std::string_view text_;  // not parsed yet
  const std::filesystem::path* path_;
  std::optional<std::string> descr_;
  std::optional<bool> fortran_order_;
  std::optional<std::vector<std::int64_t>> shape_;
};

std::uint64_t little_endian(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  return value;
}

[[noreturn]] void refuse_npy(const File& file, const std::string& what) {
  throw Error(ErrorCode::corrupt, file.path().string() + ": " + what);
}

// The extent of the header's text in the file.
struct NpyText {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

NpyText text_of(const File& file) {
  constexpr std::size_t kStart = kNpyMagic.size() + kNpyVersionBytes;
  std::array<std::byte, kStart + 4> start{};
  const std::span<std::byte> read(start.data(), std::min<std::uint64_t>(file.size(), start.size()));
  file.read(0, read);
  const std::string_view magic(reinterpret_cast<const char*>(start.data()), kNpyMagic.size());
  if (read.size() < kStart || magic != kNpyMagic) {
    refuse_npy(file, "is no npy file; write it with numpy.save()");
  }
  const int major = std::to_integer<int>(start.at(kNpyMagic.size()));
  const int minor = std::to_integer<int>(start.at(kNpyMagic.size() + 1));
  if (major < 1 || major > 3 || minor != 0) {
    throw Error(ErrorCode::unsupported, file.path().string() + ": is in npy format " +
                                            std::to_string(major) + "." + std::to_string(minor) +
                                            "; Sluice reads 1.0, 2.0 and 3.0");
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  if (read.size() < kStart + length_bytes) refuse_npy(file, "ends inside its npy header");
  const std::uint64_t length =
      little_endian(std::span<const std::byte>(start).subspan(kStart, length_bytes));
  const std::uint64_t offset = kStart + length_bytes;
  if (length > file.size() - offset) refuse_npy(file, "ends inside its npy header");
  if (length > kMostNpyHeader) {
    refuse_npy(file, "its npy header would have " + std::to_string(length) + " bytes, more than " +
                         std::to_string(kMostNpyHeader));
  }
  return {offset, length};
}

}  // namespace

std::uint64_t NpyHeader::bytes() const {
  std::uint64_t bytes = size_of(dtype);
  for (const std::int64_t size : shape) bytes *= static_cast<std::uint64_t>(size);
  return bytes;
}

NpyHeader parse_npy_header(std::string_view text, const std::filesystem::path& path) {
  return NpyDict(text, path).read();
}

NpyFile NpyFile::open(const std::filesystem::path& path) {
  File file = File::open(path);
  const NpyText extent = text_of(file);
  std::string text(static_cast<std::size_t>(extent.bytes), '\0');
  file.read(extent.offset, std::as_writable_bytes(std::span(text)));
  NpyHeader header = parse_npy_header(text, path);
  const std::uint64_t data_offset = extent.offset + extent.bytes;
  const std::uint64_t has = file.size() - data_offset;
  if (has != header.bytes()) {
    refuse_npy(file, "its array has " + std::to_string(has) + " bytes, but dtype and shape give " +
                         std::to_string(header.bytes()) +
                         (has < header.bytes() ? ": the file is incomplete" : ""));
  }
  return {std::move(file), std::move(header), data_offset};
}

void NpyFile::read(std::uint64_t first, std::span<std::byte> destination) const {
  check(first <= bytes() && destination.size() <= bytes() - first,
        "more than the array was to be read");
  file_.read(data_offset_ + first, destination);
}

}  // namespace sluice
