#include "tools/bench_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "lib/bytes.h"
#include "tools/eval_report.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

std::string format(const char* pattern, auto... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), pattern, values...);
  return text.data();
}

// An entry of `traffic`, per step.
nlohmann::json moved_json(Tier from, Tier to, Cause cause, const Moved& moved, double steps) {
  return {{"from", to_string(from)},
          {"to", to_string(to)},
          {"cause", to_string(cause)},
          {"rows", static_cast<double>(moved.traffic.rows) / steps},
          {"bytes", static_cast<double>(moved.traffic.bytes) / steps},
          {"requests", static_cast<double>(moved.requests) / steps}};
}

nlohmann::json by_layer_json(const CellResult& result, double steps) {
  nlohmann::json entries = nlohmann::json::array();
  for (const auto& [kind, moved] : result.moved) {
    const auto& [layer, from, to, cause] = kind;
    nlohmann::json entry = moved_json(from, to, cause, moved, steps);
    entry["layer"] = layer;
    entries.push_back(entry);
  }
  return entries;
}

nlohmann::json traffic_json(const CellResult& result, double steps) {
  std::map<std::tuple<Tier, Tier, Cause>, Moved> sums;
  for (const auto& [kind, moved] : result.moved) {
    const auto& [layer, from, to, cause] = kind;
    Moved& sum = sums[{from, to, cause}];
    sum.traffic += moved.traffic;
    sum.requests += moved.requests;
  }
  nlohmann::json entries = nlohmann::json::array();
  for (const auto& [kind, moved] : sums) {
    const auto& [from, to, cause] = kind;
    entries.push_back(moved_json(from, to, cause, moved, steps));
  }
  return entries;
}

// Per step.
nlohmann::json checked_json(const CheckedSteps& checked) {
  const auto steps = static_cast<double>(checked.steps);
  nlohmann::json entries = nlohmann::json::array();
  for (const auto& [movement, traffic] : checked.counted.moved) {
    const auto& [from, to, cause] = movement;
    entries.push_back({{"from", to_string(from)},
                       {"to", to_string(to)},
                       {"cause", to_string(cause)},
                       {"rows", static_cast<double>(traffic.rows) / steps},
                       {"bytes", static_cast<double>(traffic.bytes) / steps}});
  }
  return {{"steps", checked.steps},
          {"counted", entries},
          {"beside_bytes", static_cast<double>(checked.counted.beside) / steps}};
}

nlohmann::json modelled_json(const Bus& bus, const Crossing& crossed, double steps,
                             double step_ms) {
  const double transfer_ms = 1e3 * transfer_seconds(bus, crossed) / steps;
  return {{"bus", bus.name},
          {"transfer_ms", transfer_ms},
          {"step_ms", step_ms + transfer_ms},
          {"overlapped_step_ms", std::max(step_ms, transfer_ms)}};
}

// The rows that were missed, brought in one way. Modelled is the whole step: what crosses besides
// them stays as it is.
nlohmann::json brought_json(const Brought& brought, const CellResult& result,
                            std::span<const Bus> buses, double step_ms) {
  const auto steps = static_cast<double>(brought.seconds.size());
  Crossing crossed = brought.crossed;
  for (const auto& [kind, moved] : result.moved) {
    const auto& [layer, from, to, cause] = kind;
    if (from != to && cause != Cause::miss) crossed += {moved.traffic.bytes, moved.requests};
  }
  nlohmann::json models = nlohmann::json::array();
  for (const Bus& bus : buses) models.push_back(modelled_json(bus, crossed, steps, step_ms));
  return {{"way", brought.way.name},
          {"bytes", static_cast<double>(brought.crossed.bytes) / steps},
          {"requests", static_cast<double>(brought.crossed.requests) / steps},
          {"ms",
           {{"p50", 1e3 * percentile(brought.seconds, 0.5)},
            {"p99", 1e3 * percentile(brought.seconds, 0.99)}}},
          {"modelled", models}};
}

