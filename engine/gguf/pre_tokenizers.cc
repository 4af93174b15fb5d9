#include "engine/gguf/pre_tokenizers.h"

#include <algorithm>
#include <array>

namespace sluice::gguf {
namespace {

// Expressions are those of the tokenizer.json that the models were published with, which
// llama.cpp's approximate where its engine lacks a property.
constexpr const char* kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Meta-Llama-3-8B, tokenizer.json.
constexpr std::array kLlama3 = {
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)"};

// Qwen2-7B, tokenizer.json.
constexpr std::array kQwen2 = {
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)"};

// Mistral-Nemo-Base-2407, tokenizer.json.
constexpr std::array kTekken = {
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
    R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};

// openai-community/gpt2: ByteLevel with its own expression.
constexpr std::array kGpt2Alone = {kGpt2};

// SmolLM-135M, StarCoder: each digit by itself, then GPT-2's.
constexpr std::array kDigits = {R"(\p{N})", kGpt2};

// llama.cpp's own for models that name no other (llama-vocab.cpp).
constexpr std::array kDefault = {R"([\p{P}\$\+<=>\^~\|]+)", kGpt2, R"(\p{N}+)", "[0-9][0-9][0-9]"};

// Names and flags: llama-vocab.cpp and convert_hf_to_gguf.py of llama.cpp.
constexpr std::array kAll = {
    PreTokenizer{"llama-bpe", kLlama3, false, true, true},
    PreTokenizer{"llama3", kLlama3, false, true, true},
    PreTokenizer{"llama-v3", kLlama3, false, true, true},
    PreTokenizer{"falcon3", kLlama3, false, true, true},
    PreTokenizer{"smaug-bpe", kLlama3},
    PreTokenizer{"qwen2", kQwen2, true},
    PreTokenizer{"deepseek-r1-qwen", kQwen2},
    PreTokenizer{"tekken", kTekken, false, true, true},
    PreTokenizer{"gpt-2", kGpt2Alone},
    PreTokenizer{"smollm", kDigits},
    PreTokenizer{"starcoder", kDigits},
    PreTokenizer{"refact", kDigits},
    PreTokenizer{"command-r", kDigits},
    PreTokenizer{"default", kDefault},
};

}  // namespace

const PreTokenizer* find_pre_tokenizer(std::string_view name) {
  const auto* const found = std::find_if(
      kAll.begin(), kAll.end(), [&](const PreTokenizer& entry) { return entry.name == name; });
  return found == kAll.end() ? nullptr : found;
}

std::string pre_tokenizer_names() {
  std::string names;
  for (std::size_t i = 0; i < kAll.size(); ++i) {
    if (i > 0) names += i + 1 == kAll.size() ? " and " : ", ";
    names += kAll.at(i).name;
  }
  return names;
}

}  // namespace sluice::gguf
