// Files that reports are written to: what a report may take the place of.
#pragma once

#include <filesystem>
#include <string>

namespace sluice {

// The beginning of a report, a JSON object: its brace and first member `"written_by": "sluice
// VERSION",`, by which the program recognises its own reports.
std::string report_beginning();

// Returns true if writing a report to `path` loses nothing: `path` does not exist, is empty, is an
// earlier report, or is a device, a pipe or a folder (which then fails to be written). Follows
// links. Returns false if the file cannot be read.
bool may_become_report(const std::filesystem::path& path);

// Throws Error{usage} unless may_become_report().
void require_may_become_report(const std::filesystem::path& path);

}  // namespace sluice
