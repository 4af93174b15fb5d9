#define PCRE2_CODE_UNIT_WIDTH 8
#include "model/regex.h"

#include <pcre2.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "model/onig.h"
#include "model/utf8.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::size_t kMaxPattern = 1 << 16;
constexpr std::uint32_t kHeapKiB = 256 * 1024;

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

PCRE2_SPTR characters(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

// At each place where a match may begin; an ordinary word takes a few.
constexpr std::uint32_t kFreeSteps = 1000;
constexpr std::uint32_t kMostSteps = std::uint32_t{1} << 31;

}  // namespace

void Regex::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }
void Matcher::Free::operator()(pcre2_real_match_data_8* data) const { pcre2_match_data_free(data); }
void Matcher::Free::operator()(pcre2_real_match_context_8* context) const {
  pcre2_match_context_free(context);
}

Regex::Regex(std::string_view pattern) {
  if (pattern.size() > kMaxPattern) {
    throw Error(ErrorCode::unsupported, "the regular expression has " +
                                            std::to_string(pattern.size()) + " bytes, more than " +
                                            std::to_string(kMaxPattern));
  }
  const std::string translated = onig_to_pcre2(pattern);
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_.reset(pcre2_compile(characters(translated), translated.size(),
                            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &offset, nullptr));
  if (code_ == nullptr) {
    throw Error(ErrorCode::tokenizer, "the regular expression does not compile: " +
                                          message_of(error) + " at byte " + std::to_string(offset));
  }
  // Without the JIT compiler the interpreter matches, only slower.
  pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
}

// Backtracking once over the whole text is normal for "\s*[\r\n]+" on white space; more than some
// passes is an expression that would not come back.
StepBudget::StepBudget(std::size_t text_bytes)
    : text_bytes_(text_bytes), steps_(1'000'000 + std::uint64_t{64} * text_bytes), left_(steps_) {}

void StepBudget::spend(std::uint64_t steps) {
  if (steps > left_) {
    throw Error(ErrorCode::tokenizer,
                "the tokenizer's regular expression goes over a text of " +
                    std::to_string(text_bytes_) + " bytes again and again (match limit: " +
                    std::to_string(steps_) + " steps); use another tokenizer.json");
  }
  left_ -= steps;
}

Matcher::Matcher(const Regex& regex, StepBudget& budget)
    : code_(regex.code_.get()),
      budget_(&budget),
      data_(pcre2_match_data_create_from_pattern(code_, nullptr)),
      context_(pcre2_match_context_create(nullptr)) {
  if (data_ == nullptr || context_ == nullptr) throw std::bad_alloc();
  pcre2_set_heap_limit(context_.get(), kHeapKiB);
}

int Matcher::match(std::string_view text, std::size_t from, std::uint32_t options,
                   std::uint32_t steps) {
  pcre2_set_match_limit(context_.get(), steps);
  const auto run = [&](std::uint32_t more) {
    return pcre2_match(code_, characters(text), text.size(), from,
                       PCRE2_NO_UTF_CHECK | options | more, data_.get(), context_.get());
  };
  int result = run(0);
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = run(PCRE2_NO_JIT);
  if (result < 0 && result != PCRE2_ERROR_NOMATCH && result != PCRE2_ERROR_MATCHLIMIT) {
    throw Error(ErrorCode::tokenizer, "the tokenizer's regular expression fails on a text of " +
                                          std::to_string(text.size()) + " bytes: " +
                                          message_of(result) + "; give the text in parts");
  }
  return result;
}

// PCRE2 does not tell how many steps it took, only that a limit was reached.
int Matcher::match_at(std::string_view text, std::size_t at) {
  for (std::uint32_t steps = kFreeSteps;; steps *= 4) {
    const int result = match(text, at, PCRE2_ANCHORED, steps);
    if (result != PCRE2_ERROR_MATCHLIMIT) return result;
    budget_->spend(steps);
    if (steps > kMostSteps / 4) budget_->spend(std::numeric_limits<std::uint64_t>::max());
  }
}

std::optional<Matcher::Span> Matcher::find(std::string_view text, std::size_t from) {
  int result = PCRE2_ERROR_NOMATCH;
  if (!backtracks_) {
    result = match(text, from, 0, kFreeSteps);
    backtracks_ = result == PCRE2_ERROR_MATCHLIMIT;
  }
  if (backtracks_) {
    // The limit holds for each place where a match may begin, so places are tried one by one.
    result = match_at(text, from);
    while (result == PCRE2_ERROR_NOMATCH && from < text.size()) {
      from += next_utf8_unit(text.substr(from)).length;
      result = match_at(text, from);
    }
  }
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data_.get());
  return Span{offsets[0], offsets[1]};
}

}  // namespace sluice
