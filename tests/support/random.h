// Seeded random numbers for property tests. The seed is printed with every failure.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace sluice::testing {

// SLUICE_SEED in the environment, or `fallback`.
inline std::uint64_t seed(std::uint64_t fallback) {
  const char* text = std::getenv("SLUICE_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : fallback;
}

inline std::string seed_message(std::uint64_t value) {
  return "SLUICE_SEED=" + std::to_string(value);
}

class Random {
 public:
  explicit Random(std::uint64_t value) : engine_(value) {}

  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }

  std::vector<float> normal(std::int64_t count, float deviation = 1.0f) {
    std::normal_distribution<float> distribution(0.0f, deviation);
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = distribution(engine_);
    return values;
  }

  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace sluice::testing
