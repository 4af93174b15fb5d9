#include "io/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace sluice {

struct Checksum::State {
  XXH3_state_t xxh;  // aligned to 64 bytes, which `new` heeds
};

void Checksum::Free::operator()(State* state) const { delete state; }

Checksum::Checksum(std::uint64_t seed) : state_(new State) {
  // Without this a reset trusts the secret of a state that had the same seed in the same memory.
  XXH3_INITSTATE(&state_->xxh);
  XXH3_64bits_reset_withSeed(&state_->xxh, seed);
}

void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size());
}

std::uint64_t Checksum::value() const { return XXH3_64bits_digest(&state_->xxh); }

}  // namespace sluice
