#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/regex.h"

#include <pcre2.h>

#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <utility>

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

// Free steps at each place where a match may begin; an ordinary word takes a few.
constexpr std::uint32_t kFreeSteps = 1000;
constexpr std::uint32_t kMostSteps = std::uint32_t{1} << 31;

std::string_view check_length(std::string_view pattern) {
  if (pattern.size() <= kMaxPattern) return pattern;
  throw Error(ErrorCode::unsupported, "the regular expression has " +
                                          std::to_string(pattern.size()) + " bytes, more than " +
                                          std::to_string(kMaxPattern));
}

}  // namespace

void Regex::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }
void Matcher::Free::operator()(pcre2_real_match_data_8* data) const { pcre2_match_data_free(data); }
void Matcher::Free::operator()(pcre2_real_match_context_8* context) const {
  pcre2_match_context_free(context);
}

Regex::Regex(std::string_view pattern) : Regex(translate_onig(check_length(pattern))) {}

Regex::Regex(ClassExpression expression) : classes_(std::move(expression.classes)) {
  const std::string& pattern = expression.pattern;
  // PCRE2 10.42 takes "[ab]+" for possessive in "[ab]+(?>(?:cd)?)b", where it has to give back "b".
  const std::uint32_t options =
      pattern.find("(?>") == std::string::npos ? 0 : PCRE2_NO_AUTO_POSSESS;
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_.reset(pcre2_compile(characters(pattern), pattern.size(), PCRE2_NEVER_UTF | options, &error,
                            &offset, nullptr));
  if (code_ == nullptr) {
    throw Error(ErrorCode::unsupported,
                "the regular expression does not compile as PCRE2: " + message_of(error));
  }
  // Without the JIT compiler the interpreter matches, only slower.
  pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
}

// Backtracking once over the whole text is normal for "\s*[\r\n]+" on white space; an expression
// that takes more than a few passes would practically never end.
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
    : regex_(&regex),
      budget_(&budget),
      data_(pcre2_match_data_create_from_pattern(regex.code_.get(), nullptr)),
      context_(pcre2_match_context_create(nullptr)) {
  if (data_ == nullptr || context_ == nullptr) throw std::bad_alloc();
  pcre2_set_heap_limit(context_.get(), kHeapKiB);
}

void Matcher::start(std::string_view text) {
  text_ = text;
  regex_->classes_.classify(text, characters_);
  from_ = index_ = byte_ = 0;
}

int Matcher::match(std::size_t from, std::uint32_t options, std::uint32_t steps) {
  pcre2_set_match_limit(context_.get(), steps);
  const auto run = [&](std::uint32_t more) {
    return pcre2_match(regex_->code_.get(), characters(characters_), characters_.size(), from,
                       options | more, data_.get(), context_.get());
  };
  int result = run(0);
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = run(PCRE2_NO_JIT);
  if (result < 0 && result != PCRE2_ERROR_NOMATCH && result != PCRE2_ERROR_MATCHLIMIT) {
    throw Error(ErrorCode::tokenizer, "the tokenizer's regular expression fails on a text of " +
                                          std::to_string(text_.size()) + " bytes: " +
                                          message_of(result) + "; give the text in parts");
  }
  return result;
}

// Tries again with four times the limit, because PCRE2 does not report the steps it took, only that
// it reached the limit.
int Matcher::match_at(std::size_t at) {
  for (std::uint32_t steps = kFreeSteps;; steps *= 4) {
    const int result = match(at, PCRE2_ANCHORED, steps);
    if (result != PCRE2_ERROR_MATCHLIMIT) return result;
    budget_->spend(steps);
    if (steps > kMostSteps / 4) budget_->spend(std::numeric_limits<std::uint64_t>::max());
  }
}

std::optional<Matcher::Span> Matcher::find(std::size_t from) {
  int result = PCRE2_ERROR_NOMATCH;
  if (!backtracks_) {
    result = match(from, 0, kFreeSteps);
    backtracks_ = result == PCRE2_ERROR_MATCHLIMIT;
  }
  if (backtracks_) {
    // Tries places one by one, because the limit holds for each place where a match may begin.
    result = match_at(from);
    while (result == PCRE2_ERROR_NOMATCH && from < characters_.size()) result = match_at(++from);
  }
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data_.get());
  return Span{offsets[0], offsets[1]};
}

std::size_t Matcher::byte_of(std::size_t index) {
  for (; index_ < index; ++index_) {
    const auto lead = static_cast<std::uint8_t>(text_[byte_]);
    byte_ += lead < 0x80 ? 1 : static_cast<std::size_t>(std::countl_one(lead));
  }
  return byte_;
}

std::optional<Matcher::Span> Matcher::next() {
  if (from_ >= characters_.size()) return std::nullopt;
  const std::optional<Span> found = find(from_);
  if (!found) {
    from_ = characters_.size();
    return std::nullopt;
  }
  from_ = found->end + (found->begin == found->end ? 1 : 0);
  const std::size_t begin = byte_of(found->begin);
  return Span{begin, byte_of(found->end)};
}

}  // namespace sluice
