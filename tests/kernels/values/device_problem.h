// A problem of attention over value tiles in the device's memory.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "kernels/runtime/owners.h"
#include "kernels/values/values.h"
#include "sluice/half.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/digest_truth.h"
#include "tests/support/value_cases.h"

namespace sluice::cuda {

using testing::ValueCase;
using testing::ValueProblem;

inline constexpr std::uint16_t kNan = 0x7e00;

// The digest of a problem's whole pages, as a scan leaves it; NaN for pages that there are not.
inline std::vector<std::byte> digest_of(const ValueProblem& problem) {
  const ValueCase& c = problem.of();
  const std::int64_t rows = c.count() * c.query_heads();
  std::vector<std::byte> bytes(PageDigest::bytes_of(rows, problem.stride), std::byte{0xff});
  const auto digest = PageDigest::of(LogitDigest::in(bytes.data(), rows, problem.stride));
  for (std::int64_t query = 0; query < rows; ++query) {
    const BatchToken token = problem.tokens[static_cast<std::size_t>(query / c.query_heads())];
    for (std::int64_t page = 0; page < token.pages(); ++page) {
      const std::int64_t place =
          (query / c.group * digest.pages + page) * c.group + query % c.group;
      const float* const first = problem.logits_of(query) + page * kPageTokens;
      for (int part = 0; part < kBoundsPerPage; ++part) {
        digest.maxima[place * kBoundsPerPage + part] =
            float_to_f16(largest_of(first + part * kBoundTokens, kBoundTokens));
      }
      digest.sums[place] = digest_sum(first);
    }
  }
  return bytes;
}

// A problem in the device's memory.
class DeviceProblem {
 public:
  DeviceProblem(ValueProblem& problem, bool with_digest)
      : problem_(problem),
        tokens_(upload(problem.tokens)),
        pages_(upload(problem.pages)),
        table_(upload(problem.table)),
        logits_(upload(halves_of(problem))),
        digest_(upload(digest_of(problem))),
        estimated_lse_(upload(problem.estimated_lse)),
        positions_(upload(problem.positions)),
        heads_(make_pinned_block(problem.heads.size() * sizeof(HeadSelection))),
        sums_(upload(problem.sums)),
        bases_(upload(problem.bases)),
        out_(upload(problem.out)),
        lse_(upload(problem.lse)),
        pages_read_(make_pinned_block(problem.pages_read.size() * sizeof(std::int32_t))),
        with_digest_(with_digest) {
    std::memcpy(heads_.get(), problem.heads.data(), problem.heads.size() * sizeof(HeadSelection));
  }

  AttendTilesParams params() const {
    AttendTilesParams p = problem_.params();
    p.batch.tokens = static_cast<const BatchToken*>(tokens_.get());
    p.logits.data = static_cast<std::byte*>(logits_.get());
    if (with_digest_) {
      p.logits.digest = LogitDigest::in(static_cast<std::byte*>(digest_.get()),
                                        std::ssize(problem_.lse), problem_.stride);
    }
    p.estimated_lse = static_cast<const float*>(estimated_lse_.get());
    p.selected.positions = static_cast<std::int32_t*>(positions_.get());
    p.selected.heads = static_cast<HeadSelection*>(heads_.get());
    p.values.tiles.pages = static_cast<std::byte*>(pages_.get());
    if (problem_.of().half) p.values.tiles.basis = static_cast<const float*>(bases_.get());
    p.values.slots = static_cast<const std::int32_t*>(table_.get());
    p.value_sums = static_cast<const float*>(sums_.get());
    p.out = static_cast<float*>(out_.get());
    p.lse = static_cast<float*>(lse_.get());
    p.pages_read = static_cast<std::int32_t*>(pages_read_.get());
    return p;
  }

  // Puts back what was in out and lse before.
  void reset() const {
    const auto copy = [](const DeviceBlock& to, const std::vector<float>& from) {
      copy_in(to.get(), from.data(), from.size() * 4);
    };
    copy(out_, problem_.out);
    copy(lse_, problem_.lse);
    std::memset(pages_read_.get(), 0xff, problem_.pages_read.size() * sizeof(std::int32_t));
  }
  std::vector<float> out() const { return download<float>(out_, problem_.out.size()); }
  std::vector<float> lse() const { return download<float>(lse_, problem_.lse.size()); }
  // Once for all parts of a group.
  std::vector<std::int32_t> pages_read() const {
    const auto* const read = static_cast<const std::int32_t*>(pages_read_.get());
    std::vector<std::int32_t> pages(read, read + problem_.pages_read.size());
    const int parts = (problem_.of().group + kTileQueries - 1) / kTileQueries;
    for (std::int32_t& count : pages) {
      EXPECT_EQ(count % parts, 0);
      count /= parts;
    }
    return pages;
  }

 private:
  static std::vector<std::uint16_t> halves_of(const ValueProblem& problem) {
    std::vector<std::uint16_t> halves;
    for (const float x : problem.logits) halves.push_back(std::isnan(x) ? kNan : float_to_f16(x));
    return halves;
  }

  ValueProblem& problem_;
  DeviceBlock tokens_;
  DeviceBlock pages_;
  DeviceBlock table_;
  DeviceBlock logits_;
  DeviceBlock digest_;
  DeviceBlock estimated_lse_;
  DeviceBlock positions_;
  PinnedBlock heads_;
  DeviceBlock sums_;
  DeviceBlock bases_;
  DeviceBlock out_;
  DeviceBlock lse_;
  PinnedBlock pages_read_;
  bool with_digest_;
};

}  // namespace sluice::cuda
