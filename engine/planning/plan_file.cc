// Plan files: see sluice/planning.h.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "engine/json_object.h"
#include "io/json.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/format_names.h"
#include "sluice/planning.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxPlanBytes = std::uint64_t{1} << 20;
constexpr std::int64_t kVersion = 1;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 55;
constexpr std::int64_t kMostSize = std::int64_t{1} << 30;

constexpr std::array kFields = {"sluice_plan",   "model",          "device", "context", "chunk",
                                "weights",       "kv_dtype",       "policy", "disk",    "losses",
                                "device_memory", "host_memory",    "bytes",  "step",    "predicted",
                                "written_by",    "longest_context"};
constexpr std::array kModelFields = {"architecture", "layers",   "hidden",   "intermediate",
                                     "query_heads",  "kv_heads", "head_dim", "vocabulary"};
constexpr std::array kDiskFields = {"directories", "bytes"};

template <class Names>
void require_known(const JsonObject& object, const Json& json, const Names& names) {
  for (const auto& [key, value] : json.items()) {
    if (std::find(names.begin(), names.end(), key) == names.end()) {
      object.corrupt(key, "is no field of a plan");
    }
  }
}

ModelShape read_model(const JsonObject& file) {
  const JsonObject model = file.object("model");
  require_known(model, file.value("model"), kModelFields);
  const auto size = [&](const char* key) {
    return static_cast<int>(model.integer(key, 1, kMostSize));
  };
  ModelShape shape;
  shape.architecture = model.string("architecture");
  shape.layers = size("layers");
  shape.hidden = size("hidden");
  shape.intermediate = size("intermediate");
  shape.query_heads = size("query_heads");
  shape.kv_heads = size("kv_heads");
  shape.head_dim = size("head_dim");
  shape.vocabulary = size("vocabulary");
  return shape;
}

std::optional<std::uint64_t> read_cap(const JsonObject& file, const char* key) {
  if (!file.has(key)) return std::nullopt;
  return static_cast<std::uint64_t>(file.integer(key, 1, kMostBytes));
}

std::optional<DiskConfig> read_disk(const JsonObject& file) {
  if (!file.has("disk")) return std::nullopt;
  const JsonObject disk = file.object("disk");
  require_known(disk, file.value("disk"), kDiskFields);
  DiskConfig config;
  const Json& names = disk.value("directories");
  if (!names.is_array() || names.empty()) disk.corrupt("directories", "is no list of directories");
  for (const Json& name : names) {
    if (!name.is_string() || name.get_ref<const std::string&>().empty()) {
      disk.corrupt("directories", "has " + json_kind(name) + " that names no directory");
    }
    config.directories.emplace_back(name.get<std::string>());
  }
  config.bytes = read_cap(disk, "bytes");
  return config;
}

// The text of a field, which must be one of `names`.
std::string read_choice(const JsonObject& file, const char* key,
                        const std::vector<std::string>& names) {
  std::string text = file.string(key);
  std::string known;
  for (const std::string& name : names) {
    if (text == name) return text;
    known += (known.empty() ? "" : ", ") + name;
  }
  file.corrupt(key, "is " + in_quotes(text) + "; it may be " + known);
}

void check_policy(const JsonObject& file, const std::string& line) {
  try {
    parse_policy(line);
  } catch (const Error& error) {
    file.corrupt("policy", std::string("cannot be read: ") + error.what());
  }
}

}  // namespace

