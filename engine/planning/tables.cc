#include "engine/planning/tables.h"

#include <nlohmann/json.hpp>

#include "engine/json_object.h"
#include "engine/planning/data.h"
#include "io/json.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::uint64_t kMaxTableBytes = std::uint64_t{1} << 20;

std::vector<std::string> names_of(const nlohmann::json& table) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table.items()) names.push_back(name);
  return names;
}

[[noreturn]] void refuse(const char* what, std::string_view name,
                         const std::vector<std::string>& known) {
  std::string list;
  for (const std::string& one : known) list += (list.empty() ? "" : ", ") + one;
  throw Error(ErrorCode::usage,
              std::string(what) + " " + in_quotes(name) + " is not known; there are " + list);
}

const nlohmann::json& machines() {
  static const nlohmann::json table =
      nlohmann::json::parse(planning::machines_json()).at("machines");
  return table;
}

const nlohmann::json& shapes() {
  static const nlohmann::json table = nlohmann::json::parse(planning::shapes_json()).at("shapes");
  return table;
}

Machine parse_machine(const nlohmann::json& json, const std::filesystem::path& file,
                      std::string name) {
  const JsonObject object(json, file);
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 50;
  Machine machine;
  machine.name = std::move(name);
  machine.device_memory =
      static_cast<std::uint64_t>(object.integer("device_memory", 1 << 20, kMostBytes));
  machine.memory_rate = object.number("memory_rate", 1e6, 1e18);
  machine.bus_rate = object.number("bus_rate", 1e6, 1e18);
  machine.copy_rate = object.number("copy_rate", 1e6, 1e18);
  machine.flops = object.number("flops", 1e6, 1e21);
  machine.multiprocessors = static_cast<int>(object.integer("multiprocessors", 1, 1 << 16));
  machine.clock = object.number("clock", 1e6, 1e12);
  machine.capability = static_cast<int>(object.integer("capability", 80, 999));
  machine.disk_rate = object.number("disk_rate", 1e3, 1e18);
  machine.disk_row_rate = object.number("disk_row_rate", 1e3, 1e18);
  machine.disk_latency = object.number("disk_latency", 0.0, 10.0);
  return machine;
}

}  // namespace

std::vector<std::string> machine_names() { return names_of(machines()); }
std::vector<std::string> shape_names() { return names_of(shapes()); }

Machine find_machine(std::string_view name) {
  const auto found = machines().find(std::string(name));
  if (found == machines().end()) refuse("the machine", name, machine_names());
  return parse_machine(*found, "machines.json", std::string(name));
}

Machine read_machine(const std::filesystem::path& file) {
  const nlohmann::json json = read_json_file(file, kMaxTableBytes, "correct it");
  const JsonObject object(json, file);
  return parse_machine(json, file, object.string("name", file.stem().string()));
}

ModelConfig planning::find_shape(std::string_view name) {
  const auto found = shapes().find(std::string(name));
  if (found == shapes().end() && name.ends_with(".json")) {
    const std::filesystem::path file(name);
    return parse_config(read_json_file(file, kMaxTableBytes, "correct it"), file);
  }
  if (found == shapes().end()) refuse("the shape", name, shape_names());
  return parse_config(*found, "shapes.json");
}

ModelShape shape_of(const ModelInfo& info) {
  return {info.architecture,   info.kv.layers,   info.hidden,      info.intermediate,
          info.kv.query_heads, info.kv.kv_heads, info.kv.head_dim, info.vocabulary};
}

}  // namespace sluice
