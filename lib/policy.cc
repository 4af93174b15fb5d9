#include "sluice/policy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "lib/policy_settings.h"
#include "lib/value_tiles.h"
#include "sluice/errors.h"
#include "sluice/scorer.h"

namespace sluice {
namespace {

// Larger than any context, and small enough that sums of a few such counts do not overflow.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;

// GPUs multiply the channels of 1-bit keys 16 at a time and have no kernel for fewer.
constexpr int kOneBitUnit = 16;

// More than any model has, and few enough that searching lists of layers costs nothing.
constexpr int kMostLayers = 1024;

// The first layer whose rows can be chosen from the previous layer's input. On sluice-22m that
// finds 1 % of layer 1's rows, 26-43 % of layer 2's and 59-70 % of later layers'.
constexpr int kFirstWholeLayer = 3;

void require(bool condition, const std::string& otherwise) {
  if (!condition) throw Error(ErrorCode::usage, "policy: " + otherwise);
}

bool contains(const std::vector<int>& layers, int layer) {
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

using Kind = ScorerInfo::Kind;

// Names the scorers whose estimates can be pruned and whose candidates can be re-scored.
std::string estimating(const Scorers& scorers) {
  return scorers.names({Kind::bounds, Kind::logits});
}

void check_tokens(const std::string& key, std::int64_t tokens) {
  require(tokens >= 0 && tokens <= kMostTokens, key + " is " + std::to_string(tokens) +
                                                    "; it has to be from 0 to " +
                                                    std::to_string(kMostTokens));
}

void check_budget(const std::string& key, const Budget& budget) {
  const auto fits = [](std::int64_t n) { return n >= 0 && n <= kMostTokens; };
  require(
      fits(budget.tokens) && fits(budget.divisor) && (budget.tokens == 0 || budget.divisor == 0),
      key + " has to be N tokens or a share 1/N of the context, N from 1 to " +
          std::to_string(kMostTokens));
}

void check_parameters(const Method& method, const Scorer& scorer) {
  for (const auto& [name, value] : method.parameters) {
    const std::vector<ScorerParameter>& known = scorer.info().parameters;
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&](const ScorerParameter& p) { return p.name == name; });
    require(found != known.end(), "select=" + method.name + " takes no parameter " + name);
    require(value >= found->least && value <= found->most &&
                (!found->whole || value == std::floor(value)),
            "the " + name + " of " + to_string(method) + " has to be from " + found->range);
  }
}

void check_selector(const Policy& policy, const Scorer& scorer) {
  require(policy.bits >= 1 && policy.bits <= 4,
          "bits is " + std::to_string(policy.bits) + "; it has to be 4, 3, 2 or 1");
  require(policy.bits > 1 || !scorer.reads_channels(),
          "bits=1 is for rotated keys, whose channels select=" + policy.select.name +
              " cannot read; it takes bits 4, 3 or 2");
  check_parameters(policy.select, scorer);
  require(
      scorer.info().kind != Kind::fixed || policy.sinks + policy.recent >= 1,
      "select=" + policy.select.name + " attends to nothing; sinks + recent has to be 1 or more");
}

void check_pruner(const Policy& policy, const Scorers& scorers) {
  const bool estimates = scorers.at(policy.select).info().estimates();
  const bool top_p = policy.prune == Pruner::top_p;
  check_budget("the k of prune=top_k", policy.k);
  require(!top_p || !policy.k.limited(), "k is of prune=top_k; with top_p, limit cap instead");
  require(top_p || policy.p == 0.0, "p is of prune=top_p; with top_k it has to be 0");
  // The comparison is false for NaN.
  require(!top_p || (policy.p > 0.0 && policy.p <= 1.0),
          "the share of prune=top_p has to be above 0 and up to 1");
  const bool keeps_none = policy.prune == Pruner::none;
  require(!keeps_none || !policy.k.limited(), "k is of prune=top_k; prune=none has none");
  require(!keeps_none || policy.compensate == Compensation::values,
          "prune=none keeps nothing that is estimated; it takes compensate=values");
  const bool prunes = top_p || policy.k.limited() || keeps_none;
  require(prunes || !estimates,
          "a selector other than dense and streaming needs prune=top_k(N), top_k(1/N) or "
          "top_p(P), N of 1 or more, P above 0 and up to 1");
  require(!prunes || estimates, "prune needs estimates; it takes select=" + estimating(scorers));
  check_budget("cap", policy.cap);
  require(top_p || !policy.cap.limited(),
          "cap limits what top_p keeps; it takes prune=top_p(P), and cap=none with top_k");
}

void check_candidates(const Policy& policy, const Scorers& scorers) {
  const Budget& candidates = policy.candidates;
  const Budget& k = policy.k;
  check_budget("candidates", candidates);
  if (!candidates.limited()) return;
  require(scorers.at(policy.select).info().estimates(),
          "candidates need a selector that proposes them: select=" + estimating(scorers));
  require(policy.prune != Pruner::none,
          "candidates are scored again to choose among them; prune=none takes candidates=none");
  require(candidates.tokens == 0 || candidates.tokens >= k.tokens,
          "candidates is " + std::to_string(candidates.tokens) +
              ", fewer than top_k keeps; it has " + "to be " + std::to_string(k.tokens) +
              " or more");
  require(candidates.divisor == 0 || k.divisor == 0 || candidates.divisor <= k.divisor,
          "candidates is 1/" + std::to_string(candidates.divisor) +
              ", less than top_k keeps; it has to be 1/" + std::to_string(k.divisor) + " or more");
}

void check_layer_list(const std::string& key, const std::vector<int>& layers) {
  const bool ascending =
      std::adjacent_find(layers.begin(), layers.end(), std::greater_equal<>()) == layers.end();
  require(ascending && (layers.empty() || (layers.front() >= 0 && layers.back() < kMostLayers)),
          key + " has to list layers of 0 to " + std::to_string(kMostLayers - 1) +
              " in ascending order, each once");
}

// The layers before the first anchor have nothing to follow.
void check_prefix(const Policy& policy) {
  const int first = policy.anchors.front();
  for (int layer = 0; layer < first; ++layer) {
    require(contains(policy.dense_layers, layer),
            "layer " + std::to_string(layer) +
                " follows no anchor: dense has to list every layer " + "before the first anchor, " +
                std::to_string(first));
  }
}

void check_layers(const Policy& policy, const Scorers& scorers) {
  check_layer_list("dense", policy.dense_layers);
  check_layer_list("anchors", policy.anchors);
  require(!policy.dense_anchors || !policy.anchors.empty(),
          "anchors_attend=all needs anchors that do; anchors=none takes anchors_attend=selected");
  if (policy.anchors.empty()) return;
  require(scorers.at(policy.select).info().estimates(),
          "anchors share a selection; they take select=" + estimating(scorers));
  for (const int layer : policy.anchors) {
    require(!contains(policy.dense_layers, layer),
            "layer " + std::to_string(layer) +
                " has to be in dense or in anchors, not in both; anchors_attend=all is for both");
  }
  check_prefix(policy);
}

void check_compensation(const Policy& policy, const Scorers& scorers) {
  const bool by_values = policy.compensate == Compensation::values;
  // Bounds are refused, because kept tokens cannot have a share of a sum of bounds.
  require(policy.compensate == Compensation::none ||
              scorers.at(policy.select).info().kind == Kind::logits,
          std::string("compensate=") + (by_values ? "values" : "mean_value") +
              " needs the weight of every token; it takes select=" + scorers.names({Kind::logits}));
  require(by_values || policy.values == ValueBits{},
          "bits, pages and components of values are of compensate=values");
  require(policy.values.bits >= 1 && policy.values.bits <= 4,
          "the bits of compensate=values have to be from 1 to 4");
  require(policy.values.pages > 0.0 && policy.values.pages <= 1.0,
          "the pages of compensate=values have to be a share above 0 and up to 1");
}

void check_early(const Policy& policy, const Scorers& scorers) {
  if (policy.early == Early::none) return;
  const Scorer& scorer = scorers.at(policy.select);
  require(scorer.info().estimates(),
          "early chooses rows before a layer's turn, and select=" + policy.select.name +
              " has nothing to choose; it takes early=none");
  require(policy.prune != Pruner::none,
          "early chooses rows before a layer's turn, and prune=none fetches none; it takes "
          "early=none");
  require(!scorer.reads_rows() || policy.dense_anchors,
          "select=" + policy.select.name +
              " reads keys that are not there before a layer's turn; it takes early=none, or "
              "anchors_attend=all, whose followers fetch early");
}

void check_corrections(const Policy& policy, const Scorers& scorers) {
  const ScorerInfo& info = scorers.at(policy.select).info();
  check_tokens("correct", policy.correct);
  require(policy.correct == 0 || info.kind != Kind::dense,
          "correct has nothing to correct with select=dense, which takes correct=never only");
}

void check_prefill(const Policy& policy, const Scorers& scorers) {
  const SparsePrefill& prefill = policy.prefill;
  require(prefill.tau == 0.0 || !scorers.at(policy.select).observes(),
          "select=" + policy.select.name +
              " looks at the prompt's queries, which prefill=zipvl does not show; it takes "
              "prefill=dense or pages");
  require(prefill.tau >= 0.0 && prefill.tau <= 1.0,
          "the share of prefill=zipvl has to be above 0 and up to 1");
  require(prefill.pages >= 0.0 && prefill.pages <= 1.0,
          "the share of prefill=pages has to be above 0 and up to 1");
  require(prefill.pages == 0.0 || (prefill.tau == 0.0 && !prefill.evict),
          "a prefill is zipvl or pages, not both");
  require(!prefill.evict || prefill.tau > 0.0,
          "prefill=zipvl evicts what is not important; its share has to be above 0 and up to 1");
  require(!prefill.evict || policy.anchors.empty(),
          "every layer evicts tokens of its own, so none can follow another: evict takes "
          "anchors=none");
  require(!prefill.evict || policy.correct == 0,
          "a correction attends to every token, and evicted ones are gone: evict takes "
          "correct=never");
}

void check_fits(const std::string& key, const std::vector<int>& layers, int count) {
  for (const int layer : layers) {
    require(layer < count, key + " lists layer " + std::to_string(layer) +
                               "; the model's layers are 0 to " + std::to_string(count - 1));
  }
}

}  // namespace

