// The circumstances of a measurement, which its report has beside the numbers: program, command,
// machine and time. Reports that grow while a command runs, and that a later run completes.
#pragma once

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

// One JSON object: version, commit (null if unknown), command, machine, device, a fingerprint of
// the checkpoint, one of the file at `text`, those of the scorers, and start (UTC). Throws what
// Checkpoint::open() and read_text_file() throw.
nlohmann::json run_record(const ModelFlags& model, const std::string& text);

// A report {..., "results": [...]} at `path` that is written whenever a result is added, so that
// finished results survive an interruption. With an empty path nothing is written, with "-" the
// whole report at the end.
class GrowingReport {
 public:
  // `head` has the members before the results, run_record()'s under "run". With `resumes` the
  // results of the report at `path` stay, if there is one. Throws Error{usage} if that report is of
  // another command, commit, version, machine, checkpoint or text, and Error{corrupt} if it is none
  // or if its results do not have the checksum that it was written with.
  GrowingReport(std::string path, bool force, bool resumes, nlohmann::json head);

  // The finished result that has all members of `key`; null if there is none.
  const nlohmann::json* find(const nlohmann::json& key) const;
  void add(nlohmann::json result);
  const nlohmann::json& results() const { return results_; }
  // Prints the report at "-".
  void finish() const;

 private:
  void write() const;

  std::string path_;
  bool force_;
  nlohmann::json head_;
  nlohmann::json results_ = nlohmann::json::array();
};

}  // namespace sluice::tools
