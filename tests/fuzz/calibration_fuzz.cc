// A sluice.json: the policy stored for a preset fits the model, or there is none. Storing a policy
// and reading it back works, unless the file has no policies and so belongs to another program.
#include "engine/calibration.h"
#include "sluice/engine.h"
#include "tests/fuzz/fuzz.h"

namespace sluice::fuzz {
namespace {

constexpr std::string_view kPreset = "twilight";
constexpr KvShape kShape{.layers = 12, .query_heads = 8, .kv_heads = 2, .head_dim = 64};

std::optional<Policy> stored(const std::filesystem::path& folder) {
  return calibrated_policy(folder, kPreset, kShape, own_scorers());
}

bool is_storable(const std::filesystem::path& folder) {
  try {
    require_storable(folder);
    return true;
  } catch (const Error& error) {
    require(error.code() == ErrorCode::corrupt, "a file of another program is refused as such");
    return false;
  }
}

std::string hold(const std::optional<Policy>& found, const std::filesystem::path& folder) {
  if (found) validate(*found, kShape);
  const Policy policy = found.value_or(parse_policy("twilight cap=64"));
  if (!is_storable(folder)) {
    require(!found, "a file with policies is a calibration");
    return "another program's";
  }
  store_calibration(folder, kPreset, policy);
  require(stored(folder) == policy, "what was stored is found");
  return found ? to_string(policy) : "none";
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  write_file(folder / kCalibrationFile, input);
  return answer_of(
      {ErrorCode::corrupt}, [&] { return stored(folder); },
      [&](const std::optional<Policy>& found) { return hold(found, folder); });
}

}  // namespace sluice::fuzz
