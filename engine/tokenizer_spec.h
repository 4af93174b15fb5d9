// A tokenizer, checked and reduced to the needs of byte-level BPE; and the contents of a
// tokenizer.json, from which it is read.
#pragma once

#include <array>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/added_tokens.h"
#include "engine/bpe.h"
#include "sluice/errors.h"
#include "sluice/types.h"

namespace sluice {

// Bytes of an added token, limited because it is compared with the text at every offset. Tokens in
// use have up to 40.
inline constexpr std::size_t kMaxAddedToken = 1024;

// "model" and "added_tokens".
struct VocabularySpec {
  std::unordered_map<std::string, TokenId> ids;  // by content, in the byte-level alphabet
  std::vector<AddedToken> added;  // with the ids of the file, which AddedVocabulary replaces
  std::vector<MergeRule> merges;
  std::array<TokenId, 256> bytes{};  // Bpe::kNone for a byte that UTF-8 never has
  bool ignore_merges = false;        // a piece that is a token is not merged from its bytes
};

// "normalizer", "pre_tokenizer" and "post_processor".
struct PipelineSpec {
  bool nfc = false;
  std::vector<std::string> patterns;  // see Splitter
  std::vector<TokenId> prefix;        // ids that the post-processor puts before a sequence
  bool has_post_processor = false;
};

struct TokenizerSpec {
  std::filesystem::path file;  // that it was read from, for messages
  PipelineSpec pipeline;
  VocabularySpec vocabulary;
};

// A tokenizer.json alone, and that of a folder with what the files beside it add: see
// Tokenizer::load() and load_checkpoint().
TokenizerSpec read_tokenizer_file(const std::filesystem::path& file, int vocabulary);
TokenizerSpec read_tokenizer_folder(const std::filesystem::path& folder, int vocabulary,
                                    std::optional<TokenId> bos);

// Returns the result of `read`; puts `file` before the message of its error.
template <typename Read>
auto in_file(const std::filesystem::path& file, const Read& read) {
  try {
    return read();
  } catch (const Error& error) {
    throw Error(error.code(), file.string() + ": " + error.what());
  }
}

// Fills `bytes` from `ids`. Returns the first byte of UTF-8 that has no token, for a message; empty
// if each has one.
std::string index_bytes(VocabularySpec& spec);

// Refuses a "model" other than BPE from bytes. Call it first, so that the error names the kind of
// model and not a detail of it. Throws as the two below.
void require_plain_bpe(const nlohmann::json& file);

// Both throw Error{tokenizer} for broken files and Error{unsupported} for features that Sluice
// lacks, naming the place in the file but not the file. `vocabulary`: number of tokens of the
// model.
VocabularySpec parse_vocabulary(const nlohmann::json& file, int vocabulary);
PipelineSpec parse_pipeline(const nlohmann::json& file);

// Access to members of an object that may be of any type, or not be there (null).
const nlohmann::json& member(const nlohmann::json& object, const char* key);
bool flag_of(const nlohmann::json& object, const char* key, bool otherwise,
             const std::string& where);
const std::string& string_of(const nlohmann::json& object, const char* key,
                             const std::string& where);
// A token id: an integer from 0 to below 2^31. Nothing for any other value.
std::optional<TokenId> id_of(const nlohmann::json& value);

// Text as it stands in the file, cut to a length that fits a message.
std::string as_json(std::string_view text);

[[noreturn]] void throw_broken(const std::string& where, const std::string& what);
[[noreturn]] void throw_unsupported(const std::string& where, const std::string& what);

}  // namespace sluice
