// What threads read at the same time: a file, a checkpoint and a tokenizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "io/file.h"
#include "sluice/tokenizer.h"
#include "tests/threads/together.h"

namespace sluice {
namespace {

constexpr int kThreads = 4;
const char* const kBook = SLUICE_TEST_DATA "/needle_6k.txt";

TEST(SharedFile, IsReadAtManyPlacesAtOnce) {
  const std::string text = read_text_file(kBook, 1 << 20);
  const File file = File::open(kBook);
  ASSERT_GT(text.size(), 8000u);
  testing::together(kThreads, [&](int i) {
    for (std::size_t first = 0; first + 700 < text.size(); first += 501) {
      const std::size_t offset = (first + 137 * static_cast<std::size_t>(i)) % (text.size() - 600);
      std::string part(600, ' ');
      file.read(offset, std::as_writable_bytes(std::span(part)));
      ASSERT_EQ(part, text.substr(offset, 600));
    }
  });
}

TEST(SharedTokenizer, GivesEveryThreadTheSameIds) {
  const Tokenizer tokenizer =
      Tokenizer::load(SLUICE_SOURCE_DIR "/models/sluice-22m/tokenizer.json", 4096);
  const std::string text = read_text_file(kBook, 1 << 20).substr(0, 4000);
  const std::vector<TokenId> expected = tokenizer.encode(text);
  testing::together(kThreads, [&](int) {
    ASSERT_EQ(tokenizer.encode(text), expected);
    ASSERT_EQ(tokenizer.encode_plain(text), expected);
    ASSERT_EQ(tokenizer.decode(expected), text);
  });
}

}  // namespace
}  // namespace sluice
