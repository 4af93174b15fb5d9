#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "engine/added_vocabulary.h"
#include "engine/special_tokens.h"
#include "engine/tokenizer_spec.h"
#include "io/json.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Twice the size of the largest tokenizer.json in use.
constexpr std::uint64_t kMaxTokenizerFile = std::uint64_t{64} << 20;
constexpr int kMaxVocabulary = 1 << 24;

nlohmann::json read_file(const std::filesystem::path& path) {
  try {
    return read_json_file(path, kMaxTokenizerFile);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt) throw;
    throw Error(ErrorCode::tokenizer, error.what());
  }
}

TokenizerSpec parse(const nlohmann::json& json, const std::filesystem::path& file, int vocabulary) {
  if (vocabulary > kMaxVocabulary) {
    throw_unsupported("model.vocab", "a vocabulary of " + std::to_string(vocabulary));
  }
  require_plain_bpe(json);
  PipelineSpec pipeline = parse_pipeline(json);
  return {file, std::move(pipeline), parse_vocabulary(json, vocabulary)};
}

// `added`: tokens of other files.
TokenizerSpec number_added(TokenizerSpec spec, const std::vector<AddedToken>& added) {
  AddedVocabulary numbered(spec.vocabulary.ids);
  numbered.add(spec.vocabulary.added);
  numbered.add(added);
  spec.vocabulary.added = numbered.tokens();
  return spec;
}

// The ids before every text. "add_bos_token" of tokenizer_config.json holds where transformers 4
// reads it, although 5 does not; otherwise the post-processor decides. A checkpoint with neither
// tokenizer_config.json nor a post-processor gets the BOS token of its config.json.
std::vector<TokenId> prefix_of(const TokenizerSpec& spec, const SpecialTokens& special,
                               std::optional<TokenId> bos) {
  if (!special.has_config && !spec.pipeline.has_post_processor) {
    return bos ? std::vector{*bos} : std::vector<TokenId>();
  }
  const std::optional<std::string> text = special.text_of("bos_token");
  if (!special.heeds_add_bos_token || !special.add_bos_token || !text) return spec.pipeline.prefix;
  if (!*special.add_bos_token) return {};
  const std::vector<AddedToken>& added = spec.vocabulary.added;
  const auto same = [&](const AddedToken& token) { return token.content == *text; };
  return {std::find_if(added.begin(), added.end(), same)->id};
}

}  // namespace

TokenizerSpec read_tokenizer_file(const std::filesystem::path& file, int vocabulary) {
  const nlohmann::json json = read_file(file);
  return in_file(file, [&] { return number_added(parse(json, file, vocabulary), {}); });
}

TokenizerSpec read_tokenizer_folder(const std::filesystem::path& folder, int vocabulary,
                                    std::optional<TokenId> bos) {
  const std::filesystem::path file = folder / "tokenizer.json";
  const nlohmann::json json = read_file(file);
  TokenizerSpec spec = in_file(file, [&] { return parse(json, file, vocabulary); });
  const SpecialTokens special = read_special_tokens(folder, spec.vocabulary.added);
  return in_file(file, [&] {
    spec = number_added(std::move(spec), special.added);
    spec.pipeline.prefix = prefix_of(spec, special, bos);
    return std::move(spec);
  });
}

}  // namespace sluice
