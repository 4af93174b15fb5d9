#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "engine/byte_level.h"
#include "engine/tokenizer_spec.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr const char* kNoId = " has no id (an integer from 0 to 2147483647)";

bool is_off(const Json& value) {
  if (value.is_string()) return value.get_ref<const std::string&>().empty();
  return value.is_null() || value == false || value == 0;
}

// The token of each id, so that no two tokens share one.
class Owners {
 public:
  void claim(TokenId id, const std::string& content, const std::string& where) {
    const std::string* const owner = owners_.try_emplace(id, &content).first->second;
    if (*owner != content) {
      throw_broken(where, "tokens " + as_json(*owner) + " and " + as_json(content) +
                              " have the same id " + std::to_string(id));
    }
  }

 private:
  std::unordered_map<TokenId, const std::string*> owners_;
};

void read_tokens(const Json& vocab, int vocabulary, Owners& owners, VocabularySpec& spec) {
  if (!vocab.is_object()) throw_broken("model.vocab", "is missing");
  spec.ids.reserve(vocab.size());
  for (const auto& [content, value] : vocab.items()) {
    const std::optional<TokenId> id = id_of(value);
    if (!id) throw_broken("model.vocab", "token " + as_json(content) + kNoId);
    if (*id >= vocabulary) {
      throw_broken("model.vocab", "token " + as_json(content) + " has the id " +
                                      std::to_string(*id) + ", but the model has only " +
                                      std::to_string(vocabulary) + " tokens");
    }
    const auto entry = spec.ids.emplace(content, *id).first;
    owners.claim(*id, entry->first, "model.vocab");
  }
}

AddedToken read_added_token(const Json& entry) {
  const std::string where = "added_tokens";
  AddedToken token;
  token.content = string_of(entry, "content", where);
  if (token.content.empty()) throw_broken(where, "there is a token without content");
  const std::string named = where + ": token " + as_json(token.content);
  if (token.content.size() > kMaxAddedToken) {
    throw_broken(named, "has " + std::to_string(token.content.size()) + " bytes, more than " +
                            std::to_string(kMaxAddedToken));
  }
  const std::optional<TokenId> id = id_of(member(entry, "id"));
  if (!id) throw_broken(where, "token " + as_json(token.content) + kNoId);
  token.id = *id;
  token.special = flag_of(entry, "special", false, named);
  token.lstrip = flag_of(entry, "lstrip", false, named);
  token.rstrip = flag_of(entry, "rstrip", false, named);
  token.normalized = flag_of(entry, "normalized", !token.special, named);
  if (flag_of(entry, "single_word", false, named)) throw_unsupported(named, "'single_word'");
  return token;
}

void read_added_tokens(const Json& list, Owners& owners, VocabularySpec& spec) {
  if (list.is_null()) return;
  if (!list.is_array()) throw_broken("added_tokens", "is not a list");
  spec.added.reserve(list.size());  // `owners` points to the contents
  std::unordered_map<std::string_view, TokenId> seen;
  for (const Json& entry : list) {
    const AddedToken& token = spec.added.emplace_back(read_added_token(entry));
    owners.claim(token.id, token.content, "added_tokens");
    const auto known = spec.ids.find(token.content);
    const bool moved = known != spec.ids.end() && known->second != token.id;
    if (moved || !seen.emplace(token.content, token.id).second) {
      throw_broken("added_tokens", "token " + as_json(token.content) + " has two entries");
    }
  }
}

// A merge is "left right" or ["left", "right"].
std::optional<std::pair<std::string_view, std::string_view>> parts_of(const Json& merge) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {{merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()}};
  }
  if (!merge.is_string()) return std::nullopt;
  const std::string_view text = merge.get_ref<const std::string&>();
  const std::size_t space = text.find(' ');
  if (space == std::string_view::npos || space != text.rfind(' ')) return std::nullopt;
  return {{text.substr(0, space), text.substr(space + 1)}};
}

void read_merges(const Json& list, VocabularySpec& spec) {
  if (!list.is_array()) throw_broken("model.merges", "is missing");
  spec.merges.reserve(list.size());
  const auto broken = [&](const std::string& what) {
    throw_broken("model.merges[" + std::to_string(spec.merges.size()) + "]", what);
  };
  const auto id = [&](const std::string& content) {
    const auto found = spec.ids.find(content);
    if (found == spec.ids.end()) broken("token " + as_json(content) + " is not in model.vocab");
    return found->second;
  };
  for (const Json& merge : list) {
    const auto parts = parts_of(merge);
    if (!parts) broken("is not a pair of tokens");
    const std::string left(parts->first);
    const std::string right(parts->second);
    spec.merges.push_back({id(left), id(right), id(left + right)});
  }
}

}  // namespace

void require_plain_bpe(const Json& file) {
  const Json& model = member(file, "model");
  if (!model.is_object()) throw_broken("model", "is missing");
  const Json& type = member(model, "type");
  // The oldest files have no type; theirs is BPE if it has merges.
  if (type.is_null() ? !member(model, "merges").is_array() : type != "BPE") {
    throw_unsupported("model", "type " + type.dump());
  }
  for (const char* option :
       {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
    if (!is_off(member(model, option))) {
      throw_unsupported(std::string("model.") + option, "a value other than null");
    }
  }
}

std::string index_bytes(VocabularySpec& spec) {
  std::string missing;
  for (int byte = 0; byte < 256; ++byte) {
    const std::string symbol = byte_symbol(static_cast<std::uint8_t>(byte));
    const auto found = spec.ids.find(symbol);
    spec.bytes.at(static_cast<std::size_t>(byte)) =
        found == spec.ids.end() ? Bpe::kNone : found->second;
    if (found != spec.ids.end() || !occurs_in_utf8(static_cast<std::uint8_t>(byte))) continue;
    if (!missing.empty()) continue;
    std::array<char, 8> name{};
    std::snprintf(name.data(), name.size(), "0x%02X", static_cast<unsigned>(byte));
    missing = std::string(name.data()) + " (written " + symbol + ")";
  }
  return missing;
}

VocabularySpec parse_vocabulary(const Json& file, int vocabulary) {
  const Json& model = member(file, "model");
  VocabularySpec spec;
  spec.ignore_merges = flag_of(model, "ignore_merges", false, "model");
  Owners owners;
  read_tokens(member(model, "vocab"), vocabulary, owners, spec);
  read_added_tokens(member(file, "added_tokens"), owners, spec);
  if (const std::string missing = index_bytes(spec); !missing.empty()) {
    throw_broken("model.vocab", "no token has the id for byte " + missing);
  }
  read_merges(member(model, "merges"), spec);
  return spec;
}

}  // namespace sluice