std::int64_t Budget::of(std::int64_t context) const {
  if (tokens > 0) return std::min(tokens, context);
  if (divisor > 0) return context / divisor + (context % divisor > 0 ? 1 : 0);
  return context;
}

Policy Policy::at(int layer) const {
  Policy own = *this;
  own.layers.clear();
  if (const auto found = layers.find(layer); found != layers.end()) {
    for (const Setting& setting : all_settings()) {
      if (setting.give != nullptr) setting.give(found->second, own);
    }
  }
  return own;
}

bool Policy::compensates(int layer, Compensation by) const {
  const auto found = layers.find(layer);
  const bool is_own = found != layers.end() && found->second.compensate;
  return selects(layer) && !is_dense(layer) &&
         (is_own ? found->second.compensate->by : compensate) == by;
}

Early Policy::early_at(int layer) const {
  const auto found = layers.find(layer);
  const bool has_own = found != layers.end();
  const Early wanted = has_own && found->second.early ? *found->second.early : early;
  const Pruner pruner = has_own && found->second.prune ? found->second.prune->prune : prune;
  const bool chooses = selects(layer) ? pruner != Pruner::none : !anchors.empty();
  if (layer == 0 || wanted == Early::none || is_dense(layer) || !chooses) return Early::none;
  return layer >= kFirstWholeLayer && anchors.empty() ? wanted : Early::half;
}

