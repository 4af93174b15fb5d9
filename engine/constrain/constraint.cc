#include "sluice/constraint.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine/constrain/grammar.h"
#include "engine/constrain/json_schema.h"
#include "engine/constrain/machine.h"
#include "engine/constrain/pattern.h"
#include "engine/constrain/rules.h"
#include "engine/constrain/token_trie.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

using constrain::Grammar;
using constrain::kDead;
using constrain::Machine;
using constrain::NodeId;
using constrain::StateId;
using constrain::TokenTrie;

constexpr std::size_t kMostMasks = 128;
constexpr std::size_t kBits = 64;

using Mask = std::vector<std::uint64_t>;  // a bit per token of the vocabulary

// The tokens whose bytes may follow at `start`: a walk through the trie that passes over all tokens
// whose beginning is refused.
Mask find_mask(Machine& machine, const TokenTrie& trie, StateId start) {
  Mask mask((static_cast<std::size_t>(trie.vocabulary()) + kBits - 1) / kBits);
  std::vector<StateId> path(static_cast<std::size_t>(trie.most_depth()) + 1);  // by depth
  path[0] = start;
  const std::span<const TokenTrie::Node> nodes = trie.nodes();
  for (std::size_t i = 0; i < nodes.size();) {
    const TokenTrie::Node& node = nodes[i];
    const auto depth = static_cast<std::size_t>(node.depth);
    const StateId next = machine.step(path[depth - 1], node.byte);
    if (next == kDead) {
      i = static_cast<std::size_t>(node.after);
      continue;
    }
    path[depth] = next;
    for (const TokenId token : trie.tokens(i)) {
      const auto bit = static_cast<std::size_t>(token);
      mask[bit / kBits] |= std::uint64_t{1} << (bit % kBits);
    }
    ++i;
  }
  return mask;
}

bool has(const Mask& mask, std::size_t token) {
  return (mask[token / kBits] >> (token % kBits) & 1) != 0;
}

void compile_regex(std::string_view pattern, Grammar& grammar) {
  const NodeId body = constrain::compile_pattern(
      pattern, constrain::Match::whole,
      [&](const CodeSet& characters) { return grammar.code_point(characters); }, grammar);
  grammar.finish(body, "pattern: it");
}

}  // namespace

// What has been found about a constraint so far.
struct Constraint::Memory {
  explicit Memory(const Grammar& grammar) : machine(grammar) {}

  Machine machine;
  std::unordered_map<StateId, Mask> masks;
};

struct Constraint::State {
  State(Grammar compiled, std::shared_ptr<const TokenTrie> tokens)
      : grammar(std::move(compiled)),
        trie(std::move(tokens)),
        memory(std::make_shared<Memory>(grammar)) {}

  const Grammar grammar;
  const std::shared_ptr<const TokenTrie> trie;
  std::mutex mutex;                // guards all memories
  std::shared_ptr<Memory> memory;  // the newest; older ones live as long as cursors in them
};

Constraint::Constraint(std::shared_ptr<State> state) : state_(std::move(state)) {}

struct Constraints::Impl {
  struct Kept {
    std::string key;
    Constraint constraint;
  };

  explicit Impl(const Tokenizer& tokenizer) : trie(std::make_shared<TokenTrie>(tokenizer)) {}

  Constraint get(char kind, std::string_view text,
                 const std::function<void(std::string_view, Grammar&)>& compile) {
    const std::string key = kind + std::string(text);
    const std::lock_guard lock(mutex);
    const auto found =
        std::find_if(kept.begin(), kept.end(), [&](const Kept& one) { return one.key == key; });
    if (found != kept.end()) {
      kept.splice(kept.begin(), kept, found);
      return kept.front().constraint;
    }
    Grammar grammar;
    compile(text, grammar);
    auto state = std::make_shared<Constraint::State>(std::move(grammar), trie);
    const Machine& machine = state->memory->machine;
    if (machine.is_final(machine.start())) {
      throw Error(ErrorCode::usage, "the constraint allows no text but the empty one");
    }
    Constraint constraint(std::move(state));
    kept.push_front({key, constraint});
    if (kept.size() > kKept) kept.pop_back();
    return constraint;
  }

