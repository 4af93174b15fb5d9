// Writes GGUF files, right ones and, for tests of the reader, wrong ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sluice::testing {

template <typename T>
std::string le_bytes(T value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

inline std::string gguf_string(std::string_view text) {
  return le_bytes<std::uint64_t>(text.size()) + std::string(text);
}

class GgufWriter {
 public:
  // The numbers of value types.
  static constexpr std::uint32_t kU16 = 2, kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7, kString = 8,
                                 kArray = 9, kU64 = 10;

  // Fields that a test sets to something wrong.
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;
  std::uint64_t more_tensors = 0;  // that the header promises but does not have
  std::uint64_t more_keys = 0;

  void add(std::string_view key, std::uint32_t type, std::string_view bytes) {
    keys_ += gguf_string(key) + le_bytes(type) + std::string(bytes);
    ++key_count_;
  }
  void add_u16(std::string_view key, std::uint16_t value) { add(key, kU16, le_bytes(value)); }
  void add_u32(std::string_view key, std::uint32_t value) { add(key, kU32, le_bytes(value)); }
  void add_i32(std::string_view key, std::int32_t value) { add(key, kI32, le_bytes(value)); }
  void add_u64(std::string_view key, std::uint64_t value) { add(key, kU64, le_bytes(value)); }
  void add_f32(std::string_view key, float value) { add(key, kF32, le_bytes(value)); }
  void add_bool(std::string_view key, bool value) {
    add(key, kBool, std::string(1, value ? '\1' : '\0'));
  }
  void add_string(std::string_view key, std::string_view value) {
    add(key, kString, gguf_string(value));
  }
  void add_array(std::string_view key, std::uint32_t type, std::uint64_t count,
                 std::string_view bytes) {
    add(key, kArray, le_bytes(type) + le_bytes(count) + std::string(bytes));
  }
  void add_strings(std::string_view key, const std::vector<std::string>& values) {
    std::string bytes;
    for (const std::string& value : values) bytes += gguf_string(value);
    add_array(key, kString, values.size(), bytes);
  }
  void add_i32s(std::string_view key, const std::vector<std::int32_t>& values) {
    std::string bytes;
    for (const std::int32_t value : values) bytes += le_bytes(value);
    add_array(key, kI32, values.size(), bytes);
  }

  // `shape`: row-major. The tensor lies behind those added before.
  void add_tensor(std::string_view name, std::uint32_t type,
                  const std::vector<std::uint64_t>& shape, std::string_view data) {
    data_.resize(padded(data_.size()));
    add_tensor_at(name, type, shape, data_.size());
    data_ += data;
  }
  // Only the entry in the list of tensors.
  void add_tensor_at(std::string_view name, std::uint32_t type,
                     const std::vector<std::uint64_t>& shape, std::uint64_t offset) {
    tensors_ += gguf_string(name) + le_bytes(static_cast<std::uint32_t>(shape.size()));
    for (auto size = shape.rbegin(); size != shape.rend(); ++size) tensors_ += le_bytes(*size);
    tensors_ += le_bytes(type) + le_bytes(offset);
    ++tensor_count_;
  }

  std::string bytes() const {
    std::string file = magic + le_bytes(version) + le_bytes(tensor_count_ + more_tensors) +
                       le_bytes(key_count_ + more_keys) + keys_ + tensors_;
    file.resize(padded(file.size()));
    return file + data_;
  }

 private:
  std::size_t padded(std::size_t size) const {
    return static_cast<std::size_t>((size + alignment - 1) / alignment * alignment);
  }

  std::string keys_;
  std::uint64_t key_count_ = 0;
  std::string tensors_;
  std::uint64_t tensor_count_ = 0;
  std::string data_;
};

}  // namespace sluice::testing
