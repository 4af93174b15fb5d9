// Lines hidden in a text, and questions about them, in words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/eval_tasks.h"

namespace sluice::tools {

// A generator whose sequence is the same with every standard library.
class Dice {
 public:
  Dice(std::uint64_t seed, int round) : engine_(seed * 1000003 + static_cast<unsigned>(round)) {}
  std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }

  template <typename T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t left = items.size(); left > 1; --left) {
      std::swap(items[left - 1], items[below(left)]);
    }
  }

 private:
  std::mt19937_64 engine_;
};

struct Wanted {
  std::string text;
  std::size_t line = 0;  // that says so
};

struct Question {
  std::string given;
  std::string answer;
  std::vector<Wanted> wanted;
};

struct QuestionSet {
  std::vector<std::string> lines;  // to be hidden, in this order
  std::vector<std::vector<Question>> probes;
};

// For tasks about hidden lines: needle to variable_tracking.
QuestionSet make_questions(Task task, const TaskOptions& options, Dice& dice);

// The answer is `common` in this order; each word counts anywhere in it.
Question ask_for_words(const std::vector<std::string>& common);

// Words of five letters or more in lower case, each once, in the order in which they are found.
std::vector<std::string> distinct_words(std::string_view text);

}  // namespace sluice::tools
