// A prompt, with the tokenizer of sluice-22m, which does not normalise: text survives the round
// trip byte by byte, and invalid UTF-8 is refused at its first bad byte. The bytes taken as token
// ids decode to the same text at once and one by one.
#include <bit>
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/shipped_tokenizer.h"

namespace sluice::fuzz {
namespace {

std::string decode_one_by_one(const std::vector<TokenId>& ids) {
  StreamDecoder decoder(tokenizer());
  std::string text;
  for (const TokenId id : ids) {
    const std::string part = decoder.push(id);
    require(!invalid_utf8_at(part), "what a stream hands out is UTF-8");
    text += part;
  }
  return text + decoder.finish();
}

// Each two bytes of the input make an id.
void decode_as_ids(std::string_view input) {
  std::vector<TokenId> ids;
  for (std::size_t i = 0; i + 1 < input.size(); i += 2) {
    const int pair =
        static_cast<unsigned char>(input[i]) * 256 + static_cast<unsigned char>(input[i + 1]);
    ids.push_back(pair % tokenizer().size());
  }
  const std::string text = tokenizer().decode(ids);
  require(!invalid_utf8_at(text), "decoded text is UTF-8");
  require(decode_one_by_one(ids) == text, "a stream gives the text of all its ids");
}

std::string hold(const std::vector<TokenId>& ids, std::string_view input) {
  require(!invalid_utf8_at(input), "an encoded text is UTF-8");
  require(tokenizer().decode(ids, true) == input, "text comes back from its ids");
  require(ids.size() <= input.size(), "a token stands for a byte or more");
  // A rough measure of how well the text merges.
  return std::string(static_cast<std::size_t>(std::bit_width(input.size() - ids.size())), '+');
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& /*folder*/) {
  decode_as_ids(input);
  const auto encode = [&] { return tokenizer().encode(input); };
  const Answer result =
      answer_of({ErrorCode::prompt}, encode,
                [&](const std::vector<TokenId>& ids) { return hold(ids, input); });
  if (const auto invalid = invalid_utf8_at(input)) {
    const std::string place = "offset " + std::to_string(*invalid) + " ";
    require(result.text.find(place) != std::string::npos, "the first wrong byte is named");
    hold(tokenizer().encode(input.substr(0, *invalid)), input.substr(0, *invalid));
  }
  return result;
}

}  // namespace sluice::fuzz
