// Drafts of a smaller model.
#include <algorithm>
#include <string>
#include <utility>

#include "lib/sample_token.h"
#include "lib/text.h"
#include "sluice/drafter.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::usage, "the draft model has another vocabulary: " + why +
                                    "; take one with the same tokenizer");
}

}  // namespace

void require_same_tokens(const Engine& drafter, const Engine& target) {
  const Tokenizer& a = drafter.tokenizer();
  const Tokenizer& b = target.tokenizer();
  if (a.size() != b.size()) {
    refuse(std::to_string(a.size()) + " tokens, not " + std::to_string(b.size()));
  }
  // Ids that only one of the models has logits for are no tokens.
  const TokenId end = std::min({a.size(), drafter.info().vocabulary, target.info().vocabulary});
  for (TokenId id = 0; id < end; ++id) {
    const std::span one(&id, 1);
    if (a.decode(one, true) == b.decode(one, true) && a.bytes(id) == b.bytes(id)) continue;
    refuse("token " + std::to_string(id) + " is " + in_quotes(a.decode(one, true)) + ", not " +
           in_quotes(b.decode(one, true)));
  }
}

ModelDrafter::ModelDrafter(const Engine& engine, Session session, const Engine& target)
    : session_(std::move(session)),
      vocabulary_(engine.info().vocabulary),
      cost_(static_cast<double>(engine.info().weight_bytes) /
            static_cast<double>(std::max<std::uint64_t>(target.info().weight_bytes, 1))) {
  require_same_tokens(engine, target);
}

bool ModelDrafter::follow(std::span<const TokenId> tokens) {
  const std::span<const TokenId> held = session_.tokens();
  const std::size_t most = std::min(held.size(), tokens.size() - 1);
  const auto [end, unused] =
      std::mismatch(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(most), tokens.begin());
  const auto common = end - held.begin();
  if (common < session_.length()) session_.truncate(common);
  const auto rest = tokens.subspan(static_cast<std::size_t>(common));
  const auto is_known = [&](TokenId id) { return id < vocabulary_; };
  if (!std::all_of(rest.begin(), rest.end(), is_known)) return false;
  if (std::ssize(tokens) > session_.plan().context) return false;
  if (rest.size() > 1) session_.prefill(rest.first(rest.size() - 1));
  return true;
}

void ModelDrafter::begin(std::span<const TokenId> tokens) {
  if (!tokens.empty()) follow(tokens);
}

// A repetition penalty is left to the model, which then rejects more drafts.
Drafts ModelDrafter::propose(std::span<const TokenId> tokens, int most, const Sampler& sampler) {
  if (most < 1 || tokens.empty() || !follow(tokens)) return {};
  Drafts drafts;
  const std::int64_t room = session_.plan().context - session_.length();
  TokenId last = tokens.back();
  for (std::int64_t i = 0; i < std::min<std::int64_t>(most, room); ++i) {
    const std::span<const float> logits = session_.decode(last);
    last = sample_token(logits, sampler.draw(session_.length()));
    drafts.tokens.push_back(last);
  }
  return drafts;
}

DraftCounts& DraftCounts::operator+=(const DraftCounts& other) {
  steps += other.steps;
  drafted += other.drafted;
  accepted += other.accepted;
  return *this;
}

}  // namespace sluice
