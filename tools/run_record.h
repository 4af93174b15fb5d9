// The circumstances of a measurement, which its report has beside the numbers: program, command,
// machine and time. Reports that grow while a command runs, and that a later run completes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tools/model_flags.h"

namespace sluice::tools {

// The commit of the sources, with -dirty behind it if they were changed; empty if unknown.
std::string_view source_commit();

// The arguments of this process without the program's name.
std::vector<std::string> command_arguments();

// A fingerprint as records have it.
std::string fingerprint_text(std::uint64_t fingerprint);

// One JSON object: version, commit (null if unknown), command, machine, device, a fingerprint of
// the checkpoint (null without), one of the file at `text` (null without), those of the scorers, of
// the plan and of `data` if there are any, and start (UTC). Throws what Checkpoint::open() and
// read_text_file() throw.
nlohmann::json run_record(const ModelFlags& model, const std::string& text,
                          const std::vector<std::string>& data = {});

// Throws Error{usage} if `resumes` without a report at `path` that could be completed.
void require_resumable(bool resumes, const std::string& path);

// A report {..., "results": [...]} at `path` that is written whenever a result is added, so that
// finished results survive an interruption. With an empty path nothing is written, with "-" the
// whole report at the end. A result that takes long may be added in parts: until it is whole, they
// are in the report as "unfinished".
class GrowingReport {
 public:
  // `head` has the members before the results, run_record()'s under "run". With `resumes` the
  // results of the report at `path` stay, if there is one. Throws Error{usage} if that report is of
  // another command, commit, version, machine, checkpoint, text, data, arrays, positions, shape or
  // policies, and Error{corrupt} if it is none or if its results do not have the checksum that it
  // was written with.
  GrowingReport(std::string path, bool force, bool resumes, nlohmann::json head);

  // The finished result that has all members of `key`; null if there is none.
  const nlohmann::json* find(const nlohmann::json& key) const;
  // Adds a whole result, which replaces its parts.
  void add(nlohmann::json result);
  // The parts of the unfinished result of this key; an empty array without any.
  nlohmann::json parts(const nlohmann::json& key) const;
  // Adds a part of the result of this key, which replaces those of another. Every write writes the
  // whole file, so writing takes at most a twentieth of the time, and parts take at most 64 MiB.
  void add_part(const nlohmann::json& key, nlohmann::json part);
  const nlohmann::json& results() const { return results_; }
  // Prints the report at "-".
  void finish() const;

 private:
  bool grows() const { return !path_.empty() && path_ != "-"; }
  void write() const;

  std::string path_;
  bool force_;
  nlohmann::json head_;
  nlohmann::json results_ = nlohmann::json::array();
  nlohmann::json unfinished_;   // key and parts; null: none
  std::size_t part_bytes_ = 0;  // of the parts
  // When parts are written again.
  std::chrono::steady_clock::time_point next_write_;
};

}  // namespace sluice::tools
