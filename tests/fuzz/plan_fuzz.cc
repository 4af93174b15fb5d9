// A plan file: settings that make sense by themselves, which read the same once they are written
// again; or it is refused.
#include "sluice/planning.h"
#include "tests/fuzz/fuzz.h"

namespace sluice::fuzz {
namespace {

std::string text_of(const PlanSettings& settings) {
  AdvisedPlan plan;
  plan.settings = settings;
  return to_json(plan);
}

std::string hold(const PlanSettings& found, const std::filesystem::path& file) {
  require(found.context >= 1 && found.chunk >= 0, "sizes are in range");
  require(!found.disk || !found.disk->directories.empty(), "a disk has directories");
  validate(parse_policy(found.policy));
  const std::string text = text_of(found);
  write_file(file, text);
  require(text_of(read_plan(file)) == text, "a plan that was written is read");
  return found.policy;
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "plan.json";
  write_file(file, input);
  return answer_of(
      {ErrorCode::corrupt}, [&] { return read_plan(file); },
      [&](const PlanSettings& found) { return hold(found, file); });
}

}  // namespace sluice::fuzz
