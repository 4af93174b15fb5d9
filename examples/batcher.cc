// Answers several prompts at once, with one engine and one pool of KV blocks.
#include <sluice/batcher.h>
#include <sluice/errors.h>

#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: batcher MODEL_DIRECTORY PROMPT...\n";
    return 2;
  }
  try {
    sluice::EngineConfig config;
    config.model = argv[1];
    sluice::Engine engine = sluice::Engine::open(config);

    sluice::BatcherOptions options;
    options.context = 1024;
    options.running = 8;
    sluice::Batcher batcher(engine, options);

    std::vector<sluice::Stream> streams;
    for (int i = 2; i < argc; ++i) {
      sluice::Request request;
      request.prompt = engine.encode_prompt(argv[i]);
      request.sampling.max_tokens = 32;
      streams.push_back(batcher.submit(std::move(request)));
    }
    // All answers grow at the same time; a stream that is read later waits in memory.
    for (std::size_t i = 0; i < streams.size(); ++i) {
      std::cout << "> " << argv[i + 2];
      while (const auto piece = streams[i].next()) std::cout << piece->text << std::flush;
      std::cout << "\n";
    }
    const sluice::BatcherStats stats = batcher.stats();
    std::cerr << stats.answer_tokens << " tokens in " << stats.steps << " steps, "
              << stats.free_tokens << " of " << stats.planned_tokens << " tokens free\n";
    return 0;
  } catch (const sluice::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
