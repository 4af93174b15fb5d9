// A timeline of what an engine computes, operation by operation.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string_view>

namespace sluice {

// The kind of an event; each has its own line in the timeline.
enum class TraceKind : std::uint8_t {
  step,    // a prefill chunk, or a decode step
  layer,   // of a step
  dense,   // products with weights, norms, rotation
  append,  // rows, to the device and to host memory
  index,   // building the key index and value tiles
  scan,    // estimating
  select,
  attend,
  gather,  // rows, by position
  copy,    // between tiers and within them
  sample,
};
inline constexpr int kTraceKinds = 11;

struct TraceEvent {
  std::string_view name;  // lasts as long as the program
  TraceKind kind = TraceKind::step;
  int layer = -1;            // -1: none
  double begin = 0.0;        // microseconds since the trace began
  double duration = 0.0;     // microseconds
  std::uint64_t bytes = 0;   // copied
  std::uint64_t tokens = 0;  // of a step
};

// Collects events. Any number of threads may use one.
class Trace {
 public:
  // Later events are counted and dropped, so that a trace's memory is bounded: 64 MiB, beside all
  // caps.
  static constexpr std::size_t kMostEvents = std::size_t{1} << 20;

  void add(const TraceEvent& event);
  double now() const;  // microseconds since the trace began
  std::size_t events() const;
  std::size_t dropped() const;
  // In Chrome's trace event format, for chrome://tracing and Perfetto, in parts: an event
  // takes some 110 bytes. `to` may not use the trace.
  void write_json(const std::function<void(std::string_view)>& to) const;

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::deque<TraceEvent> events_;
  std::size_t dropped_ = 0;
};

}  // namespace sluice
