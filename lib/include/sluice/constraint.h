// Constraints on the text of an answer: JSON of a schema, a regular expression, or a grammar.
//
// A constraint says after every token which tokens may follow, so that whatever is drawn is the
// beginning of a text that it allows; the tokens that end an answer are allowed where the text is
// whole. An answer that `max_tokens` cuts off may be unfinished.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "sluice/tokenizer.h"
#include "sluice/types.h"

namespace sluice {

// Compiled for one vocabulary. A handle: copies share what was compiled and the masks that were
// found. Any number of answers may use it at a time, from any threads.
class Constraint {
 public:
  struct State;  // opaque
  struct Memory;

  explicit Constraint(std::shared_ptr<State> state);

 private:
  friend class ConstraintCursor;
  std::shared_ptr<State> state_;
};

// Compiles constraints for the vocabulary of one tokenizer, and keeps the newest. Functions may be
// called from any thread. They throw Error{usage} for an invalid constraint, one that no finite
// text satisfies, or one that is too large, and Error{unsupported}, which names it, for what is not
// handled.
class Constraints {
 public:
  // Most constraints kept to be found again.
  static constexpr std::size_t kKept = 16;

  // Reads the vocabulary; `tokenizer` need not outlive it.
  explicit Constraints(const Tokenizer& tokenizer);
  Constraints(Constraints&&) noexcept;
  Constraints& operator=(Constraints&&) noexcept;
  ~Constraints();

  // Any JSON object.
  Constraint json_object() const;
  // JSON documents that are valid under a schema (JSON Schema, a part of draft 2020-12 that
  // docs/serving.md lists), with properties in the order that the schema has them.
  Constraint json_schema(std::string_view schema) const;
  // The whole text matches the expression (ECMA 262, without look-around and back references).
  Constraint regex(std::string_view pattern) const;
  // Rules as llama.cpp reads them (GBNF); the text is a `root`.
  Constraint grammar(std::string_view rules) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One answer's place in its constraint. Not for several threads at a time.
class ConstraintCursor {
 public:
  explicit ConstraintCursor(Constraint constraint);

  // Sets the logits [vocabulary] of tokens that may not follow to -inf. `ends` are the tokens that
  // end the answer. Throws Error{unsupported} if the constraint is so ambiguous that it cannot be
  // followed, and Error{usage} if `logits` are not of the tokenizer's vocabulary.
  void mask(std::span<const TokenId> ends, std::span<float> logits);
  // Goes on by a token that mask() left. Throws Error{usage} for another token.
  void take(TokenId token);
  // The text so far is whole.
  bool is_complete() const;
  // It is whole, and nothing can follow but the end.
  bool is_final() const;

 private:
  void renew();

  std::shared_ptr<Constraint::State> state_;
  std::shared_ptr<Constraint::Memory> memory_;
  std::int32_t at_ = 0;
};

}  // namespace sluice
