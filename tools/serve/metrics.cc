#include "tools/serve/metrics.h"

#include "lib/text.h"

namespace sluice::tools {
namespace {

class Page {
 public:
  void head(const std::string& name, const char* type, const char* help) {
    text_ += "# HELP sluice_" + name + " " + help + "\n# TYPE sluice_" + name + " " + type + "\n";
  }
  template <typename T>
  void value(const std::string& name, T value, const std::string& labels = {}) {
    text_ +=
        "sluice_" + name + (labels.empty() ? "" : "{" + labels + "}") + " " + digits(value) + "\n";
  }
  template <typename T>
  void single(const std::string& name, const char* type, T number, const char* help) {
    head(name, type, help);
    value(name, number);
  }
  void histogram(const std::string& name, const Histogram& histogram, const char* help) {
    head(name, "histogram", help);
    std::uint64_t below = 0;
    for (std::size_t i = 0; i < histogram.bounds.size(); ++i) {
      below += histogram.counts[i];
      value(name + "_bucket", below, "le=\"" + digits(histogram.bounds[i]) + "\"");
    }
    value(name + "_bucket", histogram.count, "le=\"+Inf\"");
    value(name + "_sum", histogram.sum);
    value(name + "_count", histogram.count);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

std::string quoted(const char* label, std::string_view value) {
  return std::string(label) + "=\"" + std::string(value) + "\"";
}

// Share of the rows read by decoding attention that were on the device.
double hit_rate(const BatcherStats& stats) {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  for (const TierTraffic& one : stats.traffic) {
    if (one.phase != Phase::decode) continue;
    if (one.cause == Cause::hit) hits += one.traffic.rows;
    if (one.cause == Cause::miss) misses += one.traffic.rows;
  }
  const std::uint64_t all = hits + misses;
  return all == 0 ? 0.0 : static_cast<double>(hits) / static_cast<double>(all);
}

}  // namespace

std::string metrics_text(const BatcherStats& stats, const MemoryUse& memory) {
  Page page;
  page.single("requests_total", "counter", stats.submitted, "Requests that were accepted.");
  page.single("requests_refused_total", "counter", stats.refused, "Requests that were refused.");
  page.single("requests_failed_total", "counter", stats.failed, "Requests that an error ended.");
  page.head("answers_total", "counter", "Answers that ended, by reason.");
  for (std::size_t i = 0; i < stats.finished.size(); ++i) {
    page.value("answers_total", stats.finished[i],
               quoted("reason", to_string(static_cast<FinishReason>(i))));
  }
  page.single("prompt_tokens_total", "counter", stats.prompt_tokens, "Prompt tokens computed.");
  page.single("reused_tokens_total", "counter", stats.reused_tokens,
              "Prompt tokens found in other sequences.");
  page.single("answer_tokens_total", "counter", stats.answer_tokens, "Tokens drawn.");
  page.single("preemptions_total", "counter", stats.preemptions, "Sequences that gave way.");
  page.single("steps_total", "counter", stats.steps, "Decode steps.");
  page.single("drafts_total", "counter", stats.drafted, "Tokens guessed and verified.");
  page.single("accepted_drafts_total", "counter", stats.accepted, "Guesses that were right.");
  page.single("queue_length", "gauge", stats.queued, "Sequences that wait.");
  page.single("running", "gauge", stats.running, "Sequences that run.");
  page.single("cached_sequences", "gauge", stats.cached, "Finished sequences kept.");
  page.single("free_tokens", "gauge", stats.free_tokens, "Tokens of free blocks.");
  page.single("planned_tokens", "gauge", stats.planned_tokens, "Tokens of all blocks.");
  page.single("hit_rate", "gauge", hit_rate(stats), "Share of decoded rows on the device.");
  page.single("device_bytes", "gauge", memory.device_bytes, "Bytes in use on the device.");
  page.single("host_bytes", "gauge", memory.host_bytes, "Bytes in use in host memory.");
  page.head("moved_bytes_total", "counter", "Bytes moved or read, by phase, tiers and cause.");
  for (const TierTraffic& one : stats.traffic) {
    page.value("moved_bytes_total", one.traffic.bytes,
               quoted("phase", to_string(one.phase)) + "," + quoted("from", to_string(one.from)) +
                   "," + quoted("to", to_string(one.to)) + "," +
                   quoted("cause", to_string(one.cause)));
  }
  page.histogram("queue_seconds", stats.queue_seconds, "Wait until admission.");
  page.histogram("first_token_seconds", stats.first_token_seconds, "Time to first token.");
  page.histogram("output_token_seconds", stats.output_token_seconds, "Time per output token.");
  page.histogram("step_seconds", stats.step_seconds, "Time of a decode step.");
  return page.take();
}

nlohmann::json stats_json(const BatcherStats& stats, const MemoryUse& memory) {
  nlohmann::json sequences = nlohmann::json::array();
  for (const SequenceInfo& one : stats.sequences) {
    sequences.push_back({{"request", one.request},
                         {"choice", one.choice},
                         {"prompt_tokens", one.prompt_tokens},
                         {"tokens", one.tokens},
                         {"answer_tokens", one.answer_tokens},
                         {"state", one.decodes ? "decode" : "prefill"},
                         {"priority", one.priority}});
  }
  nlohmann::json traffic = nlohmann::json::array();
  for (const TierTraffic& one : stats.traffic) {
    traffic.push_back({{"phase", to_string(one.phase)},
                       {"from", to_string(one.from)},
                       {"to", to_string(one.to)},
                       {"cause", to_string(one.cause)},
                       {"rows", one.traffic.rows},
                       {"bytes", one.traffic.bytes}});
  }
  return {{"queued", stats.queued},
          {"running", stats.running},
          {"cached", stats.cached},
          {"free_tokens", stats.free_tokens},
          {"planned_tokens", stats.planned_tokens},
          {"answer_tokens", stats.answer_tokens},
          {"prompt_tokens", stats.prompt_tokens},
          {"reused_tokens", stats.reused_tokens},
          {"preemptions", stats.preemptions},
          {"hit_rate", hit_rate(stats)},
          {"device_bytes", memory.device_bytes},
          {"host_bytes", memory.host_bytes},
          {"sequences", sequences},
          {"traffic", traffic}};
}

}  // namespace sluice::tools
