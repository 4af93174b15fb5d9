#include "sluice/trace.h"

#include <array>
#include <new>
#include <nlohmann/json.hpp>
#include <string_view>

namespace sluice {
namespace {

constexpr std::array<std::string_view, kTraceKinds> kNames = {
    "steps",  "layers", "dense",  "append", "index", "scan",
    "select", "attend", "gather", "copy",   "sample"};

// Names a line of the timeline, and says where it stands.
void add_line(nlohmann::json& events, std::size_t line) {
  events.push_back({{"ph", "M"},
                    {"pid", 1},
                    {"tid", line},
                    {"name", "thread_name"},
                    {"args", {{"name", kNames.at(line)}}}});
  events.push_back({{"ph", "M"},
                    {"pid", 1},
                    {"tid", line},
                    {"name", "thread_sort_index"},
                    {"args", {{"sort_index", line}}}});
}

nlohmann::json json_of(const TraceEvent& event) {
  nlohmann::json arguments = nlohmann::json::object();
  if (event.layer >= 0) arguments["layer"] = event.layer;
  if (event.bytes > 0) arguments["bytes"] = event.bytes;
  if (event.tokens > 0) arguments["tokens"] = event.tokens;
  const auto line = static_cast<std::size_t>(event.kind);
  return {{"ph", "X"},
          {"pid", 1},
          {"tid", line},
          {"name", event.name},
          {"cat", kNames.at(line)},
          {"ts", event.begin},
          {"dur", event.duration},
          {"args", std::move(arguments)}};
}

}  // namespace

void Trace::add(const TraceEvent& event) {
  const std::lock_guard lock(mutex_);
  bool fits = events_.size() < kMostEvents;
  try {
    if (fits) events_.push_back(event);
  } catch (const std::bad_alloc&) {
    fits = false;  // who computes goes on
  }
  if (!fits) ++dropped_;
}

double Trace::now() const {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start_)
      .count();
}

std::size_t Trace::events() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

std::size_t Trace::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

std::string Trace::to_json() const {
  const std::lock_guard lock(mutex_);
  nlohmann::json events = nlohmann::json::array();
  for (std::size_t line = 0; line < kNames.size(); ++line) add_line(events, line);
  for (const TraceEvent& event : events_) events.push_back(json_of(event));
  const nlohmann::json root = {{"traceEvents", std::move(events)},
                               {"displayTimeUnit", "ms"},
                               {"otherData", {{"dropped_events", dropped_}}}};
  return root.dump();
}

}  // namespace sluice
