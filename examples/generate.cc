// Answers a prompt with the KV cache capped at 2 MiB of device memory.
#include <sluice/errors.h>
#include <sluice/generate.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: generate MODEL_DIRECTORY PROMPT\n";
    return 2;
  }
  try {
    sluice::EngineConfig config;
    config.model = argv[1];
    config.device_memory = 2 << 20;
    sluice::Engine engine = sluice::Engine::open(config);

    const std::vector<sluice::TokenId> prompt = engine.encode_prompt(argv[2]);
    sluice::GenerateOptions options;
    options.sampling.max_tokens = 32;
    options.on_text = [](std::string_view text) { std::cout << text << std::flush; };

    const auto context = static_cast<std::int64_t>(prompt.size()) + options.sampling.max_tokens;
    std::cerr << engine.plan(context).to_table();  // lists every byte before its allocation
    sluice::Session session = engine.new_session(context);
    const sluice::GenerateResult result = sluice::generate(engine, session, prompt, options);

    std::cout << "\n";
    std::cerr << result.timings.decode_rate() << " tokens/s\n" << session.ledger().to_table();
    std::cerr << "device tier, at its peak: " << engine.memory().device_peak << " B\n";
    return 0;
  } catch (const sluice::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
