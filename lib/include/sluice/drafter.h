// Drafts for speculative decoding: guesses at the next tokens, which one step verifies together.
//
// A draft is accepted if the sampler draws that very token from the model's logits, with the noise
// of that position. So a drafter changes how fast text comes and never which text: greedy answers
// and draws of a seed are those without drafts, except for rounding, because several tokens share a
// step. Drafts of a smaller model are drawn with the same noise, so they agree often.
// Sources: Leviathan et al. 2023 and Chen et al. 2023 (verification in one step); Daliri et al.
// 2024, arXiv 2408.07978 (drafts and draws that share their noise); Saxena 2023, prompt lookup
// decoding.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sluice/engine.h"
#include "sluice/sampler.h"
#include "sluice/types.h"

namespace sluice {

// Guesses at the tokens that follow.
struct Drafts {
  std::vector<TokenId> tokens;
  // Two kinds of guesses, 0 and 1, whose rates of acceptance are measured apart.
  int kind = 0;
};

class Drafter {
 public:
  virtual ~Drafter() = default;

  // Called before an answer with the tokens of its session, [length]. They may have little in
  // common with those of an earlier answer.
  virtual void begin(std::span<const TokenId> tokens) = 0;
  // Up to `most` guesses at the tokens after `tokens`: those given to begin(), and all that were
  // drawn since.
  virtual Drafts propose(std::span<const TokenId> tokens, int most, const Sampler& sampler) = 0;
  // The cost of a draft, as a share of the model's step of one token.
  virtual double cost() const = 0;
};

// Continues the longest earlier occurrence of the newest tokens, at least three of them. Keeps the
// tokens, and 24 bytes or so for each.
class LookupDrafter final : public Drafter {
 public:
  LookupDrafter();
  ~LookupDrafter() override;
  LookupDrafter(const LookupDrafter&) = delete;
  LookupDrafter& operator=(const LookupDrafter&) = delete;

  void begin(std::span<const TokenId> tokens) override;
  Drafts propose(std::span<const TokenId> tokens, int most, const Sampler& sampler) override;
  double cost() const override { return 0.0; }

 private:
  struct Index;
  std::unique_ptr<Index> index_;
};

// Drafts of a smaller model with the same tokenizer.
class ModelDrafter final : public Drafter {
 public:
  // `session`: an empty session of `engine`, planned for the tokens of the answers' sessions.
  // `engine` must outlive the drafter. Throws Error{usage} if the tokenizers of the two models
  // differ in a token.
  ModelDrafter(const Engine& engine, Session session, const Engine& target);

  void begin(std::span<const TokenId> tokens) override;
  Drafts propose(std::span<const TokenId> tokens, int most, const Sampler& sampler) override;
  // The share of the models' bytes of weights.
  double cost() const override { return cost_; }

 private:
  // Makes the session's tokens those of `tokens` but the last. False if some have no embedding.
  bool follow(std::span<const TokenId> tokens);

  Session session_;
  int vocabulary_;
  double cost_;
};

// Throws Error{usage} unless both models give every token id the same text.
void require_same_tokens(const Engine& drafter, const Engine& target);

// The drafts of an answer, or of several.
struct DraftCounts {
  std::int64_t steps = 0;     // that verified drafts
  std::int64_t drafted = 0;   // drafts verified
  std::int64_t accepted = 0;  // of these

  DraftCounts& operator+=(const DraftCounts& other);
};

}  // namespace sluice
