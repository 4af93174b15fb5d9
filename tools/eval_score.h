// Scores of answers in words, as the benchmarks compute them whose files `sluice eval` reads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::tools {

enum class Metric : std::uint8_t {
  none,
  matches,  // share of the references that stand in the answer
  f1,       // words that the answer has in common with the most similar reference
};

// What an answer is scored by.
struct Reference {
  Metric metric = Metric::none;
  std::vector<std::string> texts;  // UTF-8
};

// 0 to 1; 0 without a metric. `answer` is UTF-8.
double score_answer(const Reference& reference, std::string_view answer);

// The share of `texts` that stand in `answer`, whatever their case: string_match_all of RULER
// (Hsieh et al. 2024).
double matches(std::span<const std::string> texts, std::string_view answer);

// The largest F1 of words, over `texts`, in lower case and without ASCII punctuation and the
// articles a, an and the: qa_f1_score of LongBench (Bai et al. 2023).
double best_f1(std::span<const std::string> texts, std::string_view answer);

// Returns true if best_f1() compares anything of `text`.
bool has_words(std::string_view text);

}  // namespace sluice::tools
