#include "engine/added_vocabulary.h"

#include <algorithm>

#include "engine/tokenizer_spec.h"

namespace sluice {

AddedVocabulary::AddedVocabulary(const std::unordered_map<std::string, TokenId>& vocabulary)
    : vocabulary_(&vocabulary) {}

// The library takes the number of tokens in the vocabulary, not the highest id.
TokenId AddedVocabulary::next_id() const {
  return std::max(static_cast<TokenId>(vocabulary_->size()), highest_ + 1);
}

// `next`: the id that 0.23 gives to the next new token; 0.23 looks up the highest id once per call,
// 0.22 for every token.
TokenId AddedVocabulary::id_of(const AddedToken& token, TokenId& next) {
  const auto known = vocabulary_->find(token.content);
  if (known != vocabulary_->end()) return known->second;
  if (next != next_id()) {
    throw_broken("added_tokens", "token " + as_json(token.content) +
                                     " gets another id from other versions of the tokenizers "
                                     "library, for the ids in model.vocab have gaps");
  }
  return next++;
}

void AddedVocabulary::add(const std::vector<AddedToken>& tokens) {
  TokenId next = next_id();
  for (const AddedToken& token : tokens) {
    if (token.content.empty()) continue;
    const auto [place, is_new] = places_.try_emplace(token.content, tokens_.size());
    const TokenId id = is_new ? id_of(token, next) : tokens_[place->second].id;
    if (is_new) tokens_.emplace_back();
    AddedToken& entry = tokens_[place->second];
    entry = token;
    entry.id = id;
    if (token.special) special_.insert(token.content);
    entry.special = special_.contains(token.content);
    highest_ = std::max(highest_, id);
  }
}

std::vector<AddedToken> AddedVocabulary::tokens() const {
  std::unordered_map<TokenId, const std::string*> by_id;
  for (const AddedToken& token : tokens_) by_id.emplace(token.id, &token.content);
  for (const auto& [content, id] : *vocabulary_) {
    const auto added = by_id.find(id);
    if (added == by_id.end() || *added->second == content) continue;
    throw_broken("added_tokens", "token " + as_json(*added->second) + " gets the id " +
                                     std::to_string(id) + ", which token " + as_json(content) +
                                     " has, for the ids in model.vocab have gaps");
  }
  return tokens_;
}

}  // namespace sluice
