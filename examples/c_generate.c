// Answers a prompt from C, with the KV cache capped at 2 MiB of device memory.
#include <sluice.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMostPrompt = 4096, kAnswer = 32 };

static void require(sluice_code code) {
  if (code == SLUICE_OK) return;
  fprintf(stderr, "%s\n", sluice_message());
  exit((int)code);
}

static int print(void* user, const char* text, size_t bytes) {
  (void)user;
  fwrite(text, 1, bytes, stdout);
  fflush(stdout);
  return 0;  // anything else stops
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: c_generate MODEL_DIRECTORY PROMPT\n");
    return 2;
  }
  const sluice_engine_options config = {
      .size = sizeof config, .model = argv[1], .device_memory = 2 << 20};
  sluice_engine* engine = NULL;
  require(sluice_engine_open(&config, &engine));

  int32_t prompt[kMostPrompt];
  size_t count = 0;
  require(sluice_encode(engine, argv[2], strlen(argv[2]), SLUICE_ENCODE_PROMPT, prompt, kMostPrompt,
                        &count));

  const sluice_session_options room = {.size = sizeof room, .context = (int64_t)count + kAnswer};
  sluice_session* session = NULL;
  require(sluice_session_open(engine, &room, &session));

  const sluice_sampling sampling = {.size = sizeof sampling, .max_tokens = kAnswer};
  const sluice_generate_options options = {
      .size = sizeof options, .sampling = &sampling, .on_text = print};
  require(sluice_generate(session, prompt, count, &options, NULL, 0, NULL));

  sluice_memory memory = {.size = sizeof memory};
  require(sluice_engine_memory(engine, &memory));
  fprintf(stderr, "\ndevice tier, at its peak: %llu B\n", (unsigned long long)memory.device_peak);
  require(sluice_session_free(session));
  require(sluice_engine_free(engine));
  return 0;
}
