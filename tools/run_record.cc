#include "tools/run_record.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <utility>

#include "engine/checkpoint.h"
#include "engine/fingerprint.h"
#include "io/checksum.h"
#include "io/file.h"
#include "io/json.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/topology.h"
#include "sluice/version.h"
#include "tools/eval_tasks.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr std::uint64_t kMostReport = std::uint64_t{256} << 20;
constexpr std::size_t kMostParts = std::size_t{64} << 20;
constexpr int kWriteShare = 19;  // time between two writes of parts, as a multiple of a write

nlohmann::json machine_here(const std::string& device) {
  const Topology topology = detect_topology();
  nlohmann::json machine = {{"processor", topology.processor},
                            {"instruction_sets", topology.instruction_sets},
                            {"cores", topology.usable_cores},
                            {"threads", topology.threads},
                            {"memory_bytes", topology.memory_bytes}};
  if (device.starts_with("cuda")) {
    const DeviceTopology gpu = detect_device(device);
    machine["gpu"] = gpu.description;
    machine["gpu_memory_bytes"] = gpu.memory_bytes;
  }
  return machine;
}

std::string checksum_text(const std::string& bytes) {
  return fingerprint_text(checksum_of(std::as_bytes(std::span(bytes))));
}

std::string checksum_of_file(const std::string& path) {
  return checksum_text(read_text_file(path, kMaxTextBytes));
}

nlohmann::json checksums_of(const std::vector<std::string>& files) {
  nlohmann::json checksums = nlohmann::json::array();
  for (const std::string& file : files) checksums.push_back(checksum_of_file(file));
  return checksums;
}

nlohmann::json checkpoint_of(const std::string& model) {
  if (model.empty()) return nullptr;
  return fingerprint_text(fingerprint_of(Checkpoint::open(model)));
}

// Tells a report that was edited or cut.
std::string checksum_of_results(const nlohmann::json& results, const nlohmann::json& unfinished) {
  return checksum_text(dump_json(results) + (unfinished.is_null() ? "" : dump_json(unfinished)));
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

// The command without what does not change its results.
std::vector<std::string> essential(const std::vector<std::string>& arguments) {
  std::vector<std::string> kept;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--resume" || argument == "--force" || argument.starts_with("--json=")) {
      continue;
    }
    if (argument == "--json") {
      ++i;
      continue;
    }
    kept.push_back(argument);
  }
  return kept;
}

std::string line_of(const std::vector<std::string>& arguments) {
  std::string line = "sluice";
  for (const std::string& argument : arguments) {
    const bool plain = argument.find_first_of(" '\"()*$&|;<>") == std::string::npos;
    line += plain ? " " + argument : " '" + argument + "'";
  }
  return line;
}

[[noreturn]] void refuse_report(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::usage, path + ": " + why + "; leave out --resume, or choose another file");
}

// Text that two runs must share, from their records; a missing member is empty.
std::string shared_text(const nlohmann::json& record, const std::string& name) {
  return record.contains(name) ? dump_json(record[name]) : "";
}

void require_same_run(const std::string& path, const nlohmann::json& before,
                      const nlohmann::json& now) {
  if (shared_text(before, "command") != shared_text(now, "command")) {
    std::vector<std::string> arguments;
    if (before.contains("command") && before["command"].is_array()) {
      for (const nlohmann::json& argument : before["command"]) {
        if (argument.is_string()) arguments.push_back(argument.get<std::string>());
      }
    }
    refuse_report(path, "is the report of another command (" + in_quotes(line_of(arguments)) + ")");
  }
  for (const char* const what :
       {"another version", "another commit", "another machine", "another checkpoint",
        "other scorers", "another text", "other data", "other arrays", "other positions",
        "another shape", "another plan", "other policies"}) {
    const std::string name = std::strchr(what, ' ') + 1;
    const std::string own = shared_text(now, name);
    const std::string other = shared_text(before, name);
    if (own == other) continue;
    refuse_report(path, "is the report of " + std::string(what) + " (" + in_quotes(other) +
                            ", not " + in_quotes(own) + ")");
  }
}

}  // namespace

std::string fingerprint_text(std::uint64_t fingerprint) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(fingerprint));
  return text.data();
}

std::vector<std::string> command_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < bytes.size();) {
    const std::size_t end = std::min(bytes.find('\0', begin), bytes.size());
    arguments.push_back(bytes.substr(begin, end - begin));
    begin = end + 1;
  }
  if (!arguments.empty()) arguments.erase(arguments.begin());
  return arguments;
}