// Without a model a plan has nothing of weights, activations and the process.
nlohmann::json plan_json(const CellResult& result) {
  nlohmann::json plan = nlohmann::json::parse(result.plan.to_json());
  if (!result.kl.empty()) return plan;
  for (const char* const name :
       {"weight_bytes", "activation_bytes", "prompt_bytes", "loading_bytes", "loading_peak_bytes",
        "program_bytes", "thread_bytes", "backend_bytes", "on_device", "dense_is_faster",
        "process_bytes"}) {
    plan.erase(name);
  }
  plan["staging_bytes"] = result.plan.kv.staging_bytes;
  return plan;
}

// A cell's loss in a column: of tokens with a model, of attention's outputs, or none.
std::string loss_of(const nlohmann::json& cell) {
  for (const char* const loss : {"output_error", "kl"}) {
    if (cell.contains(loss)) return format("%8.4f", cell[loss]["mean"].get<double>());
  }
  return format("%8s", "-");
}

bool has_output_errors(const nlohmann::json& cells) {
  return std::any_of(cells.begin(), cells.end(),
                     [](const nlohmann::json& cell) { return cell.contains("output_error"); });
}

nlohmann::json head_json(const CellKey& key, const std::string& line) {
  nlohmann::json cell = json_of(key);
  cell["line"] = line;
  return cell;
}

std::string cap_of(const nlohmann::json& cell) {
  return cell["device_memory"].is_null() ? "none" : cell["device_memory"].get<std::string>();
}

std::size_t policy_width(const nlohmann::json& cells) {
  constexpr std::size_t kLeast = 8;
  constexpr std::size_t kMost = 40;
  std::size_t width = kLeast;
  for (const nlohmann::json& cell : cells) {
    width = std::max(width, cell["policy"].get_ref<const std::string&>().size());
  }
  return std::min(width, kMost);
}

std::string bytes_text(const nlohmann::json& bytes) {
  return format_bytes(static_cast<std::uint64_t>(std::llround(bytes.get<double>())));
}

// What identifies a cell, in columns.
std::string cell_head(const nlohmann::json& cell, std::size_t width) {
  std::string name = cell["policy"];
  name.resize(std::max(width, name.size()), ' ');
  return name + format(" %8lld %9s %4d ",
                       static_cast<long long>(cell["context"].get<std::int64_t>()),
                       cap_of(cell).c_str(), cell["sequences"].get<int>());
}

std::string modelled_columns(const nlohmann::json& models) {
  std::string columns;
  for (const nlohmann::json& model : models) {
    columns += format("  %8.2f %8.2f", model["step_ms"].get<double>(),
                      model["overlapped_step_ms"].get<double>());
  }
  return columns;
}

std::string table_line(const nlohmann::json& cell, std::size_t width) {
  const std::string line = cell_head(cell, width);
  if (cell.contains("error")) {
    return line + " " + cell["error"]["message"].get<std::string>() + "\n";
  }
  const nlohmann::json& ms = cell["step_ms"];
  return line +
         format("%8.2f %8.2f %8.1f %8.2f %10s %10s ", ms["p50"].get<double>(),
                ms["p99"].get<double>(), cell["tokens_per_second"].get<double>(),
                cell["prompt_seconds"].get<double>(), bytes_text(cell["crossed_bytes"]).c_str(),
                bytes_text(cell["index_bytes"]).c_str()) +
         loss_of(cell) + modelled_columns(cell["modelled"]) + "\n";
}

std::string bus_columns(std::size_t buses) {
  std::string columns;
  for (std::size_t i = 1; i <= buses; ++i) {
    const std::string number = std::to_string(i);
    columns += format("  %8s %8s", ("+bus" + number).c_str(), ("|bus" + number).c_str());
  }
  return columns;
}

