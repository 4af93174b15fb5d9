// A policy decides which tokens a decoded token attends to, and which a prompt's tokens attend to.
//
// A selector estimates the attention weight of every token without reading its row; a pruner keeps
// the few that matter; layers may share one selection; dropped tokens may be compensated for. One
// line of text describes a policy:
//
//   select=sparq(r=16) candidates=1/16 prune=top_p(0.95) cap=256 compensate=mean_value
//   twilight dense=0,1 anchors=2,7
//   values 1,2,3:prune=top_k(4) 0:compensate=values(bits=3)
//
// Words are separated by spaces; the first may name a preset, whose settings the others replace.
// prune, cap, compensate, bits and early may differ from layer to layer: a word that begins with a
// list of layers sets them for these layers only.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/types.h"

namespace sluice {

class Scorers;  // see sluice/scorer.h

// Numbers by name.
using Parameters = std::map<std::string, double>;

// The estimate of token weights: a scorer's name and its parameters. Sluice's own scorers:
//
//   dense       no estimate: exact attention over every row
//   streaming   the first and the newest tokens (Xiao et al. 2023, StreamingLLM), at their
//               positions in the text; the paper counts positions within its cache
//   exact       from the keys themselves: the oracle that the others approach
//   int4        from the key index, every channel of it (Twilight's estimate, Lin et al. 2025)
//   quest       upper bounds from each sub-page's extreme keys (Tang et al. 2024, Quest)
//   sparq(r=N)  from the key index, the query's N largest channels per KV head only (Ribar et al.
//               2023, SparQ); without r, a quarter of head_dim
struct Method {
  std::string name = "dense";
  Parameters parameters;

  friend bool operator==(const Method&, const Method&) = default;
};
// "sparq(r=16)".
std::string to_string(const Method& method);

// The rule that keeps some of the estimated tokens.
enum class Pruner : std::uint8_t {
  top_k,  // the k heaviest by their weight summed over the query heads of a KV head
  top_p,  // per query head the fewest that carry a share p of the weight; then their union
  none,   // only the tokens that are always kept; all others are compensated for
};

// The substitute for dropped rows.
enum class Compensation : std::uint8_t {
  none,
  mean_value,  // (1 - alpha) times the mean of all values (SparQ, section 4)
  values,      // their quantised values, each with its estimated weight
};

// Settings of Compensation::values.
struct ValueBits {
  int bits = 2;        // per channel of a value: 1 to 4
  double pages = 0.9;  // reads the fewest pages that carry this share of the dropped weight; the
                       // mean of all values stands for the rest
  // Keeps head_dim / 2 numbers per value: its largest principal components, by the weights of the
  // model's value projection. Engine knows them; KvCache takes KvConfig::value_basis.
  bool half = false;

  friend bool operator==(const ValueBits&, const ValueBits&) = default;
};

// The hidden state from which a layer's query is estimated to choose its rows before the layer's
// turn, so that they are fetched meanwhile. Attention to these rows, and the weights of value
// tiles, use the layer's own query, so nothing has to be verified or fetched again.
enum class Early : std::uint8_t {
  none,   // the layer's own
  half,   // the one before the previous layer's feed-forward part: half a layer early
  layer,  // the previous layer's input: a whole layer early
};

// A number of tokens: fixed, or a share of the context.
struct Budget {
  std::int64_t tokens = 0;   // fixed, if > 0
  std::int64_t divisor = 0;  // else context / divisor, rounded up, if > 0; else no limit

  bool limited() const { return tokens > 0 || divisor > 0; }
  // At most `context`; `context` without a limit.
  std::int64_t of(std::int64_t context) const;
  friend bool operator==(const Budget&, const Budget&) = default;
};

// Sparse prefill: a prompt's tokens attend to its important tokens only (ZipVL, He et al. 2024), or
// to the pages that a block of queries chooses, see lib/backend/page_ops.h.
struct SparsePrefill {
  double tau = 0.0;  // share of the probes' attention that the important tokens carry; 0: dense
  // True, as in the paper: the other tokens attend to nothing and are never attended again; each
  // layer frees the rows that it did not choose, while the prompt is being computed. False: every
  // token attends to the important ones and to its own block of 512, and may be attended later.
  bool evict = false;
  double pages = 0.0;  // share of the weight, estimated by means, that listed pages carry; 0: all

