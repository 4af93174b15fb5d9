#include <nlohmann/json.hpp>

#include "engine/tokenizer_spec.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

// The expression that ByteLevel splits by if `use_regex` holds (GPT-2).
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

[[noreturn]] void refuse_type(const std::string& where, const std::string& type) {
  throw_unsupported(where, "type " + as_json(type));
}

// Limit, because each component is another pass over the text. Tokenizers in use have up to six.
constexpr std::size_t kMaxComponents = 32;

// The components of a possibly nested Sequence in order; none for null.
void flatten(const Json& component, const char* list, const std::string& where,
             std::vector<const Json*>& components) {
  if (component.is_null()) return;
  if (string_of(component, "type", where) != "Sequence") {
    if (components.size() == kMaxComponents) {
      throw_unsupported(where, "a Sequence of more than " + std::to_string(kMaxComponents));
    }
    return components.push_back(&component);
  }
  const Json& parts = member(component, list);
  if (!parts.is_array()) throw_broken(where, std::string("the Sequence has no '") + list + "'");
  for (const Json& part : parts) {
    if (!part.is_object()) throw_broken(where, "the Sequence holds something that has no type");
    flatten(part, list, where, components);
  }
}

std::vector<const Json*> components_of(const Json& file, const char* key, const char* list) {
  std::vector<const Json*> components;
  flatten(member(file, key), list, key, components);
  return components;
}

bool reads_nfc(const Json& file) {
  const std::vector<const Json*> normalizers = components_of(file, "normalizer", "normalizers");
  for (const Json* normalizer : normalizers) {
    const std::string& type = string_of(*normalizer, "type", "normalizer");
    if (type != "NFC") refuse_type("normalizer", type);
  }
  return !normalizers.empty();
}

std::string split_pattern(const Json& split) {
  const std::string where = "pre_tokenizer: Split";
  const std::string& behavior = string_of(split, "behavior", where);
  if (behavior != "Isolated") throw_unsupported(where, "behavior " + as_json(behavior));
  if (flag_of(split, "invert", false, where)) throw_unsupported(where, "'invert'");
  const Json& regex = member(member(split, "pattern"), "Regex");
  if (!regex.is_string()) throw_unsupported(where, "a pattern other than a Regex");
  return regex.get<std::string>();
}

std::vector<std::string> read_patterns(const Json& file) {
  const std::string where = "pre_tokenizer";
  std::vector<std::string> patterns;
  bool byte_level = false;
  for (const Json* step : components_of(file, "pre_tokenizer", "pretokenizers")) {
    const std::string& type = string_of(*step, "type", where);
    if (byte_level) throw_unsupported(where, "type " + as_json(type) + " after ByteLevel");
    if (type == "Split") {
      patterns.push_back(split_pattern(*step));
    } else if (type == "Digits") {
      patterns.emplace_back(flag_of(*step, "individual_digits", false, where) ? "\\p{N}"
                                                                              : "\\p{N}+");
    } else if (type == "ByteLevel") {
      byte_level = true;
      if (flag_of(*step, "add_prefix_space", true, where)) {
        throw_unsupported(where + ": ByteLevel", "'add_prefix_space'");
      }
      if (flag_of(*step, "use_regex", true, where)) patterns.emplace_back(kGpt2Pattern);
    } else {
      refuse_type(where, type);
    }
  }
  if (!byte_level) throw_unsupported(where, "a tokenizer without ByteLevel");
  return patterns;
}

// The ids of the special tokens before the sequence in "single".
std::vector<TokenId> template_prefix(const Json& processor) {
  const std::string where = "post_processor: TemplateProcessing";
  const Json& single = member(processor, "single");
  if (!single.is_array()) throw_broken(where, "has no 'single'");
  std::vector<TokenId> prefix;
  bool sequence = false;
  for (const Json& piece : single) {
    if (sequence) throw_unsupported(where, "anything after the sequence in 'single'");
    sequence = !member(piece, "Sequence").is_null();
    if (sequence) continue;
    const std::string& name = string_of(member(piece, "SpecialToken"), "id", where);
    const Json& ids = member(member(member(processor, "special_tokens"), name.c_str()), "ids");
    if (!ids.is_array()) throw_broken(where, "special_tokens has no ids for " + as_json(name));
    for (const Json& value : ids) {
      const std::optional<TokenId> id = id_of(value);
      if (!id)
        throw_broken(where, "special_tokens has something other than ids for " + as_json(name));
      prefix.push_back(*id);
    }
  }
  if (!sequence) throw_broken(where, "'single' has no sequence");
  return prefix;
}

void read_post_processor(const Json& file, PipelineSpec& spec) {
  for (const Json* processor : components_of(file, "post_processor", "processors")) {
    spec.has_post_processor = true;
    const std::string& type = string_of(*processor, "type", "post_processor");
    if (type == "TemplateProcessing") {
      const std::vector<TokenId> ids = template_prefix(*processor);
      spec.prefix.insert(spec.prefix.begin(), ids.begin(), ids.end());
    } else if (type != "ByteLevel") {  // which changes offsets only
      refuse_type("post_processor", type);
    }
  }
}

void check_decoder(const Json& file) {
  const std::vector<const Json*> decoders = components_of(file, "decoder", "decoders");
  if (decoders.empty()) throw_unsupported("decoder", "a tokenizer without a ByteLevel decoder");
  for (const Json* decoder : decoders) {
    const std::string& type = string_of(*decoder, "type", "decoder");
    if (type != "ByteLevel") refuse_type("decoder", type);
  }
}

}  // namespace

PipelineSpec parse_pipeline(const Json& file) {
  PipelineSpec spec;
  spec.nfc = reads_nfc(file);
  spec.patterns = read_patterns(file);
  read_post_processor(file, spec);
  check_decoder(file);
  return spec;
}

}  // namespace sluice