// The rows that steps missed, by the ways of bringing them; empty if there are none.
std::string transfer_table(const nlohmann::json& cells, std::size_t width, std::size_t buses) {
  std::string lines;
  for (const nlohmann::json& cell : cells) {
    for (const nlohmann::json& transfer : cell.value("transfers", nlohmann::json::array())) {
      lines += cell_head(cell, width) +
               format("%8s %10.1f %10s %8.3f %8.3f", transfer["way"].get<std::string>().c_str(),
                      transfer["requests"].get<double>(), bytes_text(transfer["bytes"]).c_str(),
                      transfer["ms"]["p50"].get<double>(), transfer["ms"]["p99"].get<double>()) +
               modelled_columns(transfer["modelled"]) + "\n";
    }
  }
  if (lines.empty()) return "";
  std::string head = "missed rows";
  head.resize(std::max(width, head.size()), ' ');
  return "\n" + head +
         format(" %8s %9s %4s %8s %10s %10s %8s %8s", "context", "cap", "seqs", "brought",
                "requests", "bytes/step", "ms p50", "ms p99") +
         bus_columns(buses) + "\n" + lines;
}

// Null if the cell has no such estimate.
nlohmann::json member_of(const nlohmann::json& cell, const char* estimate, const char* member) {
  return cell.contains(estimate) ? cell[estimate][member] : nlohmann::json();
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) result += c == '"' ? std::string("\"\"") : std::string(1, c);
  return result + "\"";
}

}  // namespace

double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<std::size_t>(
      std::max(1.0, std::ceil(share * static_cast<double>(values.size()))));
  return values.at(rank - 1);
}

nlohmann::json json_of(const CellKey& key) {
  return {{"policy", key.policy},
          {"context", key.context},
          {"device_memory",
           key.device_memory.empty() ? nlohmann::json() : nlohmann::json(key.device_memory)},
          {"sequences", key.sequences}};
}

nlohmann::json cell_json(const CellKey& key, const std::string& line, const CellResult& result,
                         std::span<const Bus> buses) {
  nlohmann::json cell = head_json(key, line);
  const auto steps = static_cast<double>(result.step_seconds.size());
  const double mean =
      std::accumulate(result.step_seconds.begin(), result.step_seconds.end(), 0.0) / steps;
  const double median = 1e3 * percentile(result.step_seconds, 0.5);
  const Crossing crossed = result.crossed();
  cell["steps"] = result.step_seconds.size();
  cell["step_ms"] = {
      {"mean", 1e3 * mean}, {"p50", median}, {"p99", 1e3 * percentile(result.step_seconds, 0.99)}};
  cell["tokens_per_second"] = key.sequences / mean;
  cell["prompt_seconds"] = result.prompt_seconds;
  if (!result.kl.empty()) {
    cell["kl"] = json_of(estimate_of(result.kl));
    cell["top1_agreement"] = json_of(estimate_of(result.agree));
  }
  if (!result.output_error.empty()) {
    cell["output_error"] = json_of(estimate_of(result.output_error));
    cell["attended_weight"] = json_of(estimate_of(result.attended_weight));
  }
  cell["crossed_bytes"] = static_cast<double>(crossed.bytes) / steps;
  cell["crossed_requests"] = static_cast<double>(crossed.requests) / steps;
  cell["traffic"] = traffic_json(result, steps);
  cell["traffic_by_layer"] = by_layer_json(result, steps);
  if (result.checked) cell["checked"] = checked_json(*result.checked);
  if (!result.brought.empty()) {
    nlohmann::json& transfers = cell["transfers"] = nlohmann::json::array();
    for (const Brought& brought : result.brought) {
      transfers.push_back(brought_json(brought, result, buses, median));
    }
  }
  cell["index_bytes"] = result.plan.kv.index_bytes;
  cell["device_bytes"] = result.plan.kv.device_bytes;
  cell["host_bytes"] = result.plan.kv.host_bytes;
  cell["disk_bytes"] = result.plan.kv.disk_bytes;
  cell["plan"] = plan_json(result);
  nlohmann::json models = nlohmann::json::array();
  for (const Bus& bus : buses) models.push_back(modelled_json(bus, crossed, steps, median));
  cell["modelled"] = models;
  return cell;
}

nlohmann::json cell_json(const CellKey& key, const std::string& line, int exit_code,
                         const std::string& why) {
  nlohmann::json cell = head_json(key, line);
  cell["error"] = {{"exit_code", exit_code}, {"message", with_flags(why)}};
  return cell;
}

