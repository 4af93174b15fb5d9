#include "bindings/c/handles.h"

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "sluice/errors.h"

namespace sluice::c {
namespace {

struct Object {
  const Kind* kind;
  std::shared_ptr<void> object;
};

struct Table {
  std::mutex mutex;
  std::unordered_map<std::uintptr_t, Object> objects;
  std::uintptr_t next = 1;
};

// Never destroyed, because threads and destructors of the program may use handles until it ends.
Table& table() {
  static Table* const all = new Table;
  return *all;
}

auto locate(const Kind& kind, std::uintptr_t handle) {
  if (handle == 0) throw Error(ErrorCode::usage, std::string(kind.name) + ": NULL");
  const auto found = table().objects.find(handle);
  if (found == table().objects.end()) {
    throw Error(ErrorCode::usage, std::string(kind.name) + ": freed, or never a handle");
  }
  if (found->second.kind != &kind) {
    throw Error(ErrorCode::usage,
                std::string(kind.name) + ": the handle is a " + found->second.kind->name);
  }
  return found;
}

}  // namespace

std::uintptr_t add_object(const Kind& kind, std::shared_ptr<void> object) {
  const std::lock_guard lock(table().mutex);
  const std::uintptr_t handle = table().next++;
  table().objects.emplace(handle, Object{&kind, std::move(object)});
  return handle;
}

std::shared_ptr<void> find_object(const Kind& kind, std::uintptr_t handle) {
  const std::lock_guard lock(table().mutex);
  return locate(kind, handle)->second.object;
}

std::shared_ptr<void> take_object(const Kind& kind, std::uintptr_t handle) {
  const std::lock_guard lock(table().mutex);
  const auto found = locate(kind, handle);
  std::shared_ptr<void> object = std::move(found->second.object);
  table().objects.erase(found);
  return object;
}

}  // namespace sluice::c
