// A policy says which tokens a decoded token attends to, and which a prompt's tokens do.
//
// A selector estimates the attention weight of every token without reading its row; a pruner keeps
// the few that matter; layers may share one selection; what is dropped may be compensated for.
// One line of text describes it all:
//
//   select=sparq(r=16) candidates=1/16 prune=top_p(0.95) cap=256 compensate=mean_value
//   twilight dense=0,1 anchors=2,7
//   values 1,2,3:prune=top_k(4) 0:compensate=values(bits=3)
//
// Words are separated by spaces; the first may be the name of a preset, whose settings the others
// replace. prune, cap, compensate and bits may differ from layer to layer: a word that begins with
// layers is about these alone.
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

// Numbers by their names.
using Parameters = std::map<std::string, double>;

// How the weights of tokens are estimated: a scorer by its name, and its parameters. Sluice's own:
//
//   dense       not at all: exact attention over every row
//   streaming   the first and the newest tokens (Xiao et al. 2023, StreamingLLM), at the positions
//               that they have in the text; the paper counts positions within its cache
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

// What is kept of the estimated tokens.
enum class Pruner : std::uint8_t {
  top_k,  // the k heaviest by their weight summed over the query heads of a KV head
  top_p,  // per query head the fewest that carry a share p of the weight; then their union
  none,   // nothing: only what is always kept; all else is compensated for
};

// What stands for the rows that were dropped.
enum class Compensation : std::uint8_t {
  none,
  mean_value,  // (1 - alpha) times the mean of all values (SparQ, section 4)
  values,      // their values in a few bits, each with its estimated weight
};

// Of Compensation::values.
struct ValueBits {
  int bits = 2;        // per channel of a value: 2, 3 or 4
  double pages = 0.9;  // the fewest pages that carry this share of what was dropped are read; the
                       // mean of all values stands for the rest

  friend bool operator==(const ValueBits&, const ValueBits&) = default;
};

// A number of tokens: fixed, or a share of the context.
struct Budget {
  std::int64_t tokens = 0;   // if > 0
  std::int64_t divisor = 0;  // else context / divisor, rounded up, if > 0; else no limit

  bool limited() const { return tokens > 0 || divisor > 0; }
  // Never more than `context`; all of it without a limit.
  std::int64_t of(std::int64_t context) const;
  friend bool operator==(const Budget&, const Budget&) = default;
};

// How a prompt's tokens attend to some of it only: by ZipVL (He et al. 2024) to its important
// tokens, or to the pages that a block of queries looks at, see lib/backend/page_ops.h.
struct SparsePrefill {
  double tau = 0.0;  // share of the probes' attention that the important tokens carry; 0: dense
  // The paper: the other tokens attend to nothing, and nothing attends to them again; their rows
  // stay in memory. What follows has to be decode steps or prefills that evict, too. Else every
  // token attends to the important ones and to its own block of 512, and may be attended later.
  bool evict = false;
  double pages = 0.0;  // share of the weight, as means estimate it, that listed pages carry; 0: all

  bool dense() const { return tau == 0.0 && pages == 0.0; }
  friend bool operator==(const SparsePrefill&, const SparsePrefill&) = default;
};

// What a layer that selects does otherwise than the policy says; what is not set is as there.
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

  friend bool operator==(const LayerSettings&, const LayerSettings&) = default;
};

struct Policy {
  Method select;
  int bits = 4;       // per key channel in the index: 4, 3 or 2
  Budget candidates;  // if limited: as many by the selector, scored again by the whole index
  Pruner prune = Pruner::top_k;
  Budget k;                 // of top_k
  double p = 0.0;           // of top_p
  Budget cap;               // most tokens kept by top_p, per KV head
  std::int64_t sinks = 0;   // first tokens, always kept
  std::int64_t recent = 0;  // newest tokens, always kept; the unfinished page always is
  Compensation compensate = Compensation::none;
  ValueBits values;               // of compensate=values
  std::vector<int> dense_layers;  // attend to everything; ascending
  // If not empty: only these layers select, and every later layer up to the next of them reuses
  // the selection, KV head by KV head (Yang et al. 2024, TidalDecode); ascending.
  std::vector<int> anchors;
  bool dense_anchors = false;  // they attend to everything themselves, as the paper's do
  std::int64_t correct = 0;    // recompute the last T decoded tokens densely, every T; 0: never
  SparsePrefill prefill;
  std::map<int, LayerSettings> layers;  // those that differ

  friend bool operator==(const Policy&, const Policy&) = default;

  // The policy as this layer has it; its `layers` are empty.
  Policy at(int layer) const;

  // What a layer does: it may attend to everything, it may select, for itself and for those that
  // follow it, or both; else it follows the latest layer that selects.
  bool is_dense(int layer) const;
  bool selects(int layer) const;
  // Whether what a layer leaves out is compensated for so.
  bool compensates(int layer, Compensation by) const;
};

// Scorers that there are unless others are named.
const Scorers& own_scorers();

// Throws Error{usage} naming the setting and the accepted range if the policy makes no sense by
// itself (the first) or for this model (the second); Error{unsupported} for compensate=values where
// head_dim is no multiple of 4.
void validate(const Policy& policy, const Scorers& scorers = own_scorers());
void validate(const Policy& policy, const KvShape& shape, const Scorers& scorers = own_scorers());

// Reads one line, see above. Throws Error{usage} with what would be accepted. Does not validate
// against a model, but everything else.
Policy parse_policy(std::string_view text, const Scorers& scorers = own_scorers());
// Settings, none of them a preset, that replace those of `base`; possibly none at all.
Policy change_policy(const Policy& base, std::string_view settings,
                     const Scorers& scorers = own_scorers());
// The shortest line that parse_policy reads back as the same policy, without presets' names.
std::string to_string(const Policy& policy);
// One JSON object with the same words as keys, without those that to_string leaves out. Numbers and
// lists of layers are JSON's; what else a value may be is a string:
// {"prune":"top_p(0.9)","cap":256}.
std::string to_json(const Policy& policy);
// Reads that back. Throws as parse_policy does, and refuses keys that are unknown or stand twice.
Policy policy_from_json(std::string_view json, const Scorers& scorers = own_scorers());

// A setting of a policy line: key=value.
struct PolicySetting {
  std::string_view key;
  std::string_view meaning;
  std::string accepted;   // values, in words
  bool by_layer = false;  // LAYERS:key=value may be given, too
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
