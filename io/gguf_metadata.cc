#include "io/gguf_metadata.h"

#include <limits>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// The value at the beginning of `bytes`, which has its bytes.
template <typename T>
T load(std::string_view bytes) {
  T value{};
  bytes.copy(reinterpret_cast<char*>(&value), sizeof(value));
  return value;
}

// The integer at the beginning of `bytes`; nothing if `kind` is none, or it is above int64.
std::optional<std::int64_t> integer_of(GgufKind kind, std::string_view bytes) {
  switch (kind) {
    case GgufKind::u8:
      return load<std::uint8_t>(bytes);
    case GgufKind::i8:
      return load<std::int8_t>(bytes);
    case GgufKind::u16:
      return load<std::uint16_t>(bytes);
    case GgufKind::i16:
      return load<std::int16_t>(bytes);
    case GgufKind::u32:
      return load<std::uint32_t>(bytes);
    case GgufKind::i32:
      return load<std::int32_t>(bytes);
    case GgufKind::i64:
      return load<std::int64_t>(bytes);
    case GgufKind::u64: {
      const auto value = load<std::uint64_t>(bytes);
      constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      if (value > kMost) return std::nullopt;
      return static_cast<std::int64_t>(value);
    }
    default:
      return std::nullopt;
  }
}

std::optional<double> number_of(GgufKind kind, std::string_view bytes) {
  if (kind == GgufKind::f32) return load<float>(bytes);
  if (kind == GgufKind::f64) return load<double>(bytes);
  const std::optional<std::int64_t> integer = integer_of(kind, bytes);
  return integer ? std::optional(static_cast<double>(*integer)) : std::nullopt;
}

// Takes a length and as many bytes from the front of `bytes`.
std::string_view take_string(std::string_view& bytes) {
  const auto length = static_cast<std::size_t>(load<std::uint64_t>(bytes));
  const std::string_view text = bytes.substr(sizeof(std::uint64_t), length);
  bytes.remove_prefix(sizeof(std::uint64_t) + length);
  return text;
}

std::string range_text(const std::string& least, const std::string& most) {
  return "is not between " + least + " and " + most;
}

}  // namespace

std::optional<std::uint64_t> gguf_bytes(GgufKind kind) {
  switch (kind) {
    case GgufKind::u8:
    case GgufKind::i8:
    case GgufKind::boolean:
      return 1;
    case GgufKind::u16:
    case GgufKind::i16:
      return 2;
    case GgufKind::u32:
    case GgufKind::i32:
    case GgufKind::f32:
      return 4;
    case GgufKind::u64:
    case GgufKind::i64:
    case GgufKind::f64:
      return 8;
    default:
      return std::nullopt;
  }
}

void GgufMetadata::corrupt(std::string_view key, const std::string& what) const {
  throw Error(ErrorCode::corrupt, file_.string() + ": " + one_line(key) + " " + what +
                                      "; download the file again, or convert the model again");
}

void GgufMetadata::unsupported(std::string_view key, const std::string& what) const {
  throw Error(ErrorCode::unsupported, file_.string() + ": " + one_line(key) + " " + what);
}

const GgufValue& GgufMetadata::value(std::string_view key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) corrupt(key, "is missing from the metadata");
  return found->second;
}

const GgufValue& GgufMetadata::scalar(std::string_view key) const {
  const GgufValue& value = this->value(key);
  if (value.is_array) corrupt(key, "is an array");
  return value;
}

const GgufValue& GgufMetadata::array(std::string_view key, std::size_t most) const {
  const GgufValue& value = this->value(key);
  if (!value.is_array) corrupt(key, "is no array");
  if (value.count > most) {
    corrupt(key, "has " + std::to_string(value.count) + " entries, more than the " +
                     std::to_string(most) + " that it may have");
  }
  return value;
}

bool GgufMetadata::is_array(std::string_view key) const { return has(key) && value(key).is_array; }

std::int64_t GgufMetadata::integer(std::string_view key, std::int64_t least, std::int64_t most,
                                   std::optional<std::int64_t> fallback) const {
  if (fallback && !has(key)) return *fallback;
  const GgufValue& value = scalar(key);
  const bool is_large = value.kind == GgufKind::u64;
  const std::optional<std::int64_t> integer = integer_of(value.kind, value.bytes);
  if (!integer && !is_large) corrupt(key, "is no integer");
  if (!integer || *integer < least || *integer > most) {
    corrupt(key, range_text(std::to_string(least), std::to_string(most)));
  }
  return *integer;
}

double GgufMetadata::number(std::string_view key, double least, double most,
                            std::optional<double> fallback) const {
  if (fallback && !has(key)) return *fallback;
  const GgufValue& value = scalar(key);
  const std::optional<double> number = number_of(value.kind, value.bytes);
  if (!number) corrupt(key, "is not a number");
  if (!(*number >= least && *number <= most)) {  // false for NaN, too
    corrupt(key, range_text(digits(least), digits(most)));
  }
  return *number;
}

bool GgufMetadata::boolean(std::string_view key, std::optional<bool> fallback) const {
  if (fallback && !has(key)) return *fallback;
  const GgufValue& value = scalar(key);
  if (value.kind != GgufKind::boolean) corrupt(key, "is neither true nor false");
  return value.bytes.front() != 0;
}

std::string_view GgufMetadata::string(std::string_view key,
                                      std::optional<std::string_view> fallback) const {
  if (fallback && !has(key)) return *fallback;
  const GgufValue& value = scalar(key);
  if (value.kind != GgufKind::string) corrupt(key, "is no string");
  std::string_view bytes = value.bytes;
  return take_string(bytes);
}

std::vector<std::string_view> GgufMetadata::strings(std::string_view key, std::size_t most) const {
  const GgufValue& value = array(key, most);
  if (value.kind != GgufKind::string) corrupt(key, "is no array of strings");
  std::vector<std::string_view> all;
  all.reserve(static_cast<std::size_t>(value.count));
  std::string_view bytes = value.bytes;
  for (std::uint64_t i = 0; i < value.count; ++i) all.push_back(take_string(bytes));
  return all;
}

std::vector<std::int64_t> GgufMetadata::integers(std::string_view key, std::size_t most) const {
  const GgufValue& value = array(key, most);
  const std::optional<std::uint64_t> bytes = gguf_bytes(value.kind);
  std::vector<std::int64_t> all;
  for (std::uint64_t i = 0; i < value.count; ++i) {
    const std::optional<std::int64_t> integer =
        bytes ? integer_of(value.kind, value.bytes.substr(static_cast<std::size_t>(i * *bytes)))
              : std::nullopt;
    if (!integer) corrupt(key, "is no array of integers");
    all.push_back(*integer);
  }
  return all;
}

}  // namespace sluice
