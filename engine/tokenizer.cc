#include "sluice/tokenizer.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <unordered_map>
#include <utility>

#include "engine/added_tokens.h"
#include "engine/bpe.h"
#include "engine/byte_level.h"
#include "engine/checkpoint_source.h"
#include "engine/nfc.h"
#include "engine/split.h"
#include "engine/tokenizer_spec.h"
#include "engine/utf8.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

struct Token {
  std::string bytes;
  bool known = false;  // false if no token has this id
  bool special = false;
};

// Symbols as bytes, or as they are if they are not of the byte-level alphabet (an added token).
Token make_token(const std::string& content, bool special) {
  return {symbols_to_bytes(content).value_or(content), true, special};
}

std::vector<Token> make_tokens(const VocabularySpec& spec) {
  TokenId highest = -1;
  for (const auto& [content, id] : spec.ids) highest = std::max(highest, id);
  for (const AddedToken& added : spec.added) highest = std::max(highest, added.id);
  std::vector<Token> tokens(static_cast<std::size_t>(highest) + 1);
  for (const auto& [content, id] : spec.ids) {
    tokens[static_cast<std::size_t>(id)] = make_token(content, false);
  }
  for (const AddedToken& added : spec.added) {
    tokens[static_cast<std::size_t>(added.id)] = make_token(added.content, added.special);
  }
  return tokens;
}

// The added tokens that are matched in normalised text, or in the text as it is.
std::vector<AddedToken> searched_in(bool normalized_text, const std::vector<AddedToken>& added) {
  std::vector<AddedToken> tokens;
  std::copy_if(added.begin(), added.end(), std::back_inserter(tokens),
               [&](const AddedToken& token) { return token.normalized == normalized_text; });
  return tokens;
}

}  // namespace

struct Tokenizer::Impl {
  Impl(const VocabularySpec& vocabulary, PipelineSpec spec, int ids_of_model)
      : pipeline(std::move(spec)),
        model_ids(ids_of_model),
        tokens(make_tokens(vocabulary)),
        verbatim(searched_in(false, vocabulary.added)),
        normalized(searched_in(true, vocabulary.added)),
        splitter(pipeline.patterns),
        bpe(vocabulary.bytes, vocabulary.merges) {
    if (vocabulary.ignore_merges) index_pieces(vocabulary);
    for (const TokenId id : pipeline.prefix) {
      if (pipeline.has_post_processor && !knows(id)) {
        throw_broken("post_processor", "no token has the id " + std::to_string(id));
      }
      if (id >= model_ids) {
        throw_broken("first token", "texts begin with token " + std::to_string(id) +
                                        ", but the model has only " + std::to_string(model_ids) +
                                        " tokens");
      }
    }
  }

  static std::unique_ptr<const Impl> make(TokenizerSpec spec, int vocabulary);

  void index_pieces(const VocabularySpec& vocabulary) {
    pieces.reserve(vocabulary.ids.size());
    for (const auto& [content, id] : vocabulary.ids) {
      const Token& token = tokens[static_cast<std::size_t>(id)];
      if (!token.special && symbols_to_bytes(content)) pieces.emplace(token.bytes, id);
    }
  }

  bool knows(TokenId id) const {
    return id >= 0 && static_cast<std::size_t>(id) < tokens.size() &&
           tokens[static_cast<std::size_t>(id)].known;
  }

  // Embeddings are often padded, so a model may sample an id without a token, which decodes to "".
  const Token& token(TokenId id) const {
    static const Token kNone;
    if (id < 0 || id >= model_ids) {
      throw Error(ErrorCode::tokenizer, "no token can have the id " + std::to_string(id) +
                                            " in a vocabulary of " + std::to_string(model_ids));
    }
    return knows(id) ? tokens[static_cast<std::size_t>(id)] : kNone;
  }

  void encode_piece(std::string_view piece, Bpe::Scratch& scratch,
                    std::vector<TokenId>& ids) const {
    const auto whole = pieces.find(piece);
    if (whole != pieces.end()) {
      ids.push_back(whole->second);
    } else {
      bpe.encode(piece, scratch, ids);
    }
  }

  std::vector<TokenId> encode(std::string_view text, const TokenFilter& wanted) const;

  // Text without verbatim added tokens.
  void encode_text(std::string_view text, const TokenFilter& wanted, Splitter::Run& run,
                   Bpe::Scratch& scratch, std::vector<TokenId>& ids) const {
    for (const Segment& segment : normalized.split(text, wanted)) {
      if (segment.id != Segment::kText) {
        ids.push_back(segment.id);
        continue;
      }
      run.split(segment.text, [&](std::string_view piece) { encode_piece(piece, scratch, ids); });
    }
  }

