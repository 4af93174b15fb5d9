#include "engine/unicode/code_classes.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "engine/utf8.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// The edges of the sets: (code point, index of the set), in order.
std::vector<std::pair<char32_t, std::size_t>> edges_of(std::span<const CodeSet> sets) {
  std::vector<std::pair<char32_t, std::size_t>> edges;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    for (const CodeRange& range : sets[i].ranges()) {
      edges.emplace_back(range.first, i);
      edges.emplace_back(range.last + 1, i);
    }
  }
  std::sort(edges.begin(), edges.end());
  return edges;
}

}  // namespace

CodeClasses::CodeClasses(std::span<const CodeSet> sets) : of_(sets.size()) {
  const auto edges = edges_of(sets);
  std::map<std::vector<bool>, std::uint8_t> classes;
  std::vector<bool> in(sets.size());  // which sets have the code points from `begin` on
  std::map<Page, std::uint16_t> pages;
  Page page{};
  std::size_t edge = 0;
  for (char32_t begin = 0; begin <= CodeSet::kLast;) {
    for (; edge < edges.size() && edges[edge].first == begin; ++edge) {
      in[edges[edge].second] = !in[edges[edge].second];
    }
    const char32_t end = edge < edges.size() ? edges[edge].first : CodeSet::kLast + 1;
    const auto [found, added] = classes.emplace(in, static_cast<std::uint8_t>(classes.size()));
    if (classes.size() > kMost) {
      throw Error(ErrorCode::unsupported,
                  "the regular expression tells more than 256 kinds of characters apart, which "
                  "Sluice does not support");
    }
    if (added) {
      for (std::size_t i = 0; i < in.size(); ++i) {
        if (in[i]) of_[i].push_back(found->second);
      }
    }
    for (; begin < end; ++begin) {
      page[begin & 0xFF] = found->second;
      if ((begin & 0xFF) != 0xFF) continue;
      const auto [place, fresh] = pages.emplace(page, static_cast<std::uint16_t>(pages_.size()));
      if (fresh) pages_.push_back(page);
      page_of_[begin >> 8] = place->second;
    }
  }
}

void CodeClasses::classify(std::string_view text, std::string& classes) const {
  classes.clear();
  const Page& ascii = pages_[page_of_[0]];
  for (std::size_t at = 0; at < text.size();) {
    const auto lead = static_cast<std::uint8_t>(text[at]);
    if (lead < 0x80) {
      classes += static_cast<char>(ascii[lead]);
      ++at;
    } else {
      classes += static_cast<char>((*this)[first_code_point(text.substr(at))]);
      at += static_cast<std::size_t>(std::countl_one(lead));
    }
  }
}

}  // namespace sluice
