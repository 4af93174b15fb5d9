// How every function of sluice.h begins and ends: structs in, buffers out, exceptions to codes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/c/sluice.h"
#include "sluice/errors.h"
#include "sluice/kv_cache.h"
#include "sluice/policy.h"

namespace sluice::c {

// Ends a call with a code that no Error has.
struct Ending {
  sluice_code code;
  std::string message;
};

[[noreturn]] void refuse(const std::string& message);

// Sets the thread's message.
void say(std::string_view message) noexcept;
// Sets the thread's message, and returns the code of the exception in flight.
sluice_code code_of_exception() noexcept;

// Runs `body`, and turns what it throws into a code and a message.
template <typename Body>
sluice_code call(Body&& body) noexcept {
  say({});
  try {
    body();
    say({});  // of calls that failed in a callback of this one
    return SLUICE_OK;
  } catch (...) {
    return code_of_exception();
  }
}

// Throws Error{usage} unless the pointer is set.
template <typename T>
T* need(T* pointer, const char* name) {
  if (pointer == nullptr) refuse(std::string("`") + name + "` is NULL");
  return pointer;
}

// Throws Error{usage} unless `size` is that of the first version of T, or larger with nothing in
// fields that this version does not know.
template <typename T>
T read(const T* from, const char* name) {
  std::size_t size = 0;
  std::memcpy(&size, need(from, name), sizeof size);
  if (size < sizeof(T) || size > 4096) {
    refuse(std::string("`") + name + "->size` is " + std::to_string(size) + "; set it to sizeof(" +
           name + "), " + std::to_string(sizeof(T)) + " in this version");
  }
  const auto* const bytes = reinterpret_cast<const unsigned char*>(from);
  if (std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char byte) { return byte != 0; })) {
    refuse(std::string("`") + name + "` sets a field of a later version of Sluice");
  }
  T values{};
  std::memcpy(&values, bytes, sizeof(T));
  return values;
}

// The struct that a call fills; checks it as read() does. Its `size` stays.
template <typename T>
void require_struct(const T* to, const char* name) {
  std::size_t size = 0;
  std::memcpy(&size, need(to, name), sizeof size);
  if (size < sizeof(T)) {
    refuse(std::string("`") + name + "->size` is " + std::to_string(size) + "; set it to " +
           std::to_string(sizeof(T)));
  }
}
template <typename T>
void write(T* to, T values) {
  values.size = to->size;
  *to = values;
}

template <typename T>
std::span<const T> array(const T* data, std::size_t count, const char* name) {
  if (count > 0) need(data, name);
  if (count > PTRDIFF_MAX / sizeof(T)) refuse(std::string("`") + name + "`: implausible count");
  return {data, count};
}
template <typename T>
std::vector<T> copy(const T* data, std::size_t count, const char* name) {
  const std::span<const T> all = array(data, count, name);
  return {all.begin(), all.end()};
}

std::string string_or(const char* text, const char* fallback);
std::vector<std::string> strings(const char* const* texts, std::size_t count, const char* name);
// A number that 0 leaves unset.
std::optional<std::uint64_t> set(std::uint64_t bytes);
DType dtype(sluice_dtype type);
// None without directories.
std::optional<DiskConfig> disk(const char* const* directories, std::size_t count,
                               std::uint64_t bytes);

// Throws Ending{SLUICE_TOO_SMALL} unless `capacity` of them hold `count`.
void require_capacity(std::size_t count, std::size_t capacity, const char* what);
// Copies a text, with a NUL, or tokens into the caller's buffer.
void put(std::string_view text, char* buffer, std::size_t capacity, std::size_t* bytes);
void put(std::span<const TokenId> tokens, std::int32_t* buffer, std::size_t capacity,
         std::size_t* count);
// Checks a buffer of floats before anything is computed; null: the caller wants none.
void require_floats(const float* buffer, std::size_t capacity, std::size_t count);

}  // namespace sluice::c
