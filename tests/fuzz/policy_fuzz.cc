// A policy's line of text, or its JSON if the input begins with '{'. An accepted policy is valid
// and survives a round trip through both forms. Changing it and checking it against a model gives a
// policy or Error{usage}, nothing else.
#include "sluice/policy.h"
#include "sluice/types.h"
#include "tests/fuzz/fuzz.h"

namespace sluice::fuzz {
namespace {

std::string hold(const Policy& policy, std::string_view input) {
  validate(policy);
  const std::string line = to_string(policy);
  const std::string json = to_json(policy);
  require(!invalid_utf8_at(line), "a policy's line is UTF-8");
  require(parse_policy(line) == policy, "a policy comes back from its line: " + line);
  require(to_string(parse_policy(line)) == line, "a line stays as it is: " + line);
  require(policy_from_json(json) == policy, "a policy comes back from its JSON: " + json);
  require(change_policy(policy, "") == policy, "no change changes nothing: " + line);

  const KvShape shape{.layers = 12, .query_heads = 8, .kv_heads = 2, .head_dim = 64};
  const auto fits = [&] { return validate(policy, shape), true; };
  answer_of({ErrorCode::usage}, fits, [](bool) { return std::string(); });
  const auto change = [&] { return change_policy(policy, input); };
  answer_of({ErrorCode::usage}, change, [](const Policy& changed) { return to_string(changed); });
  return line;
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& /*folder*/) {
  const auto read = [&] {
    return input.starts_with('{') ? policy_from_json(input) : parse_policy(input);
  };
  return answer_of({ErrorCode::usage}, read,
                   [&](const Policy& policy) { return hold(policy, input); });
}

}  // namespace sluice::fuzz
