// Expectations for refused policies.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "sluice/errors.h"

namespace sluice::testing {

// The message with which `call` refuses; empty, with a test failure, if it does not.
template <typename Call>
std::string refusal(Call call) {
  try {
    call();
    ADD_FAILURE() << "accepted";
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with("policy: ")) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
}

struct Refusal {
  std::string_view text;
  std::string_view message;  // a part of it
};

}  // namespace sluice::testing