  PipelineSpec pipeline;
  int model_ids;  // number of ids of the model
  std::vector<Token> tokens;
  AddedTokenFinder verbatim;
  AddedTokenFinder normalized;
  Splitter splitter;
  Bpe bpe;
  std::unordered_map<std::string_view, TokenId> pieces;  // empty unless model.ignore_merges
};

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

const Tokenizer::Impl& Tokenizer::impl() const {
  if (impl_ == nullptr) throw Error(ErrorCode::usage, "a tokenizer that was moved from");
  return *impl_;
}

std::unique_ptr<const Tokenizer::Impl> Tokenizer::Impl::make(TokenizerSpec spec, int vocabulary) {
  for (AddedToken& token : spec.vocabulary.added) {
    if (spec.pipeline.nfc && token.normalized) token.content = to_nfc(token.content);
  }
  return in_file(spec.file, [&] {
    return std::make_unique<const Impl>(spec.vocabulary, std::move(spec.pipeline), vocabulary);
  });
}

Tokenizer Tokenizer::load(const std::filesystem::path& tokenizer_json, int vocabulary) {
  return Tokenizer(Impl::make(read_tokenizer_file(tokenizer_json, vocabulary), vocabulary));
}

Tokenizer Tokenizer::load_checkpoint(const std::filesystem::path& checkpoint, int vocabulary,
                                     std::optional<TokenId> bos) {
  return Tokenizer(
      Impl::make(CheckpointSource::open(checkpoint)->tokenizer(vocabulary, bos), vocabulary));
}

std::vector<TokenId> Tokenizer::Impl::encode(std::string_view text,
                                             const TokenFilter& wanted) const {
  require_utf8(text);
  if (text.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max() / 4)) {
    throw Error(ErrorCode::prompt, "the text has " + std::to_string(text.size()) +
                                       " bytes, more than 512 MiB; give it in parts");
  }
  std::vector<TokenId> ids;
  Bpe::Scratch scratch;
  Splitter::Run run(splitter, text.size());
  for (const Segment& segment : verbatim.split(text, wanted)) {
    if (segment.id != Segment::kText) {
      ids.push_back(segment.id);
    } else if (pipeline.nfc) {
      encode_text(to_nfc(segment.text), wanted, run, scratch, ids);
    } else {
      encode_text(segment.text, wanted, run, scratch, ids);
    }
  }
  return ids;
}

std::vector<TokenId> Tokenizer::encode(std::string_view text) const {
  return impl().encode(text, {});
}

std::vector<TokenId> Tokenizer::encode_plain(std::string_view text,
                                             std::span<const TokenId> controls) const {
  return impl().encode(text, [controls](const AddedToken& token) {
    return !token.special &&
           std::find(controls.begin(), controls.end(), token.id) == controls.end();
  });
}

std::vector<AddedTokenPlace> Tokenizer::find_added(std::string_view text) const {
  std::vector<AddedTokenPlace> places;
  const auto note = [&](const Segment& segment) {
    const auto begin = static_cast<std::size_t>(segment.text.data() - text.data());
    places.push_back({begin, begin + segment.text.size(), segment.id});
  };
  for (const Segment& segment : impl().verbatim.split(text)) {
    if (segment.id != Segment::kText) {
      note(segment);
      continue;
    }
    for (const Segment& inner : impl().normalized.split(segment.text)) {
      if (inner.id != Segment::kText) note(inner);
    }
  }
  return places;
}

std::span<const TokenId> Tokenizer::prefix() const { return impl().pipeline.prefix; }

bool Tokenizer::has_post_processor() const { return impl().pipeline.has_post_processor; }

std::string Tokenizer::decode(std::span<const TokenId> ids, bool keep_special) const {
  std::string bytes;
  for (const TokenId id : ids) {
    const Token& token = impl().token(id);
    if (keep_special || !token.special) bytes += token.bytes;
  }
  return to_valid_utf8(bytes);
}

std::string_view Tokenizer::bytes(TokenId id) const {
  const Token& token = impl().token(id);
  return token.special ? std::string_view() : std::string_view(token.bytes);
}

int Tokenizer::size() const { return static_cast<int>(impl().tokens.size()); }

int Tokenizer::vocabulary() const { return impl().model_ids; }

std::string StreamDecoder::push(TokenId id) {
  pending_ += tokenizer_->bytes(id);
  return take_valid_utf8(pending_);
}

std::string StreamDecoder::finish() { return to_valid_utf8(std::exchange(pending_, {})); }

}  // namespace sluice