std::string bench_table(const nlohmann::json& cells) {
  const std::size_t width = policy_width(cells);
  std::string head = "policy";
  head.resize(width, ' ');
  std::string table = head + format(" %8s %9s %4s %8s %8s %8s %8s %10s %10s %8s", "context", "cap",
                                    "seqs", "ms p50", "ms p99", "token/s", "prompt s", "moved/step",
                                    "index", has_output_errors(cells) ? "error" : "KL");
  std::vector<std::string> buses;
  for (const nlohmann::json& cell : cells) {
    for (const nlohmann::json& model : cell.value("modelled", nlohmann::json::array())) {
      const std::string name = model["bus"];
      if (std::find(buses.begin(), buses.end(), name) == buses.end()) buses.push_back(name);
    }
  }
  table += bus_columns(buses.size());
  table += "\n";
  for (const nlohmann::json& cell : cells) table += table_line(cell, width);
  table += transfer_table(cells, width, buses.size());
  for (std::size_t i = 0; i < buses.size(); ++i) {
    const std::string number = std::to_string(i + 1);
    table += "+bus" + number;
    table += ", |bus" + number;
    table += ": modelled ms of a step with what it moves over " + buses[i];
    table += ", one after the other and at the same time\n";
  }
  return table;
}

std::string bench_csv(const nlohmann::json& cells) {
  std::string csv =
      "policy,context,device_memory,sequences,bus,transfer,steps,step_ms_mean,step_ms_p50,step_ms_"
      "p99,"
      "tokens_per_second,prompt_seconds,kl,kl_error,top1_agreement,output_error,output_error_error,"
      "attended_weight,crossed_bytes,crossed_requests,"
      "index_bytes,device_bytes,host_bytes,disk_bytes,transfer_ms,modelled_step_ms,"
      "modelled_overlapped_step_ms,brought_bytes,brought_requests,brought_ms_p50,brought_ms_p99,"
      "error\n";
  for (const nlohmann::json& cell : cells) {
    const std::string key = quoted(cell["policy"]) + "," + cell["context"].dump() + "," +
                            cap_of(cell) + "," + cell["sequences"].dump();
    if (cell.contains("error")) {
      csv += key + std::string(28, ',') + quoted(cell["error"]["message"]) + "\n";
      continue;
    }
    std::string numbers;
    for (const nlohmann::json& value :
         {cell["steps"], cell["step_ms"]["mean"], cell["step_ms"]["p50"], cell["step_ms"]["p99"],
          cell["tokens_per_second"], cell["prompt_seconds"], member_of(cell, "kl", "mean"),
          member_of(cell, "kl", "standard_error"), member_of(cell, "top1_agreement", "mean"),
          member_of(cell, "output_error", "mean"),
          member_of(cell, "output_error", "standard_error"),
          member_of(cell, "attended_weight", "mean"), cell["crossed_bytes"],
          cell["crossed_requests"], cell["index_bytes"], cell["device_bytes"], cell["host_bytes"],
          cell["disk_bytes"]}) {
      numbers += "," + (value.is_null() ? "" : value.dump());
    }
    const auto add_lines = [&](const nlohmann::json& models, const std::string& way,
                               const std::string& brought) {
      const auto add_line = [&](const std::string& bus, const std::string& times) {
        csv.append(key).append(",").append(bus).append(",").append(way).append(numbers);
        csv.append(times).append(brought).append(",\n");
      };
      for (const nlohmann::json& model : models) {
        std::string times;
        for (const char* const name : {"transfer_ms", "step_ms", "overlapped_step_ms"}) {
          times += "," + model[name].dump();
        }
        add_line(quoted(model["bus"]), times);
      }
      if (models.empty()) add_line("", ",,,");
    };
    add_lines(cell["modelled"], "", ",,,,");
    for (const nlohmann::json& transfer : cell.value("transfers", nlohmann::json::array())) {
      std::string brought;
      for (const nlohmann::json& value : {transfer["bytes"], transfer["requests"],
                                          transfer["ms"]["p50"], transfer["ms"]["p99"]}) {
        brought += "," + value.dump();
      }
      add_lines(transfer["modelled"], transfer["way"], brought);
    }
  }
  return csv;
}

}  // namespace sluice::tools
