#include "sluice/trace.h"

#include <array>
#include <new>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

namespace sluice {
namespace {

constexpr std::array<std::string_view, kTraceKinds> kNames = {
    "steps",  "layers", "dense",  "append", "index", "scan",
    "select", "attend", "gather", "copy",   "sample"};

// The event that sets the name or the order of a line of the timeline.
nlohmann::json line_event(std::size_t line, const char* name, nlohmann::json arguments) {
  return {{"ph", "M"}, {"pid", 1}, {"tid", line}, {"name", name}, {"args", std::move(arguments)}};
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

// A name that is not valid UTF-8 is written with replacement characters.
std::string text_of(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

void Trace::add(const TraceEvent& event) {
  const std::lock_guard lock(mutex_);
  bool fits = events_.size() < kMostEvents;
  try {
    if (fits) events_.push_back(event);
  } catch (const std::bad_alloc&) {
    fits = false;  // the event is dropped, because computing has to go on
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

void Trace::write_json(const std::function<void(std::string_view)>& to) const {
  const std::lock_guard lock(mutex_);
  to("{\"traceEvents\":[\n");
  for (std::size_t line = 0; line < kNames.size(); ++line) {
    to(line_event(line, "thread_name", {{"name", kNames.at(line)}}).dump() + ",\n");
    to(line_event(line, "thread_sort_index", {{"sort_index", line}}).dump());
    if (line + 1 < kNames.size() || !events_.empty()) to(",\n");
  }
  for (std::size_t i = 0; i < events_.size(); ++i) {
    to(text_of(json_of(events_[i])) + (i + 1 < events_.size() ? ",\n" : "\n"));
  }
  const nlohmann::json other = {{"dropped_events", dropped_}};
  to("],\"displayTimeUnit\":\"ms\",\"otherData\":" + other.dump() + "}\n");
}

}  // namespace sluice
