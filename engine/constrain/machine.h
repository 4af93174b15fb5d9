// Reads texts of a grammar byte by byte: a pushdown machine, made deterministic as it goes.
//
// A stack is a chain of frames, shared by all stacks that go on alike below. Its top is a frame of
// the text or byte set that comes next; a frame below is a sequence or a repeat, with the part at
// which it goes on. A state is the set of all stacks that the bytes so far may have led to, so an
// ambiguous grammar needs no backtracking. Frames and states have numbers, and every state a row of
// transitions, filled when one is first taken: where a text nests no deeper, reading a byte is a
// look-up. Source: Thompson, "Regular Expression Search Algorithm" (1968), over stacks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/constrain/grammar.h"

namespace sluice::constrain {

using StateId = std::int32_t;
constexpr StateId kDead = -1;

// Not for several threads at a time.
class Machine {
 public:
  // Parts of a grammar that step() may look at before refill() is called again. Above it the
  // grammar is too ambiguous to be followed.
  static constexpr std::int64_t kMostWork = 300'000;
  // Frames of stacks, and states. A stack alone may have most of them, if a text nests deeply.
  static constexpr std::size_t kMostFrames = 200'000;
  static constexpr std::size_t kMostStates = 50'000;

  // `grammar` must be finished and outlive it.
  explicit Machine(const Grammar& grammar);

  StateId start() const { return start_; }
  // The state after one byte more, or kDead. Throws Error{unsupported} if the grammar is too
  // ambiguous.
  StateId step(StateId state, std::uint8_t byte) {
    const StateId next = transition(state, grammar_->class_of(byte));
    return next == kUnknown ? compute(state, byte) : next;
  }
  // Returns true if the bytes so far are a whole text.
  bool is_complete(StateId state) const {
    return states_[static_cast<std::size_t>(state)].complete;
  }
  // Returns true if no byte can follow.
  bool is_final(StateId state) const {
    return states_[static_cast<std::size_t>(state)].tops.empty();
  }
  // Call before every mask and every token.
  void refill() { work_ = 0; }
  // Returns true once so much is remembered that a new machine should take over.
  bool is_full() const {
    return frames_.size() > adopted_ + kMostFrames / 5 || states_.size() > kMostStates / 5;
  }
  // The state of this machine that equals `state` of `other`, which has the same grammar.
  StateId adopt(const Machine& other, StateId state);

 private:
  using FrameId = std::int32_t;
  static constexpr FrameId kBottom = -1;
  static constexpr StateId kUnknown = -2;

  struct Frame {
    FrameId below = kBottom;
    NodeId node = 0;
    std::int32_t at = 0;  // bytes read, the child to enter, or repetitions begun
    bool operator==(const Frame&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Frame& frame) const;
    std::size_t operator()(const std::vector<FrameId>& tops) const;
  };
  struct State {
    std::vector<FrameId> tops;  // ascending; none twice
    bool complete = false;
  };
  // Stacks being continued: an entered node on top of a stack, or a stack whose top has ended.
  struct Pending {
    NodeId node = -1;  // -1: the frame goes on
    FrameId frame = kBottom;
  };

  StateId& transition(StateId state, std::uint8_t byte_class) {
    return transitions_[static_cast<std::size_t>(state) *
                            static_cast<std::size_t>(grammar_->classes()) +
                        byte_class];
  }
  StateId compute(StateId state, std::uint8_t byte);
  FrameId frame(const Frame& frame);
  void enter(NodeId node, FrameId below) { pending_.push_back({node, below}); }
  void go_on(FrameId frame) { pending_.push_back({-1, frame}); }
  // Call before stacks are made pending.
  void reset();
  // Follows all pending stacks to their next bytes, and returns their state.
  StateId settle();
  void enter_now(NodeId node, FrameId below);
  void go_on_now(FrameId frame);
  void repeat(NodeId node, std::int32_t done, FrameId below);
  void sequence(NodeId node, std::int32_t index, FrameId below);
  StateId state_of(std::vector<FrameId> tops, bool complete);

  const Grammar* grammar_;
  std::vector<Frame> frames_;
  std::unordered_map<Frame, FrameId, Hash> frame_ids_;
  std::vector<State> states_;
  std::unordered_map<std::vector<FrameId>, StateId, Hash> state_ids_;  // kBottom: complete
  std::vector<StateId> transitions_;                                   // [states, classes]
  std::int64_t work_ = 0;
  std::size_t adopted_ = 0;  // frames of the states that adopt() took over
  StateId start_ = kDead;

  // Of settle().
  std::vector<Pending> pending_;
  std::unordered_set<Frame, Hash> entered_;
  std::vector<FrameId> tops_;
  bool complete_ = false;
};

}  // namespace sluice::constrain
