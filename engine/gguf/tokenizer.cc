#include "engine/gguf/tokenizer.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "engine/gguf/pre_tokenizers.h"
#include "engine/utf8.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::gguf {
namespace {

constexpr const char* kModel = "tokenizer.ggml.model";
constexpr const char* kPre = "tokenizer.ggml.pre";
constexpr const char* kTokens = "tokenizer.ggml.tokens";
constexpr const char* kTypes = "tokenizer.ggml.token_type";
constexpr const char* kMerges = "tokenizer.ggml.merges";
constexpr const char* kBos = "tokenizer.ggml.bos_token_id";
constexpr const char* kEos = "tokenizer.ggml.eos_token_id";
constexpr const char* kAddBos = "tokenizer.ggml.add_bos_token";
constexpr const char* kAddEos = "tokenizer.ggml.add_eos_token";
constexpr const char* kTemplate = "tokenizer.chat_template";
constexpr std::size_t kMaxMerges = std::size_t{1} << 23;

// As the format numbers them.
enum class TokenType : std::int64_t { normal = 1, unknown, control, user_defined, unused, byte };

// Texts of control tokens that end what a model says, whatever the ids in the metadata are.
// Source: llama-vocab.cpp of llama.cpp, special_eog_ids.
constexpr std::array<std::string_view, 6> kEnds = {"<|eot_id|>",      "<|eom_id|>",    "<|im_end|>",
                                                   "<|end_of_text|>", "<|endoftext|>", "</s>"};

[[noreturn]] void throw_broken(const GgufMetadata& metadata, std::string_view key,
                               const std::string& what) {
  throw Error(ErrorCode::tokenizer, metadata.file().string() + ": " + std::string(key) + " " +
                                        what + "; convert the model again");
}

std::optional<TokenId> token_id(const GgufMetadata& metadata, const char* key, int vocabulary) {
  if (!metadata.has(key)) return std::nullopt;
  return static_cast<TokenId>(metadata.integer(key, 0, vocabulary - 1));
}

// The tokens of a file in the order of their ids, and what each of them is.
struct TokenList {
  std::vector<std::string_view> texts;
  std::vector<TokenType> types;

  TokenList(const GgufMetadata& metadata, int vocabulary)
      : texts(metadata.strings(kTokens, static_cast<std::size_t>(vocabulary))),
        types(texts.size(), TokenType::normal) {
    if (!metadata.has(kTypes)) return;
    const std::vector<std::int64_t> numbers = metadata.integers(kTypes, texts.size());
    if (numbers.size() != texts.size()) {
      throw_broken(metadata, kTypes,
                   "has " + std::to_string(numbers.size()) + " entries for " +
                       std::to_string(texts.size()) + " tokens");
    }
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i] < static_cast<std::int64_t>(TokenType::normal) ||
          numbers[i] >= static_cast<std::int64_t>(TokenType::byte)) {
        throw_broken(metadata, kTypes,
                     "says that token " + std::to_string(i) + " is of type " +
                         std::to_string(numbers[i]) + ", which no token of a gpt2 tokenizer is");
      }
      types[i] = static_cast<TokenType>(numbers[i]);
    }
  }
};

// Tokens that are found in the text as it is; the others are what merging gives.
bool is_added(TokenType type) { return type != TokenType::normal && type != TokenType::unused; }

void require_text(const GgufMetadata& metadata, std::string_view text, std::size_t id,
                  TokenType type) {
  const std::string named = "has token " + std::to_string(id) + ", " + as_json(text) + ", which ";
  if (text.empty()) throw_broken(metadata, kTokens, named + "is empty");
  if (find_invalid_utf8(text)) throw_broken(metadata, kTokens, named + "is no UTF-8");
  if (is_added(type) && text.size() > kMaxAddedToken) {
    throw_broken(metadata, kTokens,
                 named + "has " + std::to_string(text.size()) + " bytes, more than the " +
                     std::to_string(kMaxAddedToken) + " of a token that is not merged");
  }
}

void read_tokens(const GgufMetadata& metadata, const TokenList& list, VocabularySpec& spec) {
  std::unordered_map<std::string_view, std::size_t> seen;
  seen.reserve(list.texts.size());
  spec.ids.reserve(list.texts.size());
  for (std::size_t id = 0; id < list.texts.size(); ++id) {
    const TokenType type = list.types[id];
    if (type == TokenType::unused) continue;  // rows of the embedding that only fill it up
    require_text(metadata, list.texts[id], id, type);
    const auto [first, is_new] = seen.emplace(list.texts[id], id);
    if (!is_new) {
      throw_broken(metadata, kTokens,
                   "has " + as_json(list.texts[id]) + " twice, as tokens " +
                       std::to_string(first->second) + " and " + std::to_string(id));
    }
    std::string text(list.texts[id]);
    if (is_added(type)) {
      const bool is_special = type != TokenType::user_defined;
      spec.added.push_back({std::move(text), static_cast<TokenId>(id), is_special});
    } else {
      spec.ids.emplace(std::move(text), static_cast<TokenId>(id));
    }
  }
}

