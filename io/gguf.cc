#include "io/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "lib/bytes.h"
#include "lib/check.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::uint32_t kGgufVersion = 3;
constexpr std::uint64_t kMaxKeys = 1 << 16;
constexpr std::uint64_t kMaxTensors = 1 << 17;  // the largest files in use have some thousands
constexpr std::size_t kMaxKeyBytes = 1024;
constexpr std::size_t kMaxNameBytes = 255;
constexpr std::uint32_t kMaxDimensions = 4;
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMaxAlignment = 1 << 20;
constexpr const char* kAlignmentKey = "general.alignment";

[[noreturn]] void throw_corrupt(const std::filesystem::path& path, const std::string& what) {
  throw Error(ErrorCode::corrupt, path.string() + ": " + what + "; download it again");
}

[[noreturn]] void throw_unsupported(const std::filesystem::path& path, const std::string& what) {
  throw Error(ErrorCode::unsupported, path.string() + ": " + what);
}

// A stretch of the header.
struct Bytes {
  std::size_t begin = 0;
  std::size_t size = 0;
};

// The header's bytes in order, read from the file on demand.
class HeaderReader {
 public:
  explicit HeaderReader(const File& file)
      : file_(&file), most_(std::min(file.size(), kMaxGgufHeader)) {}

  // The next `count` bytes, which stand for `what`.
  Bytes take(std::uint64_t count, const char* what) {
    if (count > most_ - at_) throw_too_long(what);
    const auto end = at_ + static_cast<std::size_t>(count);
    if (end > bytes_.size()) grow(end);
    return {std::exchange(at_, end), static_cast<std::size_t>(count)};
  }

  template <typename T>
  T number(const char* what) {
    T value;
    const Bytes bytes = take(sizeof(T), what);  // before data(), because it may move the bytes
    std::memcpy(&value, bytes_.data() + bytes.begin, sizeof(T));
    return value;
  }

  // A length and as many bytes, at most `most`; the bytes.
  Bytes string(std::uint64_t most, const char* what) {
    const auto length = number<std::uint64_t>(what);
    if (length > left()) throw_too_long(what);
    if (length > most) {
      throw_corrupt(file_->path(), std::string(what) + " has " + std::to_string(length) +
                                       " bytes, more than " + std::to_string(most));
    }
    return take(length, what);
  }

  std::uint64_t left() const { return most_ - at_; }
  std::size_t at() const { return at_; }
  std::string_view text(const Bytes& bytes) const {
    return {bytes_.data() + bytes.begin, bytes.size};
  }
  // Moves the bytes read so far out; offsets stay valid in them.
  std::vector<char> release() {
    bytes_.resize(at_);
    return std::move(bytes_);
  }

 private:
  void grow(std::size_t end) {
    constexpr std::size_t kStep = std::size_t{1} << 16;
    const std::size_t before = bytes_.size();
    const std::size_t size =
        std::min(std::max(end, 2 * before + kStep), static_cast<std::size_t>(most_));
    bytes_.resize(size);
    file_->read(before, std::as_writable_bytes(std::span(bytes_)).subspan(before));
  }

  [[noreturn]] void throw_too_long(const char* what) const {
    if (most_ < file_->size()) {
      throw_corrupt(file_->path(), std::string(what) + " makes the header longer than the " +
                                       format_bytes(kMaxGgufHeader) + " that it may have");
    }
    throw_corrupt(file_->path(), std::string(what) + " runs past the end of the file");
  }

  const File* file_;
  std::uint64_t most_;
  std::size_t at_ = 0;
  std::vector<char> bytes_;
};

void require_gguf(HeaderReader& header, const File& file) {
  if (file.size() < 24) {
    throw_corrupt(file.path(),
                  "has " + std::to_string(file.size()) + " bytes, too few for a GGUF file");
  }
  const std::string_view magic = header.text(header.take(4, "the file"));
  if (magic != "GGUF") {
    std::string start(static_cast<std::size_t>(std::min<std::uint64_t>(file.size(), 32)), '\0');
    file.read(0, std::as_writable_bytes(std::span(start)));
    require_not_lfs_pointer(file.path(), start);
    throw_corrupt(file.path(), "is no GGUF file: it begins with " + in_quotes(start.substr(0, 4)));
  }
  const auto version = header.number<std::uint32_t>("the version");
  if (version == __builtin_bswap32(kGgufVersion) || version == __builtin_bswap32(2)) {
    throw_unsupported(file.path(), "is a big-endian GGUF file; take the little-endian one");
  }
  if (version != kGgufVersion) {
    throw_unsupported(file.path(), "is GGUF version " + std::to_string(version) +
                                       ", but Sluice reads version 3; convert the model again");
  }
}