nlohmann::json run_record(const ModelFlags& model, const std::string& text,
                          const std::vector<std::string>& data) {
  const std::string_view commit = source_commit();
  nlohmann::json record = {
      {"version", kVersion},
      {"commit", commit.empty() ? nlohmann::json() : nlohmann::json(commit)},
      {"command", essential(command_arguments())},
      {"device", model.device},
      {"machine", machine_here(model.device)},
      {"checkpoint", checkpoint_of(model.model)},
      {"scorers", checksums_of(model.scorers)},
      {"text", text.empty() ? nlohmann::json() : nlohmann::json(checksum_of_file(text))},
      {"start", utc_now()}};
  if (!data.empty()) record["data"] = checksums_of(data);
  if (!model.plan.empty()) record["plan"] = checksum_of_file(model.plan);
  return record;
}

void require_resumable(bool resumes, const std::string& path) {
  if (!resumes || (!path.empty() && path != "-")) return;
  throw Error(ErrorCode::usage, "--resume completes the report of --json FILE; give that, too");
}

GrowingReport::GrowingReport(std::string path, bool force, bool resumes, nlohmann::json head)
    : path_(std::move(path)), force_(force), head_(std::move(head)) {
  std::error_code ignored;
  if (!resumes || !grows() || !std::filesystem::exists(path_, ignored)) return;
  const nlohmann::json before = read_json_file(path_, kMostReport, "begin another report");
  if (!before.is_object() || !before.contains("run") || !before["run"].is_object() ||
      !before.contains("results") || !before["results"].is_array()) {
    throw Error(ErrorCode::corrupt,
                path_ +
                    ": is no report that --resume can complete; leave it out, or choose "
                    "another file");
  }
  require_same_run(path_, before["run"], head_["run"]);
  const nlohmann::json unfinished = before.value("unfinished", nlohmann::json());
  if (before.value("checksum", nlohmann::json()) !=
      checksum_of_results(before["results"], unfinished)) {
    throw Error(ErrorCode::corrupt, path_ +
                                        ": its results were changed after they were written; "
                                        "leave out --resume to measure them again");
  }
  head_["run"]["start"] = before["run"].value("start", "");
  results_ = before["results"];
  if (!unfinished.is_object() || !unfinished.contains("key") || !unfinished.contains("parts")) {
    return;
  }
  unfinished_ = unfinished;
  part_bytes_ = dump_json(unfinished_).size();
}

const nlohmann::json* GrowingReport::find(const nlohmann::json& key) const {
  const auto found = std::find_if(results_.begin(), results_.end(), [&](const auto& result) {
    return result.is_object() &&
           std::all_of(key.items().begin(), key.items().end(), [&](const auto& item) {
             return result.contains(item.key()) && result[item.key()] == item.value();
           });
  });
  return found == results_.end() ? nullptr : &*found;
}

void GrowingReport::add(nlohmann::json result) {
  results_.push_back(std::move(result));
  unfinished_ = nullptr;
  if (grows()) write();
}

nlohmann::json GrowingReport::parts(const nlohmann::json& key) const {
  const bool has_some = !unfinished_.is_null() && unfinished_["key"] == key;
  return has_some ? unfinished_["parts"] : nlohmann::json::array();
}

void GrowingReport::add_part(const nlohmann::json& key, nlohmann::json part) {
  if (!grows()) return;
  if (unfinished_.is_null() || unfinished_["key"] != key) {
    unfinished_ = {{"key", key}, {"parts", nlohmann::json::array()}};
    part_bytes_ = 0;
  }
  part_bytes_ += dump_json(part).size();
  if (part_bytes_ > kMostParts) return;
  unfinished_["parts"].push_back(std::move(part));
  const auto begin = std::chrono::steady_clock::now();
  if (begin < next_write_) return;
  write();
  const auto end = std::chrono::steady_clock::now();
  next_write_ = end + kWriteShare * (end - begin);
}

void GrowingReport::finish() const {
  if (path_ == "-") write();
}

void GrowingReport::write() const {
  nlohmann::json report = head_;
  report["run"]["end"] = utc_now();
  report["results"] = results_;
  if (!unfinished_.is_null()) report["unfinished"] = unfinished_;
  report["checksum"] = checksum_of_results(results_, unfinished_);
  write_report(path_, force_, report_text(report));
}

}  // namespace sluice::tools