PlanSettings read_plan(const std::filesystem::path& path) {
  const Json json = read_json_file(path, kMaxPlanBytes, "save the plan again");
  const JsonObject file(json, path, {}, "make the plan again or correct it");
  require_known(file, json, kFields);
  file.integer("sluice_plan", kVersion, kVersion);
  PlanSettings plan;
  plan.model = read_model(file);
  plan.on_gpu = read_choice(file, "device", {"cpu", "gpu"}) == "gpu";
  plan.context = file.integer("context", 1, (std::int64_t{1} << 31) - 1);
  plan.chunk = static_cast<int>(file.integer("chunk", 0, 32768));
  std::vector<std::string> weights = weight_code_names();
  weights.insert(weights.begin(), "auto");
  const std::string code = read_choice(file, "weights", weights);
  if (code != "auto") plan.weights = parse_weight_code(code, "weights");
  plan.rows = parse_row_format(read_choice(file, "kv_dtype", row_format_names()), "kv_dtype");
  plan.policy = file.string("policy");
  check_policy(file, plan.policy);
  plan.device_memory = read_cap(file, "device_memory");
  plan.host_memory = read_cap(file, "host_memory");
  plan.disk = read_disk(file);
  return plan;
}

void require_model(const PlanSettings& settings, const ModelInfo& info) {
  const ModelShape own = shape_of(info);
  if (own == settings.model) return;
  const auto text = [](const ModelShape& s) {
    return s.architecture + " of " + std::to_string(s.layers) + " layers, hidden " +
           std::to_string(s.hidden) + ", feed-forward " + std::to_string(s.intermediate) +
           ", heads " + std::to_string(s.query_heads) + "/" + std::to_string(s.kv_heads) + " of " +
           std::to_string(s.head_dim) + ", vocabulary " + std::to_string(s.vocabulary);
  };
  throw Error(ErrorCode::usage, "the plan was made for another model: " + text(settings.model) +
                                    "; this one is " + text(own) + "; plan for it");
}

void use_plan(const PlanSettings& settings, EngineConfig& config) {
  config.chunk = settings.chunk;
  config.kv_dtype = settings.rows;
  config.weights = settings.weights;
  config.device_memory = settings.device_memory;
  config.host_memory = settings.host_memory;
  config.disk = settings.disk;
}

std::string to_json(const AdvisedPlan& plan) {
  const PlanSettings& s = plan.settings;
  const ModelShape& m = s.model;
  Json json = {{"sluice_plan", kVersion},
               {"model",
                {{"architecture", m.architecture},
                 {"layers", m.layers},
                 {"hidden", m.hidden},
                 {"intermediate", m.intermediate},
                 {"query_heads", m.query_heads},
                 {"kv_heads", m.kv_heads},
                 {"head_dim", m.head_dim},
                 {"vocabulary", m.vocabulary}}},
               {"device", s.on_gpu ? "gpu" : "cpu"},
               {"context", s.context},
               {"chunk", s.chunk},
               {"weights", s.weights ? to_string(s.weights->code) : "auto"},
               {"kv_dtype", to_string(s.rows)},
               {"policy", s.policy},
               {"losses",
                {{"weights", plan.losses.weights},
                 {"rows", plan.losses.rows},
                 {"prefill", plan.losses.prefill},
                 {"borrowed_from", "sluice-22m"}}},
               {"bytes", Json::parse(plan.plan.to_json())},
               {"step",
                {{"weights", plan.bytes.weights},
                 {"keys", plan.bytes.keys},
                 {"values", plan.bytes.values},
                 {"rows", plan.bytes.rows},
                 {"bus", plan.bytes.bus},
                 {"disk", plan.bytes.disk}}}};
  if (plan.longest > 0) json["longest_context"] = plan.longest;
  if (plan.losses.policy) json["losses"]["policy"] = *plan.losses.policy;
  if (s.device_memory) json["device_memory"] = *s.device_memory;
  if (s.host_memory) json["host_memory"] = *s.host_memory;
  if (s.disk) {
    Json names = Json::array();
    for (const std::filesystem::path& directory : s.disk->directories) {
      names.push_back(directory.string());
    }
    json["disk"]["directories"] = names;
    if (s.disk->bytes) json["disk"]["bytes"] = *s.disk->bytes;
  }
  if (plan.times) {
    json["predicted"] = {{"step_seconds", plan.times->step},
                         {"prefill_seconds", plan.times->prefill}};
  }
  return dump_json(json, 2) + "\n";
}

}  // namespace sluice