// A value whose place in the header is known, but whose bytes may still move.
struct PlacedValue {
  GgufKind kind;
  bool is_array;
  std::uint64_t count;
  Bytes bytes;
};

bool is_known(GgufKind kind) {
  return kind == GgufKind::string || kind == GgufKind::array || gguf_bytes(kind).has_value();
}

// Reads keys, values and tensors; every count and length is compared with the bytes that are left
// before anything is kept for it.
class Parser {
 public:
  explicit Parser(const File& file) : file_(&file), header_(file) {
    require_gguf(header_, file);
    tensor_count_ = header_.number<std::uint64_t>("the number of tensors");
    key_count_ = header_.number<std::uint64_t>("the number of keys");
    require_count(tensor_count_, kMaxTensors, "tensors");
    require_count(key_count_, kMaxKeys, "keys");
    for (std::uint64_t i = 0; i < key_count_; ++i) read_key();
    for (std::uint64_t i = 0; i < tensor_count_; ++i) read_tensor();
  }

  std::pair<GgufMetadata, GgufTensors> finish() {
    const std::uint64_t header_end = header_.at();
    std::vector<char> bytes = header_.release();
    GgufMetadata::Values values;
    const auto text = [&](const Bytes& place) {
      return std::string_view(bytes.data() + place.begin, place.size);
    };
    for (const auto& [key, value] : values_) {
      const GgufValue as_text = {value.kind, value.is_array, value.count, text(value.bytes)};
      if (!values.emplace(text(key), as_text).second) {
        throw_corrupt(file_->path(), "has the key " + in_quotes(text(key)) + " twice");
      }
    }
    GgufMetadata metadata(file_->path(), std::move(bytes), std::move(values));
    place_tensors(metadata, header_end);
    return {std::move(metadata), std::move(tensors_)};
  }

 private:
  void require_count(std::uint64_t count, std::uint64_t most, const char* what) const {
    if (count <= most) return;
    throw_corrupt(file_->path(), "would have " + std::to_string(count) + " " + what +
                                     ", more than the " + std::to_string(most) +
                                     " that it may have");
  }

  [[noreturn]] void throw_key(const Bytes& key, const std::string& what) const {
    throw_corrupt(file_->path(), "the key " + in_quotes(header_.text(key)) + " " + what);
  }

  GgufKind read_kind(const Bytes& key) {
    const auto kind = header_.number<std::uint32_t>("the type of a value");
    if (!is_known(static_cast<GgufKind>(kind))) {
      throw_key(key, "has a value of type " + std::to_string(kind) + ", which GGUF does not have");
    }
    return static_cast<GgufKind>(kind);
  }

  void read_key() {
    const Bytes key = header_.string(kMaxKeyBytes, "a key");
    PlacedValue value = {read_kind(key), false, 1, {}};
    if (value.kind == GgufKind::array) {
      value.is_array = true;
      value.kind = read_kind(key);
      value.count = header_.number<std::uint64_t>("the length of an array");
      if (value.kind == GgufKind::array) throw_key(key, "is an array of arrays");
    }
    value.bytes.begin = header_.at();
    skip_values(key, value);
    value.bytes.size = header_.at() - value.bytes.begin;
    values_.emplace_back(key, value);
  }

  void skip_values(const Bytes& key, const PlacedValue& value) {
    constexpr std::uint64_t kLength = sizeof(std::uint64_t);
    const std::uint64_t least = gguf_bytes(value.kind).value_or(kLength);
    if (value.count > header_.left() / least) {
      throw_key(key, "has " + std::to_string(value.count) +
                         " entries, more than the rest of the file can hold");
    }
    if (value.kind != GgufKind::string) {
      header_.take(value.count * least, "a value");
      return;
    }
    for (std::uint64_t i = 0; i < value.count; ++i) header_.string(kMaxGgufHeader, "a string");
  }

  [[noreturn]] void throw_tensor(const GgufTensor& tensor, const std::string& what) const {
    throw_corrupt(file_->path(), "tensor " + in_quotes(tensor.name) + " " + what);
  }

