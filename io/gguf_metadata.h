// The metadata of a GGUF file: typed values by key.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// As the format numbers them.
enum class GgufKind : std::uint32_t {
  u8 = 0,
  i8 = 1,
  u16 = 2,
  i16 = 3,
  u32 = 4,
  i32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  i64 = 11,
  f64 = 12,
};

// A value, or an array of values of one kind, as bytes of the header. Its bytes have been checked:
// an array has `count` elements, and strings end where the next one begins.
struct GgufValue {
  GgufKind kind = GgufKind::u8;  // of the elements
  bool is_array = false;
  std::uint64_t count = 1;
  std::string_view bytes;
};

// The bytes of one value of `kind`; nothing for strings and arrays, whose length they carry.
std::optional<std::uint64_t> gguf_bytes(GgufKind kind);

// Accessors throw Error{corrupt} naming file and key if a key is missing (unless there is a
// fallback), has another type or lies outside the bounds given. Nothing is copied: values and
// strings point into `header`, which the metadata owns.
class GgufMetadata {
 public:
  using Values = std::map<std::string_view, GgufValue>;

  // Keys and values point into `header`, whose data does not move with the metadata.
  GgufMetadata(std::filesystem::path file, std::vector<char> header, Values values)
      : file_(std::move(file)), header_(std::move(header)), values_(std::move(values)) {}
  GgufMetadata(GgufMetadata&&) noexcept = default;
  GgufMetadata& operator=(GgufMetadata&&) noexcept = default;

  const std::filesystem::path& file() const { return file_; }
  const Values& values() const { return values_; }
  bool has(std::string_view key) const { return values_.contains(key); }

  // An integer of any width.
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most,
                       std::optional<std::int64_t> fallback = {}) const;
  // A floating-point number, or an integer.
  double number(std::string_view key, double least, double most,
                std::optional<double> fallback = {}) const;
  bool boolean(std::string_view key, std::optional<bool> fallback = {}) const;
  std::string_view string(std::string_view key,
                          std::optional<std::string_view> fallback = {}) const;
  // Arrays of at most `most` elements.
  std::vector<std::string_view> strings(std::string_view key, std::size_t most) const;
  std::vector<std::int64_t> integers(std::string_view key, std::size_t most) const;
  bool is_array(std::string_view key) const;

  // "<file>: <key> <what>; <what to do>"
  [[noreturn]] void corrupt(std::string_view key, const std::string& what) const;
  [[noreturn]] void unsupported(std::string_view key, const std::string& what) const;

 private:
  const GgufValue& value(std::string_view key) const;
  const GgufValue& scalar(std::string_view key) const;
  const GgufValue& array(std::string_view key, std::size_t most) const;

  std::filesystem::path file_;
  std::vector<char> header_;
  Values values_;
};

}  // namespace sluice