bool Policy::any_early(int count, Early how) const {
  for (int layer = 0; layer < count; ++layer) {
    if (early_at(layer) == how) return true;
  }
  return false;
}

bool Policy::is_dense(int layer) const {
  return select.name == "dense" || contains(dense_layers, layer) ||
         (dense_anchors && contains(anchors, layer));
}

bool Policy::selects(int layer) const {
  return anchors.empty() ? !is_dense(layer) : contains(anchors, layer);
}

namespace {

// Checks the settings of one layer.
void check_settings(const Policy& policy, const Scorers& scorers) {
  // Ranges first: later checks compute with these counts.
  check_tokens("sinks", policy.sinks);
  check_tokens("recent", policy.recent);
  const Scorer* const scorer = scorers.find(policy.select.name);
  require(scorer != nullptr,
          "there is no select=" + policy.select.name + "; select takes " + scorers.accepted());
  check_selector(policy, *scorer);
  check_pruner(policy, scorers);
  check_candidates(policy, scorers);
  check_layers(policy, scorers);
  check_compensation(policy, scorers);
  check_corrections(policy, scorers);
  check_prefill(policy, scorers);
  check_early(policy, scorers);
}

// A layer's own settings have to fit the rest of the policy and to be used.
void check_own_settings(const Policy& policy, const Scorers& scorers) {
  require(policy.layers.size() <= kMostOwnLayers, std::to_string(policy.layers.size()) +
                                                      " layers have settings of their own; " +
                                                      std::to_string(kMostOwnLayers) + " may");
  for (const auto& [layer, settings] : policy.layers) {
    const std::string name = "layer " + std::to_string(layer);
    require(layer >= 0 && layer < kMostLayers,
            name + " cannot have settings of its own; layers are 0 to " +
                std::to_string(kMostLayers - 1));
    require(settings != LayerSettings{}, name + " has settings of its own and none is set");
    require(policy.selects(layer),
            name + " selects nothing, so it can have no settings of its own");
    try {
      check_settings(policy.at(layer), scorers);
    } catch (const Error& error) {
      const std::string_view message = error.what();
      require(false, "in " + name + ": " + std::string(message.substr(message.find(": ") + 2)));
    }
  }
}

// Checks one layer's settings against a model's shape.
void check_shape(const Policy& policy, const KvShape& shape, const Scorers& scorers) {
  scorers.at(policy.select).check({shape, policy.select.parameters, policy.bits});
  if (policy.bits == 1 && shape.head_dim % kOneBitUnit != 0) {
    throw Error(ErrorCode::unsupported, "policy: bits=1 is for a head_dim that is a multiple of " +
                                            std::to_string(kOneBitUnit) + "; the model's is " +
                                            std::to_string(shape.head_dim));
  }
  if (policy.compensate == Compensation::values) {
    check_value_tiles(policy.values.bits, shape.head_dim, static_cast<float>(policy.values.pages),
                      policy.values.half);
  }
}

}  // namespace

