// Objects behind the handles of sluice.h.
//
// A handle is a number in a pointer's clothes and is never dereferenced: it is looked up here, so
// that a freed handle, one of another kind or a wild pointer is an error and not undefined. Numbers
// are not used again. The caller of a lookup shares the object, which therefore outlives a handle
// that another thread frees.
#pragma once

#include <cstdint>
#include <memory>

#include "bindings/use.h"

namespace sluice::c {

using bindings::Use;

// The address stands for the kind of a handle.
struct Kind {
  const char* name;  // "sluice_session"
};

std::uintptr_t add_object(const Kind& kind, std::shared_ptr<void> object);
// Throws Error{usage} unless `handle` names an object of this kind.
std::shared_ptr<void> find_object(const Kind& kind, std::uintptr_t handle);
// The same, and forgets the handle.
std::shared_ptr<void> take_object(const Kind& kind, std::uintptr_t handle);

// The object of type T with which handles of type Handle deal; T::kKind is their kind.
template <typename T, typename Handle>
Handle* add(std::shared_ptr<T> object) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): never dereferenced
  return reinterpret_cast<Handle*>(add_object(T::kKind, std::move(object)));
}
template <typename T, typename Handle>
std::shared_ptr<T> find(Handle* handle) {
  return std::static_pointer_cast<T>(
      find_object(T::kKind, reinterpret_cast<std::uintptr_t>(handle)));
}
template <typename T, typename Handle>
std::shared_ptr<T> take(Handle* handle) {
  return std::static_pointer_cast<T>(
      take_object(T::kKind, reinterpret_cast<std::uintptr_t>(handle)));
}

}  // namespace sluice::c
