// Expectations for errors that say one clear thing, and for numbers that nearly agree.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "sluice/errors.h"

namespace sluice::testing {

// `text`: a part of the message, which must be one line that names fields, not flags.
inline void expect_error(ErrorCode code, const std::string& text, const auto& call) {
  using ::testing::HasSubstr;
  try {
    call();
    ADD_FAILURE() << "nothing was refused where '" << text << "' was expected";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("--"))) << "a flag, not a field";
  }
}

inline double largest_difference(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0.0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;  // also equal infinities
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, difference);
  }
  return largest;
}

}  // namespace sluice::testing
