// Data of one Unicode version, which scripts/make_unicode_tables.py writes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace sluice::unicode {

// A script under one of its names: in lower case and without "_".
struct ScriptName {
  std::string_view name;
  std::uint8_t script;
};

// Code points first, first + step, ..., last fold to themselves plus `delta`.
struct FoldRun {
  char32_t first;
  char32_t last;
  std::uint8_t step;
  std::int32_t delta;
};

// A code point that folds to two or three; the third is 0 where there is none.
struct FullFold {
  char32_t from;
  std::array<char32_t, 3> to;
};

std::span<const std::string_view> category_names();
std::span<const ScriptName> script_names();
// Runs of code points in order: first code point * 256 + number of the category (script).
std::span<const std::uint32_t> categories();
std::span<const std::uint32_t> scripts();
std::span<const FoldRun> fold_runs();
std::span<const FullFold> full_folds();

}  // namespace sluice::unicode
