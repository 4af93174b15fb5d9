// The KV cache alone, for an engine that runs its own model (made up here). Two answers continue
// one prompt and share their steps, under a cap on the device tier.
#include "sluice/kv_cache.h"

#include <cmath>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int kLayers = 4;
constexpr int kQueryHeads = 8;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;

// Stands for a model's projections: [tokens, heads, head_dim].
std::vector<float> projection(std::int64_t tokens, int heads, double phase) {
  std::vector<float> values(static_cast<std::size_t>(tokens * heads * kHeadDim));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(std::sin(phase + 0.37 * static_cast<double>(i)));
  }
  return values;
}

// Runs all layers of a step: append, attend, then whatever the model does with the result.
void run(sluice::KvStep step, std::int64_t tokens) {
  std::vector<float> attended(static_cast<std::size_t>(tokens * kQueryHeads * kHeadDim));
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::vector<float> keys = projection(tokens, kKvHeads, layer);
    const std::vector<float> values = projection(tokens, kKvHeads, layer + 0.5);
    const std::vector<float> queries = projection(tokens, kQueryHeads, layer);
    step.append(layer, keys.data(), values.data());
    step.attend(layer, queries.data(), attended.data());
  }
  step.end();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    sluice::KvConfig config;
    config.shape = {kLayers, kQueryHeads, kKvHeads, kHeadDim, sluice::DType::bf16};
    config.context = 4096;
    config.sequences = 2;
    config.device = argc > 1 ? argv[1] : "cpu";
    config.policies = {sluice::parse_policy("sluice")};
    // Without a GPU the device tier is a bounded part of RAM.
    if (config.device == "cpu") config.device_memory = 8 << 20;
    sluice::KvCache cache(config);

    sluice::KvSequence first = cache.new_sequence();
    while (first.length() < 2048) {
      run(first.begin_step(sluice::Phase::prefill, cache.plan().chunk), cache.plan().chunk);
    }
    sluice::KvSequence second = first.fork();  // shares the prompt's rows, costs only what it adds
    sluice::KvSequence* const both[] = {&first, &second};
    for (int token = 0; token < 16; ++token) run(cache.begin_step(both), 2);

    std::cout << second.ledger().to_table();
    std::cout << "device tier, at its peak: " << cache.memory().device_peak << " B\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
