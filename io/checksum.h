// XXH3-64 (https://github.com/Cyan4973/xxHash): tells damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace sluice {

// The checksum of bytes that come in pieces.
class Checksum {
 public:
  // Bytes of another place or of another owner get another seed, so that they do not pass for
  // these.
  explicit Checksum(std::uint64_t seed = 0);

  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  struct State;
  struct Free {
    void operator()(State* state) const;
  };
  std::unique_ptr<State, Free> state_;
};

inline std::uint64_t checksum_of(std::span<const std::byte> bytes, std::uint64_t seed = 0) {
  Checksum sum(seed);
  sum.add(bytes);
  return sum.value();
}

}  // namespace sluice
