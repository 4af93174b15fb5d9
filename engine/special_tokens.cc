#include "engine/special_tokens.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "engine/json_object.h"
#include "engine/tokenizer_spec.h"
#include "io/file.h"
#include "io/json.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxFile = std::uint64_t{16} << 20;
constexpr std::array kNames = {"bos_token", "eos_token", "unk_token", "sep_token",
                               "pad_token", "cls_token", "mask_token"};

// A file of the checkpoint; an empty object if it is not there.
struct ConfigFile {
  explicit ConfigFile(std::filesystem::path where)
      : path(std::move(where)),
        exists(file_exists(path)),
        json(exists ? read_json_file(path, kMaxFile) : Json::object()) {
    static_cast<void>(object());  // throws unless it is an object
  }

  JsonObject object() const { return {json, path}; }

  std::filesystem::path path;
  bool exists;
  Json json;
};

// A token as a file names it: a text, or an object with flags.
struct Mention {
  std::string content;
  bool is_text = true;
  bool special = true;
  bool lstrip = false;
  bool rstrip = false;
  std::optional<bool> normalized;

  // A string that differs between different mentions.
  std::string key() const {
    const bool normal = normalized.value_or(!special);
    std::string key = content;
    for (const bool flag : {is_text, special, lstrip, rstrip, normal}) key += flag ? '1' : '0';
    return key;
  }

  AddedToken token() const {
    return {content, 0, special, lstrip, rstrip, normalized.value_or(!special)};
  }
};

Mention mention_of(const AddedToken& token) {
  return {token.content, false, token.special, token.lstrip, token.rstrip, token.normalized};
}

// The value of `key`, or a part of it.
Mention read_mention(const Json& value, const std::string& key, const ConfigFile& file) {
  Mention mention;
  if (value.is_string()) {
    mention.content = value.get<std::string>();
  } else if (value.is_object() && member(value, "content").is_string()) {
    mention.content = value["content"].get<std::string>();
    const std::string name = key + ": token " + as_json(mention.content);
    const JsonObject flags(value, file.path, name + ": ");
    mention.is_text = false;
    mention.special = flags.boolean("special", false);
    mention.lstrip = flags.boolean("lstrip", false);
    mention.rstrip = flags.boolean("rstrip", false);
    if (flags.has("normalized")) mention.normalized = flags.boolean("normalized", false);
    if (flags.boolean("single_word", false)) {
      file.object().unsupported(name, "has 'single_word'");
    }
  } else {
    file.object().corrupt(key, "holds something that is no token");
  }
  if (mention.content.size() > kMaxAddedToken) {
    file.object().corrupt(key,
                          "has a token of more than " + std::to_string(kMaxAddedToken) + " bytes");
  }
  return mention;
}

std::vector<Mention> read_list(const char* key, const ConfigFile& file) {
  std::vector<Mention> mentions;
  const Json& list = member(file.json, key);
  if (list.is_null()) return mentions;
  if (!list.is_array()) file.object().corrupt(key, "is no list of tokens");
  for (const Json& value : list) mentions.push_back(read_mention(value, key, file));
  return mentions;
}

