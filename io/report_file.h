// Files that reports are written to: what a report may take the place of.
#pragma once

#include <filesystem>
#include <string>

namespace sluice {

// A report is a JSON object; its first member is `"written_by": "sluice VERSION"`, by which the
// program knows its own. This is that member with the brace before it and the comma behind it.
std::string report_beginning();

// Whether a report may be written to `path` without a loss: nothing is there, or an empty file, an
// earlier report, or no file at all but a device, a pipe or a folder (which cannot be written, and
// says so). Links are followed. False where what is there cannot be read.
bool may_become_report(const std::filesystem::path& path);

// Throws Error{usage} unless may_become_report().
void require_may_become_report(const std::filesystem::path& path);

}  // namespace sluice
