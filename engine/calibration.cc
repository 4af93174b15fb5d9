#include "engine/calibration.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/file_draft.h"
#include "io/json.h"
#include "lib/text.h"
#include "sluice/engine.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 20;

[[noreturn]] void throw_unusable(const std::filesystem::path& path, const std::string& why) {
  throw Error(ErrorCode::corrupt,
              path.string() + ": " + why + "; run `sluice calibrate` again or delete the file");
}

// Calibration keeps the rest of the file, so it cannot repair a broken one.
[[noreturn]] void throw_unreadable(const std::filesystem::path& path, const std::string& why) {
  throw Error(ErrorCode::corrupt,
              path.string() + ": " + why + "; delete the file and run `sluice calibrate` again");
}

// sluice.json in a folder; beside a GGUF file, a file with its name, because others may be there.
std::filesystem::path calibration_path(const std::filesystem::path& model) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(model, ignored)) return model / kCalibrationFile;
  const bool is_named = model.extension() == ".gguf";
  const std::string name = (is_named ? model.stem() : model.filename()).string();
  return model.parent_path() / (name + "." + std::string(kCalibrationFile));
}

nlohmann::json read_calibration(const std::filesystem::path& path) {
  if (!file_exists(path)) return nlohmann::json::object();
  nlohmann::json root;
  try {
    root = read_json_file(path, kMaxBytes, "calibrate again");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt) throw;
    throw_unreadable(path, "not JSON");
  }
  const bool valid =
      root.is_object() && root.value("policies", nlohmann::json::object()).is_object();
  if (!valid) throw_unreadable(path, "not a calibration");
  return root;
}

// The whole file that a policy is to be stored in. A file without policies belongs to another
// program and is refused.
nlohmann::json read_to_store(const std::filesystem::path& path) {
  nlohmann::json root = read_calibration(path);
  if (file_exists(path) && !root.contains("policies")) throw_unreadable(path, "not a calibration");
  return root;
}

// Throws if Engine::policy() would not find the policy again, or would find a different one.
void require_readable(std::string_view name, const Policy& policy) {
  const auto presets = sluice::presets();
  const bool is_preset = std::any_of(presets.begin(), presets.end(),
                                     [&](const Preset& preset) { return preset.name == name; });
  if (!is_preset) throw Error(ErrorCode::usage, "no preset is called " + in_quotes(name));
  // The options of scorers other than our own are not known here.
  if (own_scorers().find(policy.select.name) == nullptr) return;
  const std::string line = to_string(policy);
  if (parse_policy(line) == policy) return;
  throw Error(ErrorCode::usage, "a policy that is not what its line says: " + line);
}

}  // namespace

std::optional<Policy> calibrated_policy(const std::filesystem::path& model, std::string_view name,
                                        const KvShape& shape, const Scorers& scorers) {
  const std::filesystem::path path = calibration_path(model);
  const nlohmann::json root = read_calibration(path);
  const auto policies = root.find("policies");
  if (policies == root.end()) return std::nullopt;
  const auto line = policies->find(std::string(name));
  if (line == policies->end()) return std::nullopt;
  if (!line->is_string())
    throw_unusable(path, "the policy of " + in_quotes(name) + " is no string");
  try {
    Policy policy = parse_policy(line->get<std::string>(), scorers);
    validate(policy, shape, scorers);
    return policy;
  } catch (const Error& error) {
    throw_unusable(path, error.what());
  }
}

void store_calibration(const std::filesystem::path& model, std::string_view name,
                       const Policy& policy) {
  require_readable(name, policy);
  const std::filesystem::path path = calibration_path(model);
  nlohmann::json root = read_to_store(path);
  root["policies"][std::string(name)] = to_string(policy);
  replace_file(path, root.dump(2) + "\n");
}

void require_storable(const std::filesystem::path& model) {
  const std::filesystem::path path = calibration_path(model);
  read_to_store(path);
  require_replaceable(path);
}

}  // namespace sluice
