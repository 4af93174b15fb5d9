// Texts of a batcher, with the small model, against generate().
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sluice/batcher.h"
#include "tests/support/chat_checkpoint.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/served.h"

namespace sluice {
namespace {

using testing::config_for;
using testing::read_all;
using testing::Served;

class BatcherText : public ::testing::Test {
 protected:
  static BatcherOptions options() {
    BatcherOptions options;
    options.context = 512;
    options.running = 4;
    return options;
  }
  Request request(const std::string& text, int tokens) {
    Request request;
    request.prompt = engine_.encode_prompt(text);
    request.sampling.max_tokens = tokens;
    return request;
  }
  Served generated(const Request& request) {
    Session session = engine_.new_session(512);
    GenerateOptions options;
    options.sampling = request.sampling;
    const GenerateResult result = generate(engine_, session, request.prompt, options);
    return {result.text, result.tokens, {}, result.reason};
  }

  Engine engine_ = Engine::open(config_for());
};

TEST_F(BatcherText, EqualsWhatGenerateGives) {
  Batcher batcher(engine_, options());
  std::vector<Request> requests;
  std::vector<Stream> streams;
  for (const char* text :
       {"Well, Prince,", "The count", "It was in July", "\"Mon Dieu\"", "Pierre"}) {
    requests.push_back(request(text, 60));
    streams.push_back(batcher.submit(requests.back()));
  }
  for (std::size_t i = 0; i < streams.size(); ++i) {
    EXPECT_EQ(read_all(streams[i])[0], generated(requests[i])) << i;
  }
}

TEST_F(BatcherText, EndsBeforeAStopString) {
  Batcher batcher(engine_, options());
  Request plain = request("Well, Prince,", 60);
  const Served whole = generated(plain);
  // Strings across the borders of tokens.
  for (const std::size_t at : {std::size_t{5}, std::size_t{17}, whole.text.size() / 2}) {
    plain.sampling.stop = {whole.text.substr(at, 7), "never to be found"};
    Stream stream = batcher.submit(plain);
    const Served cut = read_all(stream)[0];
    EXPECT_EQ(cut.reason, FinishReason::stop_string);
    EXPECT_EQ(cut.text, whole.text.substr(0, whole.text.find(plain.sampling.stop[0])));
    EXPECT_EQ(cut, generated(plain));
  }
}

// A tokenizer may have special tokens that the model does not. Stop strings are compared with those
// that it has.
TEST(BatcherTextOfAChatModel, StopsWhereTheTokenizerHasMoreTokensThanTheModel) {
  const testing::ChatCheckpoint checkpoint(testing::ChatCheckpoint::format("chatml"));
  EngineConfig config;
  config.model = checkpoint.path();
  Engine engine = Engine::open(config);
  ASSERT_GT(engine.tokenizer().size(), engine.tokenizer().vocabulary());
  GenerateOptions options;
  options.sampling.max_tokens = 20;
  options.sampling.stop = {"<|im_end|>", "x"};
  const std::vector<TokenId> prompt = engine.encode_prompt("abc");
  Session session = engine.new_session(64);
  const GenerateResult result = generate(engine, session, prompt, options);

  BatcherOptions batching;
  batching.context = 64;
  Batcher batcher(engine, batching);
  Request request;
  request.prompt = prompt;
  request.sampling = options.sampling;
  Stream stream = batcher.submit(request);
  const Served served = read_all(stream)[0];
  EXPECT_EQ(served.text, result.text);
  EXPECT_EQ(served.reason, result.reason);
}

}  // namespace
}  // namespace sluice
