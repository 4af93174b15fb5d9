// Answers a prompt with the program's own scorer. A policy names it in the same way as Sluice's
// scorers.
#include <sluice/errors.h>
#include <sluice/generate.h>

#include <iostream>

#include "signs.h"

int main(int argc, char** argv) {
  if (argc < 3 || argc > 5) {
    std::cerr << "usage: scorer MODEL_DIRECTORY PROMPT [POLICY [DEVICE]]\n";
    return 2;
  }
  try {
    sluice::EngineConfig config;
    config.model = argv[1];
    if (argc > 4) config.device = argv[4];
    config.scorers.add(std::make_shared<signs::Signs>());
    sluice::Engine engine = sluice::Engine::open(config);

    const std::vector<sluice::TokenId> prompt = engine.encode_prompt(argv[2]);
    sluice::GenerateOptions options;
    options.sampling.max_tokens = 32;
    options.on_text = [](std::string_view text) { std::cout << text << std::flush; };

    sluice::SessionOptions wanted;
    wanted.context = static_cast<std::int64_t>(prompt.size()) + options.sampling.max_tokens;
    wanted.policies = {engine.policy(argc > 3 ? argv[3] : "select=signs prune=top_k(64)")};
    sluice::Session session = engine.new_session(wanted);
    sluice::generate(engine, session, prompt, options);
    std::cout << "\n";
    std::cerr << sluice::to_string(session.policy()) << "\n" << session.ledger().to_table();
    return 0;
  } catch (const sluice::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
