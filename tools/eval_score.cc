#include "tools/eval_score.h"

#include <utf8proc.h>

#include <algorithm>
#include <map>

namespace sluice::tools {
namespace {

using Characters = std::u32string;

// The text's characters in lower case; a byte that is none is left out.
Characters lower(std::string_view text) {
  Characters characters;
  while (!text.empty()) {
    utf8proc_int32_t character = 0;
    const utf8proc_ssize_t length =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                         static_cast<utf8proc_ssize_t>(text.size()), &character);
    if (length > 0) characters += static_cast<char32_t>(utf8proc_tolower(character));
    text.remove_prefix(length > 0 ? static_cast<std::size_t>(length) : 1);
  }
  return characters;
}

// Characters of Python's string.punctuation.
bool is_punctuation(char32_t c) {
  return (c > U' ' && c < U'0') || (c > U'9' && c < U'A') || (c > U'Z' && c < U'a') ||
         (c > U'z' && c < 0x7F);
}

utf8proc_category_t category_of(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

bool is_letter_or_number(char32_t c) {
  const utf8proc_category_t category = category_of(c);
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
         (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO);
}

bool is_space(char32_t c) {
  const utf8proc_category_t category = category_of(c);
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F) || c == 0x85 ||
         (category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_ZP);
}

bool is_article(const Characters& word) { return word == U"a" || word == U"an" || word == U"the"; }

// The text without articles, which end where letters and numbers end, as Python's \b has it.
Characters without_articles(const Characters& text) {
  Characters result;
  for (std::size_t begin = 0; begin < text.size();) {
    const auto from = text.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto to = std::find_if_not(from, text.end(), is_letter_or_number);
    const Characters word(from, to);
    result += is_article(word) ? U" " : word;
    begin += word.size();
    if (begin < text.size()) result += text[begin++];
  }
  return result;
}

std::vector<Characters> words_of(std::string_view text) {
  Characters plain = lower(text);
  std::erase_if(plain, is_punctuation);
  std::vector<Characters> words;
  Characters word;
  for (const char32_t c : without_articles(plain) + U" ") {
    if (!is_space(c)) {
      word += c;
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  return words;
}

// Words that both have, each as often as the one that has it less often.
std::size_t common(const std::vector<Characters>& a, const std::vector<Characters>& b) {
  std::map<Characters, std::size_t> left;
  for (const Characters& word : a) ++left[word];
  std::size_t count = 0;
  for (const Characters& word : b) {
    const auto at = left.find(word);
    if (at == left.end() || at->second == 0) continue;
    --at->second;
    ++count;
  }
  return count;
}

double f1(const std::vector<Characters>& a, const std::vector<Characters>& b) {
  const auto shared = static_cast<double>(common(a, b));
  return shared == 0.0 ? 0.0 : 2.0 * shared / static_cast<double>(a.size() + b.size());
}

}  // namespace

double score_answer(const Reference& reference, std::string_view answer) {
  if (reference.metric == Metric::matches) return matches(reference.texts, answer);
  if (reference.metric == Metric::f1) return best_f1(reference.texts, answer);
  return 0.0;
}

double matches(std::span<const std::string> texts, std::string_view answer) {
  const Characters said = lower(answer);
  const auto found = std::count_if(texts.begin(), texts.end(), [&](const std::string& text) {
    return said.find(lower(text)) != Characters::npos;
  });
  return texts.empty() ? 0.0 : static_cast<double>(found) / static_cast<double>(texts.size());
}

double best_f1(std::span<const std::string> texts, std::string_view answer) {
  const std::vector<Characters> said = words_of(answer);
  double best = 0.0;
  for (const std::string& text : texts) best = std::max(best, f1(said, words_of(text)));
  return best;
}

bool has_words(std::string_view text) { return !words_of(text).empty(); }

}  // namespace sluice::tools
