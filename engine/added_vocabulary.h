// The ids of added tokens.
#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/added_tokens.h"
#include "sluice/types.h"

namespace sluice {

// Numbers added tokens as Hugging Face's tokenizers library does (tokenizers/src/tokenizer/
// added_vocabulary.rs, 0.22 and 0.23), whatever ids the files name: a token of the vocabulary keeps
// its id there, one that was added before keeps its id and takes the new flags, and the others
// follow the highest id in the order in which they are added.
class AddedVocabulary {
 public:
  // `vocabulary`: ids by content. It must outlive this object.
  explicit AddedVocabulary(const std::unordered_map<std::string, TokenId>& vocabulary);

  // Adds tokens as one call of the library does; their ids are ignored. Throws Error{tokenizer} if
  // a vocabulary with gaps makes the versions of the library disagree.
  void add(const std::vector<AddedToken>& tokens);

  // In the order in which they were added. Throws Error{tokenizer} if a token has the id of
  // another token of the vocabulary.
  std::vector<AddedToken> tokens() const;

 private:
  TokenId id_of(const AddedToken& token, TokenId& next);
  TokenId next_id() const;

  const std::unordered_map<std::string, TokenId>* vocabulary_;
  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string, std::size_t> places_;  // in tokens_, by content
  std::unordered_set<std::string> special_;              // stays special, whatever is added later
  TokenId highest_ = -1;                                 // id of an added token
};

}  // namespace sluice