  void read_tensor() {
    GgufTensor tensor;
    tensor.name = header_.text(header_.string(kMaxNameBytes, "the name of a tensor"));
    const auto dimensions = header_.number<std::uint32_t>("the dimensions of a tensor");
    if (dimensions == 0 || dimensions > kMaxDimensions) {
      throw_tensor(tensor, "has " + std::to_string(dimensions) + " dimensions, not 1 to 4");
    }
    for (std::uint32_t i = 0; i < dimensions; ++i) {
      const auto size = header_.number<std::uint64_t>("a dimension of a tensor");
      if (size == 0) throw_tensor(tensor, "has no values");
      if (size > std::uint64_t{1} << 48) {
        throw_tensor(tensor, "has a dimension of " + std::to_string(size));
      }
      tensor.shape.insert(tensor.shape.begin(), static_cast<std::int64_t>(size));
    }
    const auto type = header_.number<std::uint32_t>("the type of a tensor");
    tensor.type = find_gguf_type(type);
    if (tensor.type == nullptr) {
      throw_unsupported(file_->path(), "tensor " + in_quotes(tensor.name) + " has the type " +
                                           std::to_string(type) +
                                           ", which Sluice does not know; it decodes " +
                                           std::string(kDecodedGgufTypes));
    }
    tensor.begin = header_.number<std::uint64_t>("the offset of a tensor");
    tensor.bytes = bytes_of(tensor);
    std::string name = tensor.name;
    if (!tensors_.emplace(std::move(name), tensor).second) throw_tensor(tensor, "is there twice");
  }

  // The bytes that shape and type give, which are no more than the file has.
  std::uint64_t bytes_of(const GgufTensor& tensor) const {
    const auto row = static_cast<std::uint64_t>(tensor.shape.back());
    const auto block = static_cast<std::uint64_t>(tensor.type->block);
    if (row % block != 0) {
      throw_tensor(tensor, "has rows of " + std::to_string(row) + ", no multiple of the " +
                               std::to_string(block) + " weights in a block of " +
                               std::string(tensor.type->name));
    }
    std::uint64_t bytes = row / block;
    bool is_huge = __builtin_mul_overflow(bytes, tensor.type->bytes, &bytes);
    for (std::size_t i = 0; i + 1 < tensor.shape.size(); ++i) {
      is_huge = is_huge || __builtin_mul_overflow(bytes, tensor.shape[i], &bytes);
    }
    if (is_huge || bytes > file_->size()) throw_tensor(tensor, "is larger than the file");
    return bytes;
  }

  std::uint64_t alignment(const GgufMetadata& metadata) const {
    const std::int64_t value = metadata.integer(kAlignmentKey, 1, kMaxAlignment, kDefaultAlignment);
    if (!std::has_single_bit(static_cast<std::uint64_t>(value))) {
      metadata.corrupt(kAlignmentKey, "is " + std::to_string(value) + ", not a power of two");
    }
    return static_cast<std::uint64_t>(value);
  }

  // Turns offsets in the data into bytes of the file.
  void place_tensors(const GgufMetadata& metadata, std::uint64_t header_end) {
    const std::uint64_t alignment = this->alignment(metadata);
    const std::uint64_t data = round_up(header_end, alignment);
    std::vector<const GgufTensor*> in_order;
    for (auto& [name, tensor] : tensors_) {
      if (tensor.begin % alignment != 0) {
        throw_tensor(tensor, "begins at byte " + std::to_string(tensor.begin) +
                                 " of the data, no multiple of " + std::to_string(alignment));
      }
      const std::uint64_t size = file_->size() - std::min(data, file_->size());
      if (tensor.begin > size || tensor.bytes > size - tensor.begin) {
        throw_tensor(tensor, "runs past the end of the file");
      }
      tensor.begin += data;
      in_order.push_back(&tensor);
    }
    std::sort(in_order.begin(), in_order.end(),
              [](const GgufTensor* a, const GgufTensor* b) { return a->begin < b->begin; });
    for (std::size_t i = 1; i < in_order.size(); ++i) {
      const GgufTensor& before = *in_order[i - 1];
      if (before.begin + before.bytes <= in_order[i]->begin) continue;
      throw_tensor(*in_order[i], "overlaps " + in_quotes(before.name));
    }
  }

  const File* file_;
  HeaderReader header_;
  std::uint64_t tensor_count_ = 0;
  std::uint64_t key_count_ = 0;
  std::vector<std::pair<Bytes, PlacedValue>> values_;
  GgufTensors tensors_;
};

}  // namespace

std::int64_t GgufTensor::elements() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

GgufFile GgufFile::open(const std::filesystem::path& path) {
  File file = File::open(path);
  auto [metadata, tensors] = Parser(file).finish();
  return {std::move(file), std::move(metadata), std::move(tensors)};
}

void GgufFile::read(const GgufTensor& tensor, std::uint64_t first,
                    std::span<std::byte> destination) const {
  check(first <= tensor.bytes && destination.size() <= tensor.bytes - first,
        "more than the tensor was to be read");
  file_.read(tensor.begin + first, destination);
}

}  // namespace sluice
