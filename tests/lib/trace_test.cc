#include "sluice/trace.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace sluice {
namespace {

nlohmann::json json_of(const Trace& trace) {
  std::string text;
  trace.write_json([&](std::string_view piece) { text += piece; });
  return nlohmann::json::parse(text);
}

TEST(Trace, WithoutEventsNamesItsLines) {
  EXPECT_EQ(json_of(Trace())["traceEvents"].size(), 2u * kTraceKinds);
}

TEST(Trace, IsWhatChromeReads) {
  Trace trace;
  trace.add({"scan", TraceKind::scan, 3, 10.0, 2.5, 0, 0});
  trace.add({"copy", TraceKind::copy, -1, 13.0, 1.0, 4096, 0});
  trace.add({"decode", TraceKind::step, -1, 0.0, 20.0, 0, 2});
  const nlohmann::json root = json_of(trace);
  std::vector<nlohmann::json> events;
  int named_lines = 0;
  for (const nlohmann::json& event : root["traceEvents"]) {
    if (event["ph"] == "X") events.push_back(event);
    if (event["name"] == "thread_name") ++named_lines;
  }
  EXPECT_EQ(named_lines, kTraceKinds);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["name"], "scan");
  EXPECT_EQ(events[0]["ts"], 10.0);
  EXPECT_EQ(events[0]["dur"], 2.5);
  EXPECT_EQ(events[0]["args"], nlohmann::json({{"layer", 3}}));
  EXPECT_EQ(events[1]["args"], nlohmann::json({{"bytes", 4096}}));
  EXPECT_EQ(events[2]["args"], nlohmann::json({{"tokens", 2}}));
  // Each kind has a line of its own.
  EXPECT_NE(events[0]["tid"], events[1]["tid"]);
}

TEST(Trace, CountsWhatItDrops) {
  Trace trace;
  for (std::size_t i = 0; i < Trace::kMostEvents + 5; ++i) trace.add({});
  EXPECT_EQ(trace.events(), Trace::kMostEvents);
  EXPECT_EQ(trace.dropped(), 5u);
}

TEST(Trace, TakesEventsOfManyThreads) {
  Trace trace;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int event = 0; event < 1000; ++event) trace.add({});
      });
    }
  }
  EXPECT_EQ(trace.events(), 4000u);
}

}  // namespace
}  // namespace sluice