// A merge is "left right"; tokens have no spaces, because a space has another symbol.
void read_merges(const GgufMetadata& metadata, VocabularySpec& spec) {
  const std::vector<std::string_view> merges = metadata.strings(kMerges, kMaxMerges);
  spec.merges.reserve(merges.size());
  const auto broken = [&](const std::string& what) {
    throw_broken(metadata, kMerges, "[" + std::to_string(spec.merges.size()) + "] " + what);
  };
  const auto id = [&](const std::string& text) {
    const auto found = spec.ids.find(text);
    if (found == spec.ids.end()) broken("has " + as_json(text) + ", which is no token");
    return found->second;
  };
  for (const std::string_view merge : merges) {
    const std::size_t space = merge.find(' ');
    if (space == std::string_view::npos || space != merge.rfind(' ')) {
      broken("is not a pair of tokens");
    }
    const std::string left(merge.substr(0, space));
    const std::string right(merge.substr(space + 1));
    spec.merges.push_back({id(left), id(right), id(left + right)});
  }
}

const PreTokenizer& read_pre_tokenizer(const GgufMetadata& metadata) {
  const std::string_view model = metadata.string(kModel);
  if (model != "gpt2") {
    metadata.unsupported(kModel, "is " + in_quotes(model) +
                                     ", but Sluice runs byte-level BPE tokenizers (gpt2); take a "
                                     "model with one");
  }
  if (!metadata.has(kPre)) {
    metadata.unsupported(kPre,
                         "is missing, so nothing says how text is cut; convert the model again");
  }
  const std::string_view name = metadata.string(kPre);
  const PreTokenizer* const pre = find_pre_tokenizer(name);
  if (pre == nullptr) {
    metadata.unsupported(kPre,
                         "is " + in_quotes(name) + ", but Sluice knows " + pre_tokenizer_names());
  }
  return *pre;
}

std::vector<TokenId> read_prefix(const GgufMetadata& metadata, const PreTokenizer& pre,
                                 const TokenList& list) {
  if (metadata.boolean(kAddEos, false)) {
    metadata.unsupported(kAddEos, "asks for a token behind every text, which Sluice does not put");
  }
  if (!metadata.boolean(kAddBos, pre.add_bos)) return {};
  const auto bos = token_id(metadata, kBos, static_cast<int>(list.texts.size()));
  if (!bos) throw_broken(metadata, kBos, "is missing, although texts are to begin with it");
  if (list.types[static_cast<std::size_t>(*bos)] == TokenType::unused) {
    throw_broken(metadata, kBos, "is token " + std::to_string(*bos) + ", which is unused");
  }
  return {*bos};
}

}  // namespace

bool has_tokenizer(const GgufMetadata& metadata) { return metadata.has(kModel); }

TokenizerSpec read_tokenizer(const GgufMetadata& metadata, int vocabulary) {
  const PreTokenizer& pre = read_pre_tokenizer(metadata);
  const TokenList list(metadata, vocabulary);
  TokenizerSpec spec;
  spec.file = metadata.file();
  read_tokens(metadata, list, spec.vocabulary);
  if (const std::string missing = index_bytes(spec.vocabulary); !missing.empty()) {
    throw_broken(metadata, kTokens, "has no token for byte " + missing);
  }
  read_merges(metadata, spec.vocabulary);
  spec.vocabulary.ignore_merges = pre.ignore_merges;
  spec.pipeline.nfc = pre.nfc;
  spec.pipeline.patterns.assign(pre.patterns.begin(), pre.patterns.end());
  spec.pipeline.prefix = read_prefix(metadata, pre, list);
  spec.pipeline.has_post_processor = true;
  return spec;
}

std::optional<TokenId> bos_token(const GgufMetadata& metadata, int vocabulary) {
  return token_id(metadata, kBos, vocabulary);
}

std::vector<TokenId> end_tokens(const GgufMetadata& metadata, int vocabulary) {
  std::vector<TokenId> ids;
  const auto add = [&](TokenId id) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  };
  for (const char* key : {kEos, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (const std::optional<TokenId> id = token_id(metadata, key, vocabulary)) add(*id);
  }
  if (!metadata.has(kTokens)) return ids;
  const TokenList list(metadata, vocabulary);
  for (std::size_t id = 0; id < list.texts.size(); ++id) {
    const bool ends = std::find(kEnds.begin(), kEnds.end(), list.texts[id]) != kEnds.end();
    if (ends && list.types[id] == TokenType::control) add(static_cast<TokenId>(id));
  }
  return ids;
}

ChatSource read_chat(const GgufMetadata& metadata, int vocabulary) {
  if (!metadata.has(kTemplate)) throw_no_chat_template(metadata.file());
  ChatSource source;
  source.file = metadata.file();
  source.text = metadata.string(kTemplate);
  check_chat_template(source);
  const TokenList list(metadata, vocabulary);
  constexpr std::array<std::pair<const char*, const char*>, 4> kNames = {
      {{"bos_token", kBos},
       {"eos_token", kEos},
       {"unk_token", "tokenizer.ggml.unknown_token_id"},
       {"pad_token", "tokenizer.ggml.padding_token_id"}}};
  for (const auto& [name, key] : kNames) {
    const auto id = token_id(metadata, key, static_cast<int>(list.texts.size()));
    if (id) source.tokens.emplace_back(name, list.texts[static_cast<std::size_t>(*id)]);
  }
  return source;
}

}  // namespace sluice::gguf
