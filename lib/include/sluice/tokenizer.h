// Text to token ids and back, from a Hugging Face tokenizer.json (byte-level BPE).
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/types.h"

namespace sluice {

// Where an added token stands in a text, in bytes.
struct AddedTokenPlace {
  std::size_t begin = 0;
  std::size_t end = 0;  // with the white space that the token takes along
  TokenId id = 0;
};

// Immutable after load and safe to share between threads. Gives the ids that the tokenizers library
// of Hugging Face gives, which numbers added tokens by their order and not by the ids in the file;
// only characters newer than Unicode 9 may be normalised differently, and newer than Unicode 14
// split differently.
class Tokenizer {
 public:
  // A tokenizer.json alone. Throws Error{not_found}, Error{tokenizer} (a broken file; a byte
  // without an id; an id that two tokens share, or one of the vocabulary that is not below
  // `vocabulary`) or Error{unsupported} (a component other than those of byte-level BPE), naming
  // the file and what is wrong. "truncation" and "padding" in the file are for training and not
  // looked at.
  static Tokenizer load(const std::filesystem::path& tokenizer_json, int vocabulary);

  // The tokenizer.json of a checkpoint's folder with the tokens and flags that
  // tokenizer_config.json, special_tokens_map.json and added_tokens.json add to it, as transformers
  // 5.24 and 4.57 read them (tests/data/README.md says what holds where they differ). `bos` is the
  // token that texts begin with where neither a post-processor nor a tokenizer_config.json is there
  // to say it. Throws as load() does, Error{corrupt} if one of the other files is broken or
  // contradicts tokenizer.json, and Error{unsupported} for what the versions read differently.
  static Tokenizer load_checkpoint(const std::filesystem::path& checkpoint, int vocabulary,
                                   std::optional<TokenId> bos = {});

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Token ids of UTF-8 text, without the tokens that a post-processor would add. Added tokens
  // ("<|end_of_text|>") in the text become their ids. Throws Error{prompt} on invalid UTF-8,
  // naming the byte offset, or on more than 512 MiB, and Error{tokenizer} if the file's regular
  // expression takes implausibly many steps. Takes time n log n in the length.
  std::vector<TokenId> encode(std::string_view text) const;

  // The same for text that must not contain control tokens, such as user input: special tokens in
  // it, and those of `controls`, are encoded as plain text.
  std::vector<TokenId> encode_plain(std::string_view text,
                                    std::span<const TokenId> controls = {}) const;
  // The added tokens ("<|end_of_text|>") in a text, from the left.
  std::vector<AddedTokenPlace> find_added(std::string_view text) const;

  // The ids before a single sequence (often a BOS token), from the file's post-processor or from
  // load_checkpoint().
  std::span<const TokenId> prefix() const;
  // Returns true if the file has a post-processor; after load(), prefix() is meaningless without.
  bool has_post_processor() const;

  // Text of the ids; incomplete or invalid UTF-8 becomes U+FFFD. Special tokens are dropped
  // unless `keep_special`, and ids below `vocabulary` that no token has. Throws Error{tokenizer} on
  // any other id.
  std::string decode(std::span<const TokenId> ids, bool keep_special = false) const;

  // The raw bytes of one token; empty for special tokens. Throws as decode does.
  std::string_view bytes(TokenId id) const;

  // The highest id plus one. Ids below it may have no token, as may ids of the model above it.
  int size() const;
  // The number of tokens that the model has; added tokens may have higher ids.
  int vocabulary() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  const Impl& impl() const;
  std::unique_ptr<const Impl> impl_;
};

// Decodes a growing sequence and returns only whole characters; together they equal
// Tokenizer::decode of all ids.
class StreamDecoder {
 public:
  // `tokenizer` must outlive it.
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}

  // The text that `id` completes; may be empty. Throws as Tokenizer::decode does.
  std::string push(TokenId id);
  // The rest at the end of the stream, with U+FFFD for an unfinished character.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  std::string pending_;  // the bytes of an unfinished character
};

}  // namespace sluice
