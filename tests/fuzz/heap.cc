#include "tests/fuzz/heap.h"

#include <malloc.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>

namespace sluice::fuzz {
namespace {

struct Heap {
  std::atomic<std::int64_t> bytes{0};
  std::atomic<std::int64_t> most{std::numeric_limits<std::int64_t>::max()};
};

Heap& heap() {
  static Heap heap;
  return heap;
}

void* allocate(std::size_t size) noexcept {
  const std::int64_t most = heap().most.load(std::memory_order_relaxed);
  const std::int64_t used = heap_bytes();
  if (size > static_cast<std::uint64_t>(most - used)) {
    std::fprintf(stderr,
                 "does not hold: an input takes little memory; %lld bytes are in use and %zu more "
                 "were asked for\n",
                 static_cast<long long>(used), size);
    std::abort();
  }
  void* const memory = std::malloc(size > 0 ? size : 1);
  if (memory != nullptr) {
    heap().bytes.fetch_add(static_cast<std::int64_t>(malloc_usable_size(memory)),
                           std::memory_order_relaxed);
  }
  return memory;
}

void* allocate_or_throw(std::size_t size) {
  void* const memory = allocate(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  heap().bytes.fetch_sub(static_cast<std::int64_t>(malloc_usable_size(memory)),
                         std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

std::int64_t heap_bytes() { return heap().bytes.load(std::memory_order_relaxed); }

void limit_heap(std::int64_t bytes) { heap().most.store(heap_bytes() + bytes); }

}  // namespace sluice::fuzz

// Replaces all operators, because under AddressSanitizer the others would be its own. Over-aligned
// allocations are not counted.
void* operator new(std::size_t size) { return sluice::fuzz::allocate_or_throw(size); }
void* operator new[](std::size_t size) { return sluice::fuzz::allocate_or_throw(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return sluice::fuzz::allocate(size);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return sluice::fuzz::allocate(size);
}
void operator delete(void* memory) noexcept { sluice::fuzz::release(memory); }
void operator delete[](void* memory) noexcept { sluice::fuzz::release(memory); }
void operator delete(void* memory, std::size_t) noexcept { sluice::fuzz::release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { sluice::fuzz::release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  sluice::fuzz::release(memory);
}
void operator delete[](void* memory, const std::nothrow_t&) noexcept {
  sluice::fuzz::release(memory);
}
