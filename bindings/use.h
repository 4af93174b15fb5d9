// One thread at a time for an object that the library leaves to its callers' order.
#pragma once

#include <mutex>
#include <string>
#include <thread>

#include "sluice/errors.h"

namespace sluice::bindings {

// Lets one thread at a time use an object. A call from a callback of a call of the same thread is
// let in, because the library behind says best what it may do.
class Use {
 public:
  struct Owner {
    std::mutex mutex;
    std::thread::id thread;
    int calls = 0;
  };

  // Throws Error{usage} while another thread uses it; `name` is the object's, for the message.
  Use(Owner& owner, const char* name) : owner_(&owner) {
    const std::lock_guard lock(owner.mutex);
    if (owner.calls > 0 && owner.thread != std::this_thread::get_id()) {
      throw Error(ErrorCode::usage,
                  std::string(name) + ": in use by another thread or an unfinished answer");
    }
    owner.thread = std::this_thread::get_id();
    ++owner.calls;
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() {
    const std::lock_guard lock(owner_->mutex);
    --owner_->calls;
  }

 private:
  Owner* owner_;
};

}  // namespace sluice::bindings
