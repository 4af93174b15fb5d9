#define PCRE2_CODE_UNIT_WIDTH 8
#include "model/regex.h"

#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "model/onig.h"
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

// Backtracking once over the whole text is normal for "\s*[\r\n]+" on white space; more than some
// passes is an expression that would not come back.
std::uint32_t step_limit(std::size_t length) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  return static_cast<std::uint32_t>(std::min(kMost, 10'000'000 + std::uint64_t{64} * length));
}

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

Matcher::Matcher(const Regex& regex)
    : code_(regex.code_.get()),
      data_(pcre2_match_data_create_from_pattern(code_, nullptr)),
      context_(pcre2_match_context_create(nullptr)) {
  if (data_ == nullptr || context_ == nullptr) throw std::bad_alloc();
  pcre2_set_heap_limit(context_.get(), kHeapKiB);
}

std::optional<Matcher::Span> Matcher::find(std::string_view text, std::size_t from) {
  pcre2_set_match_limit(context_.get(), step_limit(text.size()));
  const auto match = [&](std::uint32_t options) {
    return pcre2_match(code_, characters(text), text.size(), from, PCRE2_NO_UTF_CHECK | options,
                       data_.get(), context_.get());
  };
  int result = match(0);
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = match(PCRE2_NO_JIT);
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0) {
    throw Error(ErrorCode::tokenizer, "the tokenizer's regular expression fails on a text of " +
                                          std::to_string(text.size()) + " bytes: " +
                                          message_of(result) + "; give the text in parts");
  }
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data_.get());
  return Span{offsets[0], offsets[1]};
}

}  // namespace sluice
