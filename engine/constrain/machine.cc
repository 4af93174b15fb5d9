#include "engine/constrain/machine.h"

#include <algorithm>
#include <utility>

#include "sluice/errors.h"

namespace sluice::constrain {
namespace {

std::size_t mix(std::size_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x9E3779B97F4A7C15ULL + (hash >> 29);
}

// Tops that take as long as a part of the grammar.
constexpr std::int64_t kTopsPerWork = 16;

[[noreturn]] void refuse_ambiguous() {
  throw Error(
      ErrorCode::unsupported,
      "the constraint is too ambiguous or nests too deeply: there are too many ways to go on "
      "at one place; make it simpler");
}

}  // namespace

std::size_t Machine::Hash::operator()(const Frame& frame) const {
  const auto low = static_cast<std::uint32_t>(frame.node);
  const auto high = std::uint64_t{static_cast<std::uint32_t>(frame.below)} << 32;
  return mix(mix(0, low | high), static_cast<std::uint32_t>(frame.at));
}

std::size_t Machine::Hash::operator()(const std::vector<FrameId>& tops) const {
  std::size_t hash = 0;
  for (const FrameId top : tops) hash = mix(hash, static_cast<std::uint32_t>(top));
  return hash;
}

Machine::Machine(const Grammar& grammar) : grammar_(&grammar) {
  enter(grammar.start(), kBottom);
  start_ = settle();
}

Machine::FrameId Machine::frame(const Frame& frame) {
  const auto known = frame_ids_.find(frame);
  if (known != frame_ids_.end()) return known->second;
  if (frames_.size() >= kMostFrames) refuse_ambiguous();
  frames_.push_back(frame);
  const auto id = static_cast<FrameId>(frames_.size() - 1);
  frame_ids_.emplace(frame, id);
  return id;
}

StateId Machine::compute(StateId state, std::uint8_t byte) {
  reset();
  const std::vector<FrameId> tops = states_[static_cast<std::size_t>(state)].tops;
  work_ += std::ssize(tops) / kTopsPerWork;
  for (const FrameId top : tops) {
    const Frame at = frames_[static_cast<std::size_t>(top)];
    const Node& node = grammar_->node(at.node);
    if (node.kind == NodeKind::set) {
      if (grammar_->set_of(node)[byte]) go_on(at.below);
    } else if (grammar_->byte(node, at.at) == byte) {
      if (at.at + 1 < node.count) {
        tops_.push_back(frame({at.below, at.node, at.at + 1}));
      } else {
        go_on(at.below);
      }
    }
  }
  const StateId next = settle();
  transition(state, grammar_->class_of(byte)) = next;
  return next;
}

void Machine::reset() {
  pending_.clear();
  entered_.clear();
  tops_.clear();
  complete_ = false;
}

StateId Machine::settle() {
  while (!pending_.empty()) {
    const Pending next = pending_.back();
    pending_.pop_back();
    if (++work_ > kMostWork) refuse_ambiguous();
    if (next.node >= 0) {
      enter_now(next.node, next.frame);
    } else {
      go_on_now(next.frame);
    }
  }
  std::sort(tops_.begin(), tops_.end());
  tops_.erase(std::unique(tops_.begin(), tops_.end()), tops_.end());
  return state_of(tops_, complete_);
}

void Machine::enter_now(NodeId id, FrameId below) {
  if (!grammar_->ends(id)) return;
  const Node& node = grammar_->node(id);
  switch (node.kind) {
    case NodeKind::bytes:
      if (node.count == 0) return go_on(below);
      tops_.push_back(frame({below, id, 0}));
      return;
    case NodeKind::set:
      tops_.push_back(frame({below, id, 0}));
      return;
    case NodeKind::sequence:
      return sequence(id, 0, below);
    case NodeKind::choice:
    case NodeKind::rule:
      if (!entered_.insert({below, id, -1}).second) return;
      for (const NodeId part : grammar_->children(node)) enter(part, below);
      return;
    case NodeKind::repeat:
      return repeat(id, 0, below);
  }
}

void Machine::go_on_now(FrameId id) {
  if (id == kBottom) {
    complete_ = true;
    return;
  }
  const Frame at = frames_[static_cast<std::size_t>(id)];
  if (grammar_->node(at.node).kind == NodeKind::sequence) {
    sequence(at.node, at.at, at.below);
  } else {
    repeat(at.node, at.at, at.below);
  }
}

// The last part needs no frame of its own, so a rule that ends with itself nests no deeper.
void Machine::sequence(NodeId id, std::int32_t index, FrameId below) {
  const Node& node = grammar_->node(id);
  if (index == node.count) return go_on(below);
  const bool is_last = index + 1 == node.count;
  enter(grammar_->child(node, index), is_last ? below : frame({below, id, index + 1}));
}

// An unbounded repeat counts no further than its least number, so that its states are finite.
void Machine::repeat(NodeId id, std::int32_t done, FrameId below) {
  if (!entered_.insert({below, id, done}).second) return;
  const Node& node = grammar_->node(id);
  if (done >= node.least) go_on(below);
  if (done == node.most) return;
  const std::int32_t begun = node.most == kUnbounded ? std::min(done + 1, node.least) : done + 1;
  enter(grammar_->child(node, 0), frame({below, id, begun}));
}

StateId Machine::state_of(std::vector<FrameId> tops, bool complete) {
  if (tops.empty() && !complete) return kDead;
  std::vector<FrameId> key = tops;
  if (complete) key.push_back(kBottom);
  const auto known = state_ids_.find(key);
  if (known != state_ids_.end()) return known->second;
  if (states_.size() >= kMostStates) refuse_ambiguous();
  state_ids_.emplace(std::move(key), static_cast<StateId>(states_.size()));
  states_.push_back({std::move(tops), complete});
  transitions_.resize(states_.size() * static_cast<std::size_t>(grammar_->classes()), kUnknown);
  return static_cast<StateId>(states_.size() - 1);
}

StateId Machine::adopt(const Machine& other, StateId state) {
  const std::size_t before = frames_.size();
  const State& theirs = other.states_[static_cast<std::size_t>(state)];
  std::unordered_map<FrameId, FrameId> own = {{kBottom, kBottom}};
  const auto take = [&](FrameId top) {
    std::vector<FrameId> chain;
    while (!own.contains(top)) {
      chain.push_back(top);
      top = other.frames_[static_cast<std::size_t>(top)].below;
    }
    FrameId below = own.at(top);
    for (auto id = chain.rbegin(); id != chain.rend(); ++id) {
      const Frame& one = other.frames_[static_cast<std::size_t>(*id)];
      below = own[*id] = frame({below, one.node, one.at});
    }
    return below;
  };
  std::vector<FrameId> tops;
  for (const FrameId top : theirs.tops) tops.push_back(take(top));
  std::sort(tops.begin(), tops.end());
  adopted_ += frames_.size() - before;
  return state_of(std::move(tops), theirs.complete);
}

}  // namespace sluice::constrain