bool is_standard(const std::string& name) {
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

// The keys of an object in the order of the file, which Json does not keep.
std::vector<std::string> keys_in_order(const ConfigFile& file, const char* member_name) {
  using Ordered = nlohmann::ordered_json;
  Ordered json = Ordered::parse(read_text_file(file.path, kMaxFile), nullptr, false);
  if (member_name != nullptr && json.is_object()) json = json.value(member_name, Ordered());
  std::vector<std::string> keys;
  if (!json.is_object()) return keys;
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  return keys;
}

// Tokens by name: the standard ones first, those of a model's own in the order of the files.
class NamedTokens {
 public:
  NamedTokens() {
    for (const char* name : kNames) set(name, std::nullopt);
  }

  void set(const std::string& name, std::optional<Mention> mention) {
    const auto [place, is_new] = places_.try_emplace(name, entries_.size());
    if (is_new) entries_.push_back({name, std::nullopt});
    entries_[place->second].mention = std::move(mention);
  }

  struct Entry {
    std::string name;
    std::optional<Mention> mention;
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> places_;
};

// Names that transformers' tokenizer classes set by default.
void set_defaults(const std::string& class_name, NamedTokens& named) {
  struct Default {
    const char* class_name;
    std::vector<const char*> names;
  };
  static const std::array kDefaults = {
      Default{"GPT2Tokenizer", {"unk_token", "bos_token", "eos_token"}},
      Default{"Qwen2Tokenizer", {"unk_token", "eos_token", "pad_token"}}};
  Mention text;
  text.content = "<|endoftext|>";
  for (const Default& entry : kDefaults) {
    if (class_name != entry.class_name) continue;
    for (const char* name : entry.names) named.set(name, text);
  }
}

void set_standard(const ConfigFile& file, NamedTokens& named) {
  for (const char* name : kNames) {
    if (!file.json.contains(name)) continue;
    const Json& value = file.json[name];
    named.set(name, value.is_null() ? std::optional<Mention>()
                                    : std::optional(read_mention(value, name, file)));
  }
}

// Names of a model's own, such as "image_token", which transformers 5 reads as names.
void set_own(const ConfigFile& file, NamedTokens& named) {
  const auto is_own = [&](const std::string& key) {
    return key.ends_with("_token") && !is_standard(key) &&
           member(file.json, key.c_str()).is_string();
  };
  const auto items = file.json.items();
  if (std::none_of(items.begin(), items.end(),
                   [&](const auto& item) { return is_own(item.key()); }))
    return;
  for (const std::string& key : keys_in_order(file, nullptr)) {
    if (is_own(key)) named.set(key, read_mention(file.json[key], key, file));
  }
}

constexpr const char* kExtra = "extra_special_tokens";
constexpr const char* kAdditional = "additional_special_tokens";

void set_extra(const ConfigFile& file, NamedTokens& named) {
  if (!member(file.json, kExtra).is_object()) return;
  for (const std::string& key : keys_in_order(file, kExtra)) {
    named.set(key, read_mention(member(file.json[kExtra], key.c_str()), kExtra, file));
  }
}

std::optional<bool> add_bos_token_in(const ConfigFile& file) {
  constexpr const char* kKey = "add_bos_token";
  if (!file.object().has(kKey)) return std::nullopt;
  return file.object().boolean(kKey, false);
}

// Reads the files and collects their tokens.
class Reader {
 public:
  Reader(const std::filesystem::path& checkpoint, std::span<const AddedToken> known)
      : config_(checkpoint / "tokenizer_config.json"),
        map_(checkpoint / "special_tokens_map.json"),
        added_(checkpoint / "added_tokens.json"),
        known_(known),
        // The older files count where tokenizer_config.json does not list all tokens.
        lists_all_(config_.json.contains("added_tokens_decoder")) {
    if (config_.object().boolean("split_special_tokens", false)) {
      config_.object().unsupported("split_special_tokens", "is true");
    }
    read_class(ConfigFile(checkpoint / "config.json"));
    set_defaults(class_name_, named_);
    read_named();
    read_extra();
  }

  SpecialTokens read() {
    for (const AddedToken& token : known_) there_.insert(token.content);
    read_decoder();
    std::unordered_set<std::string> own;  // new tokens of names that are not standard
    for (const NamedTokens::Entry& entry : named_.entries()) {
      if (!entry.mention || !add_unless_known(*entry.mention)) continue;
      if (!is_standard(entry.name)) own.insert(entry.mention->content);
    }
    for (const Mention& mention : extra_) {
      if (!add_unless_known(mention) || own.empty() || own.contains(mention.content)) continue;
      throw_orders_differ(*own.begin(), mention.content);
    }
    require_no_loss();
    return finish();
  }

  std::vector<std::pair<std::string, std::string>> names() const {
    std::vector<std::pair<std::string, std::string>> names;
    for (const NamedTokens::Entry& entry : named_.entries()) {
      if (!entry.mention || entry.mention->content.empty()) continue;
      names.emplace_back(entry.name, entry.mention->content);
    }
    return names;
  }

 private:
  // transformers 5 reads a Qwen2 tokenizer with its own class and a Mistral tokenizer with none,
  // whatever tokenizer_config.json says.
  void read_class(const ConfigFile& model) {
    const std::string type = model.object().string("model_type", std::string());
    class_name_ = config_.object().string("tokenizer_class", std::string());
    if (class_name_.empty()) {
      class_name_ = model.object().string("tokenizer_class", std::string());
    }
    if (class_name_.ends_with("Fast")) class_name_.resize(class_name_.size() - 4);
    const bool is_unknown = class_name_.empty();
    heeds_add_bos_token_ =
        class_name_ == "LlamaTokenizer" || (is_unknown && (type == "llama" || type == "mistral"));
    if (type == "qwen2" || (type == "qwen3" && is_unknown)) class_name_ = "Qwen2Tokenizer";
    if (type == "mistral") class_name_.clear();
  }

  void read_named() {
    set_standard(config_, named_);
    if (!lists_all_) set_standard(map_, named_);
    if (!lists_all_) set_own(map_, named_);
    set_own(config_, named_);
    set_extra(config_, named_);
    if (!lists_all_) set_extra(map_, named_);
  }

  // Lists of tokens without names. transformers 5 reads "additional_special_tokens" where there is
  // no other list, and 4 wherever it stands; 4 cannot read "extra_special_tokens" that is a list.
  void read_extra() {
    const Json& extra = member(config_.json, kExtra);
    if (!extra.is_array() && !extra.is_object() && !extra.is_null()) {
      config_.object().corrupt(kExtra, "is neither a list nor an object of tokens");
    }
    std::vector<Mention> additional = read_list(kAdditional, config_);
    std::vector<Mention> of_map;
    if (!lists_all_) append_of_map(kAdditional, of_map);
    bool has_list = !extra.is_object() && config_.json.contains(kExtra);
    if (extra.is_array()) {
      extra_ = read_list(kExtra, config_);
    } else {
      passed_over_ = additional;
      passed_over_.insert(passed_over_.end(), of_map.begin(), of_map.end());
    }
    if (extra.empty() && config_.json.contains(kAdditional)) {
      extra_ = additional;
      has_list = true;
    }
    if (!lists_all_ && member(map_.json, kExtra).is_array()) {
      append_of_map(kExtra, extra_);
      has_list = true;
    }
    if (has_list) return;
    const bool in_map = !lists_all_ && map_.json.contains(kAdditional);
    extra_ = in_map ? of_map : additional;
  }

  void append_of_map(const char* key, std::vector<Mention>& to) const {
    for (Mention& mention : read_list(key, map_)) {
      mention.special = true;
      to.push_back(std::move(mention));
    }
  }

  // The tokens that are listed with ids are added again in their order, with the flags of the list.
  void read_decoder() {
    for (auto& [id, mention] : lists_all_ ? listed_in_config() : listed_in_added()) {
      there_.insert(mention.content);
      to_add_.push_back(std::move(mention));
    }
  }

  std::map<TokenId, Mention> listed_in_config() const {
    constexpr const char* kKey = "added_tokens_decoder";
    const Json& list = config_.json[kKey];
    if (!list.is_object()) config_.object().corrupt(kKey, "is no object");
    std::map<TokenId, Mention> listed;
    for (const auto& [key, value] : list.items()) {
      TokenId id = -1;
      const char* const end = key.data() + key.size();
      const auto [rest, error] = std::from_chars(key.data(), end, id);
      if (error != std::errc() || rest != end || id < 0) {
        config_.object().corrupt(kKey, "has an entry " + as_json(key) + ", which is no token id");
      }
      if (!value.is_object()) config_.object().corrupt(kKey, "has an entry that is no object");
      listed.insert_or_assign(id, read_mention(value, kKey, config_));
    }
    return listed;
  }

  std::map<TokenId, Mention> listed_in_added() const {
    const std::unordered_set<std::string> special = special_in_files();
    std::map<TokenId, Mention> listed;
    for (const AddedToken& token : known_) listed.emplace(token.id, mention_of(token));
    for (const auto& [content, value] : added_.json.items()) {
      const std::optional<TokenId> id = id_of(value);
      if (!id) added_.object().corrupt("token " + as_json(content), "has no id");
      const auto other = listed.find(*id);
      if (other != listed.end() && other->second.content == content) continue;
      if (other != listed.end()) {
        added_.object().corrupt("token " + as_json(content),
                                "has the id " + std::to_string(*id) + " of another token");
      }
      Mention mention = read_mention(content, "token", added_);
      mention.is_text = false;
      mention.special = special.contains(content);
      listed.emplace(*id, std::move(mention));
    }
    return listed;
  }

  // Contents that make a token of added_tokens.json special: neither class defaults nor objects of
  // tokenizer_config.json.
  std::unordered_set<std::string> special_in_files() const {
    std::unordered_set<std::string> special;
    for (const char* name : kNames) {
      const bool in_map = map_.json.contains(name);
      const Json& value = member(in_map ? map_.json : config_.json, name);
      if (value.is_null() || (value.is_object() && !in_map)) continue;
      special.insert(read_mention(value, name, in_map ? map_ : config_).content);
    }
    for (const Mention& mention : extra_) special.insert(mention.content);
    return special;
  }

  // Returns true if the token is new.
  bool add_unless_known(const Mention& mention) {
    if (mention.content.empty() || there_.contains(mention.content)) return false;
    if (!mentioned_.insert(mention.key()).second) return false;
    to_add_.push_back(mention);
    return true;
  }

  [[noreturn]] void throw_orders_differ(const std::string& own, const std::string& extra) const {
    throw Error(ErrorCode::unsupported,
                config_.path.string() + ": tokens " + as_json(own) + " and " + as_json(extra) +
                    " get their ids in another order from transformers 4 than from 5; list them in "
                    "added_tokens_decoder");
  }

  // Throws if transformers 4 adds a token that 5 does not.
  void require_no_loss() const {
    std::unordered_set<std::string> added;
    for (const Mention& mention : to_add_) added.insert(mention.content);
    for (const Mention& mention : passed_over_) {
      if (there_.contains(mention.content) || added.contains(mention.content)) continue;
      throw Error(ErrorCode::unsupported,
                  config_.path.string() + ": the token " + as_json(mention.content) + " of " +
                      kAdditional +
                      " is one for transformers 4 and none for 5, which reads another list in its "
                      "place; list it in added_tokens_decoder");
    }
  }

  SpecialTokens finish() const {
    SpecialTokens result;
    result.has_config = config_.exists;
    result.add_bos_token = add_bos_token_in(config_);
    result.heeds_add_bos_token = heeds_add_bos_token_;
    result.named = names();
    std::unordered_set<std::string> named;
    for (const auto& [name, content] : result.named) named.insert(content);
    for (Mention mention : to_add_) {
      if (named.contains(mention.content)) mention.special = true;
      result.added.push_back(mention.token());
    }
    return result;
  }

  ConfigFile config_;
  ConfigFile map_;
  ConfigFile added_;
  std::span<const AddedToken> known_;
  bool lists_all_;
  std::string class_name_;  // without "Fast"
  bool heeds_add_bos_token_ = false;
  NamedTokens named_;
  std::vector<Mention> extra_;
  std::vector<Mention> passed_over_;
  std::unordered_set<std::string> there_;  // contents of tokens that have ids
  std::vector<Mention> to_add_;
  std::unordered_set<std::string> mentioned_;  // keys of the mentions in to_add_
};

}  // namespace

std::optional<std::string> SpecialTokens::text_of(const std::string& name) const {
  const auto same = [&](const auto& entry) { return entry.first == name; };
  const auto entry = std::find_if(named.begin(), named.end(), same);
  return entry == named.end() ? std::nullopt : std::optional(entry->second);
}

SpecialTokens read_special_tokens(const std::filesystem::path& checkpoint,
                                  std::span<const AddedToken> known) {
  return Reader(checkpoint, known).read();
}

std::vector<std::pair<std::string, std::string>> read_token_names(
    const std::filesystem::path& checkpoint) {
  return Reader(checkpoint, {}).names();
}

std::optional<bool> read_add_bos_token(const std::filesystem::path& checkpoint) {
  return add_bos_token_in(ConfigFile(checkpoint / "tokenizer_config.json"));
}

}  // namespace sluice
