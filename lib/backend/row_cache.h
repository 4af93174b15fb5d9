// A cache of rows on the device: those that attention to selected rows reads again and again stay
// there by use, whatever their positions.
//
// Each KV head has its part of the cache, which all layers share: a layer whose selections repeat
// themselves finds more of its rows there than one whose do not. A part is divided into sets of
// kWays rows; a row, named by its layer and its number at home, belongs to one set. Forks share
// rows, so they share what is cached of them. A row has a heat, how often tokens selected it, of
// which each step fades what came before by 5 %. A new row takes the way of the coldest row of its
// set, an empty way first of all, but only of one that is colder than a row selected just now: so
// what a step has found stays until the step is over.
//
// Source: set-associative caches are textbook; the fading count is LFU with aging (O'Neil et al.
// 1993 and Lee et al. 2001, "LRFU"), chosen over LRU and others by bench/row_cache.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace sluice {

struct RowCacheView {
  static constexpr int kWays = 32;
  using Tag = std::uint32_t;  // a set's tags are looked at for every row: short ones cost less
  static constexpr Tag kNothing = ~Tag{0};  // of an empty way
  static constexpr std::int32_t kCold = std::numeric_limits<std::int32_t>::min();  // its heat
  // Heat is the logarithm, in steps of 1/256 of base 2, of the fading count times 1.05^clock: so
  // that it does not change while a row is not selected.
  static constexpr std::int32_t kOctave = 256;
  static constexpr std::int32_t kFade = 19;  // of a step
  // Before it heat does not overflow.
  static constexpr std::int32_t kMostClock = std::numeric_limits<std::int32_t>::max() / kFade / 2;

  std::byte* rows = nullptr;     // [kv_heads, sets, kWays, row_bytes]; null: there is no cache
  Tag* tags = nullptr;           // [kv_heads, sets, kWays], see tag()
  std::int32_t* heat = nullptr;  // likewise
  std::int64_t sets = 0;
  std::int64_t homes = 0;               // rows of a KV head's and layer's region at home
  const std::int32_t* clock = nullptr;  // the backend's memory: number of the step

  std::int64_t ways() const { return sets * kWays; }  // of a KV head

  // Whether all rows of so many layers have tags, and there are two numbers that are none.
  static constexpr bool fits(int layers, std::int64_t homes) {
    return homes <= (std::int64_t{kNothing} - 1) / layers;
  }
  // Of a row that is number `home` of its region.
  Tag tag(int layer, std::int32_t home) const { return static_cast<Tag>(homes * layer + home); }
  std::int64_t home_of(Tag tag) const { return tag % homes; }
  // Multiplicative hashing by 2^64 / phi; Knuth, "The Art of Computer Programming", section 6.4.
  std::int64_t set_of(Tag tag) const {
    const std::uint64_t hash = tag * 0x9E3779B97F4A7C15ull >> 32;
    return static_cast<std::int64_t>(hash * static_cast<std::uint64_t>(sets) >> 32);
  }
  // What a row selected for the first time has; it grows by kFade a step.
  static constexpr std::int32_t heat_of_new(std::int32_t clock) { return kFade * clock; }
  // What heat becomes if the row is selected: about that of one more. With d the octaves between
  // the two, log2(1 + 2^-d) is replaced by 2^-d, linear within an octave.
  static constexpr std::int32_t heated(std::int32_t heat, std::int32_t fresh) {
    const std::int32_t apart = heat > fresh ? heat - fresh : fresh - heat;
    const std::int32_t octaves = std::min(apart / kOctave, 31);
    const std::int32_t part = apart % kOctave;
    const std::int32_t more = kOctave >> octaves;
    return std::max(heat, fresh) + more - (more * part / kOctave >> 1);
  }
};

// Where a selected row is.
struct PlacedRow {
  static constexpr std::int32_t kHome = -1;
  static constexpr std::int32_t kDevice = -2;
  static constexpr std::int32_t kCached = -3;

  std::int32_t number = 0;  // its number in that region: slot * kPageTokens + offset, or the way
  // One of these; or not negative: the row is at home, and whoever attends to it puts it into this
  // way of the cache.
  std::int32_t place = kHome;

  bool is_cached() const { return place == kCached; }
  bool is_on_device() const { return place == kDevice; }
  bool is_kept() const { return place >= 0; }
};

}  // namespace sluice
