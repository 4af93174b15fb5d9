#include "tools/bench_made_up.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "lib/check.h"
#include "lib/hadamard.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::tools {
namespace {

// What a random number decides, so that no two are drawn from the same place.
enum class Draw : std::uint8_t { key, value, query, topic, asked, sign };

// SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators").
class SplitMix {
 public:
  explicit SplitMix(std::uint64_t state) : state_(state) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // From 0 to below 1.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  // Approximately normal: the sum of four uniform numbers, with mean 0 and variance 1.
  float normal() {
    constexpr float kSqrt3 = 1.7320508f;
    const std::uint64_t bits = next();
    const std::uint64_t sum =
        (bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48);
    return (static_cast<float>(sum) * 0x1p-16f - (2.0f - 0x1p-15f)) * kSqrt3;
  }

 private:
  std::uint64_t state_;
};

// The numbers of one place.
SplitMix draws(std::uint64_t seed, Draw what, std::initializer_list<std::int64_t> place) {
  std::uint64_t state = SplitMix(seed).next() + static_cast<std::uint64_t>(what);
  for (const std::int64_t number : place) {
    state = SplitMix(state).next() ^ static_cast<std::uint64_t>(number);
  }
  return SplitMix(SplitMix(state).next());
}

void require_range(const char* flag, double value, double least, double most) {
  if (value >= least && value <= most) return;
  throw Error(ErrorCode::usage, std::string(flag) + " must be " + digits(least) + " to " +
                                    digits(most) + ", not " + digits(value));
}

}  // namespace

void validate(const MadeUpStatistics& statistics) {
  require_range("--logit-std", statistics.logit_std, 0.0, 8.0);
  require_range("--heavy-share", statistics.heavy_share, 1e-6, 0.125);
  require_range("--heavy-weight", statistics.heavy_weight, 0.001, 0.999);
  require_range("--persistence", statistics.persistence, 0.125, 1.0);
}

double MadeUpRows::heavy_lead() const {
  const double share = statistics_.heavy_share;
  const double weight = statistics_.heavy_weight;
  return std::log(weight * (1.0 - share) / ((1.0 - weight) * share));
}

int MadeUpRows::topic(int layer, int head, std::int64_t token) const {
  SplitMix random = draws(seed_, Draw::topic, {layer, head, token});
  if (random.uniform() >= statistics_.heavy_share * kTopicsOfSlot) return -1;
  return static_cast<int>(random.next() % static_cast<std::uint64_t>(slots() * kTopicsOfSlot));
}

// A slot draws one of its topics anew, the same one or another, so often that the next step has
// another one with probability 1 - persistence.
int MadeUpRows::asked_topic(int layer, int head, int slot, std::int64_t step) const {
  constexpr double kOthers = static_cast<double>(kTopicsOfSlot - 1) / kTopicsOfSlot;
  const double change = (1.0 - statistics_.persistence) / kOthers;
  std::int64_t drawn = change > 0.0 ? step : 0;
  const auto at = [&](std::int64_t step_of_draw) {
    return draws(seed_, Draw::asked, {layer, head, slot, step_of_draw});
  };
  while (drawn > 0 && at(drawn).uniform() >= change) --drawn;
  SplitMix random = at(drawn);
  random.next();
  return slot * kTopicsOfSlot + static_cast<int>(random.next() % kTopicsOfSlot);
}

bool MadeUpRows::is_heavy(int layer, int head, std::int64_t token, std::int64_t step) const {
  const int own = topic(layer, head, token);
  return own >= 0 && asked_topic(layer, head, own / kTopicsOfSlot, step) == own;
}

// Topics are the even channels, noise the odd ones.
void MadeUpRows::make_key(int layer, int head, std::int64_t token, std::span<float> to) const {
  SplitMix random = draws(seed_, Draw::key, {layer, head, token});
  for (std::size_t c = 0; c < to.size(); ++c) to[c] = c % 2 == 0 ? 0.0f : random.normal();
  const int own = topic(layer, head, token);
  if (own >= 0) {
    to[2 * static_cast<std::size_t>(own)] = std::sqrt(0.5f * static_cast<float>(to.size()));
  }
  spread(layer, head, to);
}

void MadeUpRows::make_value(int layer, int head, std::int64_t token, std::span<float> to) const {
  SplitMix random = draws(seed_, Draw::value, {layer, head, token});
  for (float& channel : to) channel = random.normal();
}

// A logit is the product with a key divided by sqrt(head_dim).
void MadeUpRows::make_query(int layer, int query_head, std::int64_t step,
                            std::span<float> to) const {
  constexpr double kSqrt2 = 1.4142135623730951;
  const int head = query_head / shape_.group();
  SplitMix random = draws(seed_, Draw::query, {layer, query_head, step});
  const auto noise = static_cast<float>(statistics_.logit_std * kSqrt2);
  for (std::size_t c = 0; c < to.size(); ++c) to[c] = c % 2 == 0 ? 0.0f : noise * random.normal();
  for (int slot = 0; slot < slots(); ++slot) {
    to[2 * static_cast<std::size_t>(asked_topic(layer, head, slot, step))] =
        static_cast<float>(heavy_lead() * kSqrt2);
  }
  spread(layer, head, to);
}

// The signs come last, because key codes are of rotated keys and would undo a rotation alone.
void MadeUpRows::spread(int layer, int head, std::span<float> vector) const {
  rotate(vector.data(), std::ssize(vector), Rotation::of(shape_.head_dim));
  SplitMix random = draws(seed_, Draw::sign, {layer, head});
  std::uint64_t signs = 0;
  for (std::size_t c = 0; c < vector.size(); ++c, signs >>= 1) {
    if (c % 64 == 0) signs = random.next();
    if ((signs & 1) != 0) vector[c] = -vector[c];
  }
}

void MadeUpRows::read(RowPart part, int layer, std::int64_t first, std::int64_t count,
                      std::span<std::byte> to) const {
  check(to.size() == static_cast<std::size_t>(count) * token_bytes(part),
        "room for other rows than are read");
  const int heads = part == RowPart::q ? shape_.query_heads : shape_.kv_heads;
  std::vector<float> vector(static_cast<std::size_t>(shape_.head_dim));
  std::byte* next = to.data();
  for (std::int64_t at = first; at < first + count; ++at) {
    for (int head = 0; head < heads; ++head) {
      if (part == RowPart::q) make_query(layer, head, at, vector);
      if (part == RowPart::k) make_key(layer, head, at, vector);
      if (part == RowPart::v) make_value(layer, head, at, vector);
      const std::size_t bytes = vector.size() * sizeof(float);
      std::memcpy(next, vector.data(), bytes);
      next += bytes;
    }
  }
}

}  // namespace sluice::tools
