// A tokenizer.json and, after a line "---", a text for it. A vocabulary entry "@bytes":0 stands for
// the entries of all bytes, with ids 0 to 255. A tokenizer that loads encodes any UTF-8 into valid
// ids or gives an error with the reason; without added tokens and a normaliser the text survives
// the round trip.
#include <nlohmann/json.hpp>
#include <vector>

#include "engine/byte_level.h"
#include "sluice/tokenizer.h"
#include "tests/fuzz/fuzz.h"

namespace sluice::fuzz {
namespace {

constexpr int kVocabulary = 600;

const std::string& byte_entries() {
  static const std::string entries = [] {
    std::string text;
    for (int byte = 0; byte < 256; ++byte) {
      const std::string symbol = byte_symbol(static_cast<std::uint8_t>(byte));
      text += (byte == 0 ? "" : ",") + nlohmann::json(symbol).dump() + ":" + std::to_string(byte);
    }
    return text;
  }();
  return entries;
}

std::string with_bytes(std::string_view file) {
  constexpr std::string_view kPlace = "\"@bytes\":0";
  std::string text(file);
  const std::size_t at = text.find(kPlace);
  return at == std::string::npos ? text : text.replace(at, kPlace.size(), byte_entries());
}

bool keeps_text(std::string_view file) {
  const nlohmann::json json = nlohmann::json::parse(file);
  return json.value("added_tokens", nlohmann::json()).empty() &&
         json.value("normalizer", nlohmann::json()).is_null();
}

void hold_ids(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  std::string streamed;
  StreamDecoder decoder(tokenizer);
  for (const TokenId id : ids) {
    require(id >= 0 && id < tokenizer.size(), "ids lie below the size");
    streamed += decoder.push(id);
  }
  streamed += decoder.finish();
  const std::string text = tokenizer.decode(ids);
  require(!invalid_utf8_at(text), "decoded text is UTF-8");
  require(streamed == text, "a stream gives the text of all its ids");
}

std::string hold(const Tokenizer& tokenizer, std::string_view file, std::string_view text) {
  require(tokenizer.size() <= kVocabulary, "ids lie in the vocabulary");
  tokenizer.decode(tokenizer.prefix(), true);
  const auto encode = [&] { return tokenizer.encode(text); };
  const auto hold_encoded = [&](const std::vector<TokenId>& ids) {
    hold_ids(tokenizer, ids);
    if (keeps_text(file)) require(tokenizer.decode(ids, true) == text, "text comes back");
    return std::string("encodes");
  };
  const bool is_text = !invalid_utf8_at(text);
  return answer_of({is_text ? ErrorCode::tokenizer : ErrorCode::prompt}, encode, hold_encoded).text;
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  const Parts parts = split_parts(input);
  const std::string file = with_bytes(parts.first);
  const std::filesystem::path path = folder / "tokenizer.json";
  write_file(path, file);
  return answer_of(
      {ErrorCode::tokenizer, ErrorCode::unsupported},
      [&] { return Tokenizer::load(path, kVocabulary); },
      [&](const Tokenizer& tokenizer) { return hold(tokenizer, file, parts.second); });
}

}  // namespace sluice::fuzz
