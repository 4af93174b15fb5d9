#include "tools/eval_probe.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>

#include "lib/sample_token.h"
#include "sluice/sampler.h"
#include "tools/distributions.h"

namespace sluice::tools {
namespace {

// One pass through a probe.
class Reading {
 public:
  // Steps are added to `cost` unless it is null.
  Reading(Session& session, const Probe& probe, const ProbeOptions& options, Baseline& baseline,
          CostMeter& meter, DecodeCost* cost)
      : session_(session),
        probe_(probe),
        options_(options),
        baseline_(baseline),
        meter_(meter),
        cost_(cost) {
    if (options.writer != Writer::drawn) return;
    SamplingParams params;
    params.temperature = 1.0;
    params.seed = options.seed;
    sampler_.emplace(params);
  }

  // Feeds the `known` answers, or its own answers if there are none.
  void run(std::span<const TokenId> known) {
    known_ = known;
    std::size_t written = 0;
    for (const Turn& turn : probe_.turns) {
      pending_.insert(pending_.end(), turn.given.begin(), turn.given.end());
      for (std::size_t i = 0; i < turn.answer_tokens(); ++i) {
        asked_.push_back(pending_.size() - 1);
        if (known.empty()) feed();
        pending_.push_back(known.empty() ? answers_.back() : known[written]);
        ++written;
        if (std::ranges::find(options_.ends, pending_.back()) != options_.ends.end()) break;
      }
    }
    pending_.pop_back();  // no token is scored after the last answer
    feed();
  }

  // The answer tokens that were fed, and the policy's likeliest token at each of them.
  const std::vector<TokenId>& answers() const { return answers_; }
  const std::vector<TokenId>& likeliest() const { return likeliest_; }
  const ProbeResult& result() const { return result_; }

 private:
  void feed() {
    std::size_t next = 0;  // index into asked_
    for (std::size_t done = 0; done < pending_.size();) {
      const std::size_t count = std::min(options_.step_tokens, pending_.size() - done);
      std::size_t accounted = 0;
      session_.decode_known(std::span(pending_).subspan(done, count),
                            [&](std::size_t i, std::span<const float> logits) {
                              if (i == accounted) accounted += account();
                              if (next == asked_.size() || asked_[next] != done + i) return;
                              score(logits);
                              ++next;
                            });
      done += count;
      if (options_.until_wrong && wrong_) break;
    }
    pending_.clear();
    asked_.clear();
  }

  // Counts the last step, unless a wrong answer ended the count; returns its tokens.
  std::size_t account() {
    meter_.end_step(wrong_ && options_.costs_until_wrong ? nullptr : cost_);
    return static_cast<std::size_t>(session_.ledger().history().back().tokens);
  }

  void score(std::span<const float> logits) {
    const std::size_t at = answers_.size();
    const TokenId best = sample_token(logits, {});  // NaN is an error
    const TokenId drawn = sampler_ && known_.empty()
                              ? sampler_->next(logits, {}, static_cast<std::int64_t>(at))
                              : best;
    answers_.push_back(known_.empty() ? drawn : known_[at]);
    likeliest_.push_back(best);
    if (best != answers_.back()) wrong_ = true;
    if (!wrong_) ++result_.leading;
    if (cost_ == nullptr) return;  // only the answer counts
    std::vector<float> own = log_probabilities(logits);
    result_.nll.push_back(-static_cast<double>(own[static_cast<std::size_t>(answers_.back())]));
    if (at == baseline_.log_probabilities.size()) baseline_.log_probabilities.push_back(own);
    const std::vector<float>& dense = baseline_.log_probabilities[at];
    result_.kl.push_back(divergence(dense, own));
    result_.agree.push_back(tools::likeliest(dense) == best ? 1.0 : 0.0);
  }

  Session& session_;
  const Probe& probe_;
  const ProbeOptions& options_;
  Baseline& baseline_;
  std::optional<Sampler> sampler_;
  std::span<const TokenId> known_;
  std::vector<TokenId> pending_;    // not fed yet
  std::vector<std::size_t> asked_;  // indices in pending_ after which an answer token is scored
  std::vector<TokenId> answers_;
  std::vector<TokenId> likeliest_;
  bool wrong_ = false;
  ProbeResult result_;
  CostMeter& meter_;
  DecodeCost* cost_;
};

std::vector<TokenId> right_answers(const Probe& probe) {
  std::vector<TokenId> answers;
  for (const Turn& turn : probe.turns) {
    answers.insert(answers.end(), turn.answer.begin(), turn.answer.end());
  }
  return answers;
}

std::vector<FactResult> facts_in(const Tokenizer& tokenizer, const Probe& probe,
                                 const std::vector<TokenId>& answers) {
  std::vector<FactResult> results;
  std::size_t begin = 0;
  for (const Turn& turn : probe.turns) {
    const std::size_t count = std::min(turn.answer_tokens(), answers.size() - begin);
    const std::string said = tokenizer.decode(std::span(answers).subspan(begin, count));
    begin += count;
    for (const Fact& fact : turn.facts) {
      results.push_back({said.find(fact.text) != std::string::npos, fact.depth});
    }
  }
  return results;
}

}  // namespace

ProbeResult run_probe(const Tokenizer& tokenizer, Session& session, const Probe& probe,
                      const ProbeOptions& options, Baseline& baseline, CostMeter& meter,
                      DecodeCost& cost) {
  const std::int64_t begin = session.length();
  const bool first = baseline.answers.empty();
  if (first && options.writer == Writer::text) baseline.answers = right_answers(probe);
  Reading reading(session, probe, options, baseline, meter, &cost);
  reading.run(baseline.answers);
  if (first) baseline.answers = reading.answers();

  ProbeResult result = reading.result();
  const std::span leading(reading.answers().data(), static_cast<std::size_t>(result.leading));
  result.characters = static_cast<int>(tokenizer.decode(leading).size());
  std::vector<TokenId> own = reading.likeliest();
  if (options.writer == Writer::dense && own != baseline.answers) {
    session.truncate(begin);
    Reading alone(session, probe, options, baseline, meter, nullptr);
    alone.run({});
    own = alone.answers();
  }
  result.facts = facts_in(tokenizer, probe, own);
  if (probe.reference.metric != Metric::none) {
    result.answer = tokenizer.decode(own);
    result.score = score_answer(probe.reference, result.answer);
  }
  return result;
}

}  // namespace sluice::tools
