// A cache of rows on the device: rows that are selected again and again stay resident, at any
// position.
//
// Each KV head has its part of the cache, which all layers share, so that a layer whose selections
// repeat gets more of it than one whose selections change. A part is divided into sets of kWays
// rows; a row, named by its layer and its slot in host memory, belongs to one set. Forks share
// rows, so they share the cached copies. The heat of a row counts how often tokens selected it;
// each step fades the count by 5 %. A new row takes an empty way of its set or evicts the coldest
// row, but only if that is colder than a row selected in this step: a row that a step has found
// stays resident until the step is over.
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
  using Tag = std::uint32_t;                // short, because every row looked up reads a set's tags
  static constexpr Tag kNothing = ~Tag{0};  // an empty way's tag
  static constexpr std::int32_t kCold =
      std::numeric_limits<std::int32_t>::min();  // an empty way's heat
  // Heat is log2(fading count * 1.05^clock) in units of 1/256. The factor cancels the fading, so
  // that heat does not change while a row is not selected.
  static constexpr std::int32_t kOctave = 256;
  static constexpr std::int32_t kFade = 19;  // per step
  // The last clock at which heat cannot overflow.
  static constexpr std::int32_t kMostClock = std::numeric_limits<std::int32_t>::max() / kFade / 2;

  std::byte* rows = nullptr;     // [kv_heads, sets, kWays, row_bytes]; null: no cache
  Tag* tags = nullptr;           // [kv_heads, sets, kWays], see tag()
  std::int32_t* heat = nullptr;  // [kv_heads, sets, kWays]
  std::int64_t sets = 0;
  std::int64_t host_rows = 0;           // rows per KV head and layer in host memory
  const std::int32_t* clock = nullptr;  // the backend's memory: number of the step

  std::int64_t ways() const { return sets * kWays; }  // per KV head

  // Returns true if tags suffice for `host_rows` rows of each layer and leave two values unused.
  static constexpr bool fits(int layers, std::int64_t host_rows) {
    return host_rows <= (std::int64_t{kNothing} - 1) / layers;
  }
  // The tag of a layer's row `host` in host memory.
  Tag tag(int layer, std::int32_t host) const { return static_cast<Tag>(host_rows * layer + host); }
  std::int64_t host_of(Tag tag) const { return tag % host_rows; }
  // Multiplicative hashing by 2^64 / phi; Knuth, "The Art of Computer Programming", section 6.4.
  std::int64_t set_of(Tag tag) const {
    const std::uint64_t hash = tag * 0x9E3779B97F4A7C15ull >> 32;
    return static_cast<std::int64_t>(hash * static_cast<std::uint64_t>(sets) >> 32);
  }
  // The heat of a row selected for the first time; it grows by kFade per step.
  static constexpr std::int32_t heat_of_new(std::int32_t clock) { return kFade * clock; }
  // The heat of a row after one more selection. The exact increase over the larger of the two heats
  // is log2(1 + 2^-d), with d the octaves between them; 2^-d, linear within an octave, replaces it.
  static constexpr std::int32_t heated(std::int32_t heat, std::int32_t fresh) {
    const std::int32_t apart = heat > fresh ? heat - fresh : fresh - heat;
    const std::int32_t octaves = std::min(apart / kOctave, 31);
    const std::int32_t part = apart % kOctave;
    const std::int32_t more = kOctave >> octaves;
    return std::max(heat, fresh) + more - (more * part / kOctave >> 1);
  }
};

// The location of a selected row.
struct PlacedRow {
  static constexpr std::int32_t kHost = -1;
  static constexpr std::int32_t kDevice = -2;
  static constexpr std::int32_t kCached = -3;

  std::int32_t number =
      0;  // in host memory or on the device slot * kPageTokens + offset, in the cache the way
  // kHost, kDevice or kCached; if not negative, the row is in host memory, and the operation that
  // attends to it copies it to this way of the cache.
  std::int32_t place = kHost;

  bool is_cached() const { return place == kCached; }
  bool is_on_device() const { return place == kDevice; }
  bool is_kept() const { return place >= 0; }
};

}  // namespace sluice
