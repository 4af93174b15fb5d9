#include "engine/unicode/properties.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "engine/unicode/tables.h"

namespace sluice::unicode {
namespace {

std::string plain_name(std::string_view name) {
  std::string result;
  for (const char c : name) {
    if (c == ' ' || c == '-' || c == '_') continue;
    result += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return result;
}

// The code points of the runs whose value `wanted` accepts.
template <typename Wanted>
CodeSet select(std::span<const std::uint32_t> runs, Wanted wanted) {
  std::vector<CodeRange> ranges;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!wanted(static_cast<std::uint8_t>(runs[i] & 0xFF))) continue;
    const char32_t end = i + 1 < runs.size() ? runs[i + 1] >> 8 : CodeSet::kLast + 1;
    ranges.push_back({runs[i] >> 8, end - 1});
  }
  return CodeSet(std::move(ranges));
}

// "l" has all categories that begin with it, "lu" one of them.
std::optional<CodeSet> category(std::string_view plain) {
  if (plain.empty() || plain.size() > 2) return std::nullopt;
  std::vector<bool> wanted;
  for (const std::string_view full : category_names()) {
    const std::string name = plain_name(full);
    wanted.push_back(plain == "lc" ? name == "lu" || name == "ll" || name == "lt"
                                   : name.starts_with(plain));
  }
  if (std::find(wanted.begin(), wanted.end(), true) == wanted.end()) return std::nullopt;
  return select(categories(), [&](std::uint8_t value) { return wanted[value]; });
}

std::optional<CodeSet> script(std::string_view plain) {
  for (const ScriptName& entry : script_names()) {
    if (entry.name != plain) continue;
    return select(scripts(), [&](std::uint8_t value) { return value == entry.script; });
  }
  return std::nullopt;
}

struct Folding {
  std::map<char32_t, char32_t> to;
  std::map<char32_t, std::vector<CodeRange>> from;  // by code point: itself and all that fold to it
};

Folding make_folding() {
  Folding folding;
  for (const FoldRun& run : fold_runs()) {
    for (char32_t c = run.first; c <= run.last; c += run.step) {
      const auto to = static_cast<char32_t>(static_cast<std::int32_t>(c) + run.delta);
      folding.to.emplace(c, to);
      std::vector<CodeRange>& from = folding.from[to];
      if (from.empty()) from.push_back({to, to});
      from.push_back({c, c});
    }
  }
  return folding;
}

const Folding& folding() {
  static const Folding made = make_folding();
  return made;
}

}  // namespace

std::optional<CodeSet> property(std::string_view name) {
  const std::string plain = plain_name(name);
  if (std::optional<CodeSet> found = category(plain)) return found;
  return script(plain);
}

CodeSet white_space() {
  return {{0x9, 0xD},       {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
          {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
}

// Alphabetic has four ranges beside letters, letter-like numbers and marks: letters in circles and
// squares.
CodeSet word() {
  const CodeSet circled = {
      {0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};
  CodeSet result = circled;
  for (const char* name : {"L", "Nl", "M", "Nd", "Pc"}) result = result | *property(name);
  return result;
}

char32_t fold(char32_t code_point) {
  const auto found = folding().to.find(code_point);
  return found == folding().to.end() ? code_point : found->second;
}

CodeSet fold_closure(const CodeSet& set) {
  std::vector<CodeRange> ranges(set.ranges().begin(), set.ranges().end());
  for (const auto& [to, from] : folding().from) {
    const bool met = std::any_of(from.begin(), from.end(),
                                 [&](const CodeRange& range) { return set.contains(range.first); });
    if (met) ranges.insert(ranges.end(), from.begin(), from.end());
  }
  return CodeSet(std::move(ranges));
}

const CodeSet& folds_to_several() {
  static const CodeSet made = [] {
    std::vector<CodeRange> ranges;
    for (const FullFold& entry : full_folds()) ranges.push_back({entry.from, entry.from});
    return CodeSet(std::move(ranges));
  }();
  return made;
}

bool ends_with_full_fold(std::u32string_view folded) {
  return std::any_of(full_folds().begin(), full_folds().end(), [&](const FullFold& entry) {
    const std::u32string_view to(entry.to.data(), entry.to[2] == 0 ? 2 : 3);
    return folded.ends_with(to);
  });
}

}  // namespace sluice::unicode