  bool dense() const { return tau == 0.0 && pages == 0.0; }
  friend bool operator==(const SparsePrefill&, const SparsePrefill&) = default;
};

// Settings of one selecting layer that replace the policy's; unset ones are the policy's.
struct LayerSettings {
  struct Pruning {
    Pruner prune = Pruner::top_k;
    Budget k;
    double p = 0.0;
    friend bool operator==(const Pruning&, const Pruning&) = default;
  };
  struct Compensating {
    Compensation by = Compensation::none;
    ValueBits values;
    friend bool operator==(const Compensating&, const Compensating&) = default;
  };
  std::optional<Pruning> prune;
  std::optional<Budget> cap;
  std::optional<Compensating> compensate;
  std::optional<int> bits;
  std::optional<Early> early;

  friend bool operator==(const LayerSettings&, const LayerSettings&) = default;
};

struct Policy {
  Method select;
  int bits = 4;       // per key channel in the index: 4, 3, 2 or 1
  Budget candidates;  // if limited: the selector proposes this many, the whole index rescores them
  Pruner prune = Pruner::top_k;
  Budget k;                 // of top_k
  double p = 0.0;           // of top_p
  Budget cap;               // most tokens kept by top_p, per KV head
  std::int64_t sinks = 0;   // first tokens, always kept
  std::int64_t recent = 0;  // newest tokens, always kept; so is the unfinished page
  Compensation compensate = Compensation::none;
  ValueBits values;               // of compensate=values
  std::vector<int> dense_layers;  // attend to everything; ascending
  // If not empty: only these layers select, and every later layer up to the next of them reuses
  // the selection, KV head by KV head (Yang et al. 2024, TidalDecode); ascending.
  std::vector<int> anchors;
  bool dense_anchors = false;  // anchors attend to everything themselves, as in the paper
  std::int64_t correct = 0;    // recompute the last T decoded tokens densely, every T; 0: never
  SparsePrefill prefill;
  Early early = Early::none;            // of decode steps; see early_at()
  std::map<int, LayerSettings> layers;  // only layers that differ

  friend bool operator==(const Policy&, const Policy&) = default;

  // The policy of one layer; its `layers` are empty.
  Policy at(int layer) const;

  // A layer may attend to everything, select for itself and its followers, or both; else it follows
  // the latest layer that selects.
  bool is_dense(int layer) const;
  bool selects(int layer) const;
  // Returns true if `layer` compensates for dropped tokens in this way.
  bool compensates(int layer, Compensation by) const;

  // How early `layer` decides which rows it attends to. Never early: the first layer, dense layers,
  // and layers that keep no estimated token. Early::layer counts as Early::half in layers below 3,
  // whose inputs say little about the next layer's query, and where layers share selections. A
  // follower knows its rows from its anchor and loses nothing.
  Early early_at(int layer) const;
  // True if some layer of a model of `layers` layers decides this early.
  bool any_early(int layers, Early how) const;
};

// The default scorers.
const Scorers& own_scorers();

// Throws Error{usage} naming the setting and the accepted range if the policy makes no sense by
// itself (the first) or for this model (the second); Error{unsupported} for compensate=values if
// head_dim is not a multiple of 4.
void validate(const Policy& policy, const Scorers& scorers = own_scorers());
void validate(const Policy& policy, const KvShape& shape, const Scorers& scorers = own_scorers());

// Parses one line, see above. Throws Error{usage} that names the accepted values. Validates
// everything except against a model.
Policy parse_policy(std::string_view text, const Scorers& scorers = own_scorers());
// Replaces settings of `base`; `settings` may be empty and names no preset.
Policy change_policy(const Policy& base, std::string_view settings,
                     const Scorers& scorers = own_scorers());
// The shortest line without preset names that parse_policy reads back as the same policy.
std::string to_string(const Policy& policy);
// One JSON object with the same keys as to_string. Numbers and lists of layers are JSON numbers and
// arrays; every other value is a string:
// {"prune":"top_p(0.9)","cap":256}.
std::string to_json(const Policy& policy);
// Parses to_json's output. Throws as parse_policy does; refuses unknown and duplicate keys.
Policy policy_from_json(std::string_view json, const Scorers& scorers = own_scorers());

// A setting of a policy line: key=value.
struct PolicySetting {
  std::string_view key;
  std::string_view meaning;
  std::string accepted;   // values, in words
  bool by_layer = false;  // accepts LAYERS:key=value, too
};
std::vector<PolicySetting> policy_settings(const Scorers& scorers = own_scorers());

// A policy with a name.
struct Preset {
  std::string_view name;
  std::string_view policy;       // as text
  std::string_view description;  // one line
};
std::span<const Preset> presets();

}  // namespace sluice