  std::shared_ptr<const TokenTrie> trie;
  std::mutex mutex;
  std::list<Kept> kept;  // the latest used first
};

Constraints::Constraints(const Tokenizer& tokenizer) : impl_(std::make_unique<Impl>(tokenizer)) {}
Constraints::Constraints(Constraints&&) noexcept = default;
Constraints& Constraints::operator=(Constraints&&) noexcept = default;
Constraints::~Constraints() = default;

Constraint Constraints::json_object() const {
  return impl_->get(
      'o', {}, [](std::string_view, Grammar& grammar) { constrain::compile_json_object(grammar); });
}

Constraint Constraints::json_schema(std::string_view schema) const {
  return impl_->get('s', schema, constrain::compile_json_schema);
}

Constraint Constraints::regex(std::string_view pattern) const {
  return impl_->get('r', pattern, compile_regex);
}

Constraint Constraints::grammar(std::string_view rules) const {
  return impl_->get('g', rules, constrain::compile_rules);
}

ConstraintCursor::ConstraintCursor(Constraint constraint) : state_(std::move(constraint.state_)) {
  const std::lock_guard lock(state_->mutex);
  memory_ = state_->memory;
  at_ = memory_->machine.start();
}

// Moves to the newest memory, and to a new one before that grows too large.
void ConstraintCursor::renew() {
  if (state_->memory->machine.is_full()) {
    state_->memory = std::make_shared<Constraint::Memory>(state_->grammar);
  }
  if (memory_ == state_->memory) return;
  at_ = state_->memory->machine.adopt(memory_->machine, at_);
  memory_ = state_->memory;
}

void ConstraintCursor::mask(std::span<const TokenId> ends, std::span<float> logits) {
  if (logits.size() != static_cast<std::size_t>(state_->trie->vocabulary())) {
    throw Error(ErrorCode::usage, "a constraint of another tokenizer: its vocabulary has " +
                                      std::to_string(state_->trie->vocabulary()) +
                                      " tokens, the logits " + std::to_string(logits.size()));
  }
  const std::lock_guard lock(state_->mutex);
  renew();
  auto& masks = memory_->masks;
  auto found = masks.find(at_);
  if (found == masks.end()) {
    memory_->machine.refill();
    Mask mask = find_mask(memory_->machine, *state_->trie, at_);
    if (masks.size() >= kMostMasks) masks.clear();
    found = masks.emplace(at_, std::move(mask)).first;
  }
  const bool is_complete = memory_->machine.is_complete(at_);
  for (std::size_t token = 0; token < logits.size(); ++token) {
    const bool is_end =
        std::find(ends.begin(), ends.end(), static_cast<TokenId>(token)) != ends.end();
    const bool may_follow = is_end ? is_complete : has(found->second, token);
    if (!may_follow) logits[token] = -std::numeric_limits<float>::infinity();
  }
}

void ConstraintCursor::take(TokenId token) {
  const std::string_view bytes = state_->trie->bytes(token);
  const std::lock_guard lock(state_->mutex);
  renew();
  memory_->machine.refill();
  StateId next = bytes.empty() ? kDead : at_;
  for (const char byte : bytes) {
    if (next != kDead) next = memory_->machine.step(next, static_cast<std::uint8_t>(byte));
  }
  if (next == kDead) {
    throw Error(ErrorCode::usage,
                "token " + std::to_string(token) + " may not follow under the constraint");
  }
  at_ = next;
}

bool ConstraintCursor::is_complete() const {
  const std::lock_guard lock(state_->mutex);
  return memory_->machine.is_complete(at_);
}

bool ConstraintCursor::is_final() const {
  const std::lock_guard lock(state_->mutex);
  return memory_->machine.is_complete(at_) && memory_->machine.is_final(at_);
}

}  // namespace sluice