void validate(const Policy& policy, const Scorers& scorers) {
  check_settings(policy, scorers);
  check_own_settings(policy, scorers);
}

void validate(const Policy& policy, const KvShape& shape, const Scorers& scorers) {
  validate(policy, scorers);
  check_fits("dense", policy.dense_layers, shape.layers);
  check_fits("anchors", policy.anchors, shape.layers);
  check_shape(policy, shape, scorers);
  for (const auto& [layer, settings] : policy.layers) {
    check_fits("a setting of layers", {layer}, shape.layers);
    check_shape(policy.at(layer), shape, scorers);
  }
}

std::span<const Preset> presets() {
  static constexpr std::array<Preset, 15> kPresets = {{
      {"dense", "select=dense", "exact attention to every token: the baseline"},
      {"streaming", "select=streaming sinks=4 recent=1020",
       "the first 4 and the newest 1020 tokens, where they stand (StreamingLLM, Xiao et al. 2023)"},
      {"quest", "select=quest prune=top_k(1024) dense=0,1",
       "1024 tokens by the extreme keys of their sub-pages (Quest, Tang et al. 2024)"},
      {"sparq", "select=sparq prune=top_k(128) recent=32 compensate=mean_value",
       "128 tokens by the query's largest channels (SparQ Attention, Ribar et al. 2023)"},
      {"twilight", "select=quest candidates=1/4 prune=top_p(0.95) dense=0,1",
       "as many of Quest's tokens as carry 95% of the weight (Twilight, Lin et al. 2025)"},
      {"tidaldecode", "select=exact prune=top_k(512) dense=0,1 anchors=2,7 anchors_attend=all",
       "512 tokens that two layers select for all others (TidalDecode, Yang et al. 2024)"},
      {"double_sparsity", "select=double_sparsity prune=top_k(1/16)",
       "a sixteenth of the tokens by the widest channels (Double Sparsity, Yang et al. 2024); CPU"},
      {"snapkv", "select=snapkv prune=top_p(0.9999)",
       "1024 tokens that the prompt's last queries attend to, no others later (SnapKV, Li et al. "
       "2024); CPU"},
      {"h2o", "select=h2o prune=top_p(0.9999)",
       "the newest 512 tokens and the 512 that were attended to most, no others later (H2O, Zhang "
       "et al. 2023); CPU"},
      {"zipvl", "select=dense prefill=zipvl(0.975)",
       "prompts attend to important and near tokens, decoding is dense (ZipVL, He et al. 2024)"},
      {"sluice", "select=sparq candidates=1/16 prune=top_p(0.95) cap=256 compensate=mean_value",
       "SparQ proposes, Twilight's top-p keeps up to 256 tokens, SparQ's mean value compensates"},
      {"values", "select=int4 prune=top_k(64) compensate=values(pages=0.95) bits=3",
       "64 tokens exactly, all others by their keys in 3 bits and their values in 2"},
      {"compact",
       "select=int4 prune=top_k(512) compensate=values(components=half,pages=0.95) bits=2",
       "512 tokens exactly, all others by their keys and half the components of their values, in 2 "
       "bits"},
      {"tiny", "select=int4 prune=top_k(4096) compensate=values(components=half,pages=0.95) bits=1",
       "4096 tokens exactly, all others by their keys in 1 bit and half the components of their "
       "values in 2"},
      {"quantized", "select=int4 prune=none compensate=values(bits=4,pages=1)",
       "keys and values in 4 bits only, no row is fetched (compare KIVI, Liu et al. 2024)"},
  }};
  return kPresets;
}

}  // namespace sluice
