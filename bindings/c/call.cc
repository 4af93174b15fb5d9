#include "bindings/c/call.h"

#include <array>
#include <new>

#include "sluice/version.h"

namespace sluice::c {
namespace {

// Longer than the longest message of an Error, and nothing that could fail to be allocated.
thread_local std::array<char, 8192> thread_message{};

constexpr std::array<const char*, 13> kNames{
    "ok",     "stopped", "usage", "not_found", "corrupt", "unsupported", "tokenizer",
    "prompt", "memory",  "io",    "internal",  "numeric", "too_small"};

// Codes of errors follow those of stopped calls, in the order of ErrorCode.
sluice_code code_of(ErrorCode code) {
  return static_cast<sluice_code>(static_cast<int>(code) + SLUICE_USAGE);
}
static_assert(static_cast<int>(ErrorCode::usage) == 0);
static_assert(static_cast<int>(ErrorCode::numeric) + SLUICE_USAGE == SLUICE_NUMERIC);

}  // namespace

void refuse(const std::string& message) { throw Error(ErrorCode::usage, message); }

void say(std::string_view message) noexcept {
  std::size_t bytes = std::min(message.size(), thread_message.size() - 1);
  // No character is cut.
  while (bytes < message.size() && bytes > 0 &&
         (static_cast<unsigned char>(message[bytes]) & 0xC0U) == 0x80U) {
    --bytes;
  }
  if (bytes > 0) std::memcpy(thread_message.data(), message.data(), bytes);
  thread_message[bytes] = '\0';
}

sluice_code code_of_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    say(error.what());
    return code_of(error.code());
  } catch (const Ending& ending) {
    say(ending.message);
    return ending.code;
  } catch (const std::bad_alloc&) {
    say("the machine has no memory left");
    return SLUICE_MEMORY;
  } catch (const std::length_error&) {
    say("a size is larger than memory can be");
    return SLUICE_MEMORY;
  } catch (const std::exception& error) {
    say(error.what());
    return SLUICE_INTERNAL;
  } catch (...) {
    say("a callback threw");
    return SLUICE_INTERNAL;
  }
}

std::string string_or(const char* text, const char* fallback) {
  return text != nullptr ? text : fallback;
}

std::vector<std::string> strings(const char* const* texts, std::size_t count, const char* name) {
  std::vector<std::string> all;
  for (const char* text : array(texts, count, name)) all.emplace_back(need(text, name));
  return all;
}

std::optional<std::uint64_t> set(std::uint64_t bytes) {
  return bytes > 0 ? std::optional(bytes) : std::nullopt;
}

DType dtype(sluice_dtype type) {
  switch (type) {
    case SLUICE_BF16:
      return DType::bf16;
    case SLUICE_F16:
      return DType::f16;
    case SLUICE_F32:
      return DType::f32;
    default:
      refuse("a sluice_dtype is SLUICE_BF16, SLUICE_F16 or SLUICE_F32");
  }
}

std::optional<DiskConfig> disk(const char* const* directories, std::size_t count,
                               std::uint64_t bytes) {
  if (count == 0) return std::nullopt;
  DiskConfig to;
  for (const std::string& directory : strings(directories, count, "disk")) {
    to.directories.emplace_back(directory);
  }
  to.bytes = set(bytes);
  return to;
}

void require_capacity(std::size_t count, std::size_t capacity, const char* what) {
  if (count <= capacity) return;
  throw Ending{SLUICE_TOO_SMALL, "the buffer holds " + std::to_string(capacity) + " " + what +
                                     ", and there are " + std::to_string(count)};
}

void put(std::string_view text, char* buffer, std::size_t capacity, std::size_t* bytes) {
  if (bytes != nullptr) *bytes = text.size();
  require_capacity(text.size() + 1, capacity, "bytes");
  need(buffer, "buffer");
  std::copy(text.begin(), text.end(), buffer);
  buffer[text.size()] = '\0';
}

void put(std::span<const TokenId> tokens, std::int32_t* buffer, std::size_t capacity,
         std::size_t* count) {
  if (count != nullptr) *count = tokens.size();
  require_capacity(tokens.size(), capacity, "tokens");
  if (!tokens.empty()) need(buffer, "tokens");
  std::copy(tokens.begin(), tokens.end(), buffer);
}

void require_floats(const float* buffer, std::size_t capacity, std::size_t count) {
  if (buffer != nullptr) require_capacity(count, capacity, "floats");
}

}  // namespace sluice::c

const char* sluice_version(void) { return sluice::kVersion; }

const char* sluice_message(void) { return sluice::c::thread_message.data(); }

const char* sluice_code_name(int code) {
  const auto index = static_cast<std::size_t>(code);
  return index < sluice::c::kNames.size() ? sluice::c::kNames[index] : "unknown";
}
