#include "io/disk_watch.h"

#include <string>

namespace sluice {
namespace {

class MachineClock final : public DiskClock {
 public:
  bool wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
            std::chrono::nanoseconds most) override {
    return changed.wait_for(lock, most) == std::cv_status::timeout;
  }
};

}  // namespace

std::shared_ptr<DiskClock> machine_clock() { return std::make_shared<MachineClock>(); }

Error DiskWatch::error() const {
  const double seconds = std::chrono::duration<double>(patience_.most).count();
  return {ErrorCode::io, name_ + ": the disk has not answered for " +
                             std::to_string(static_cast<std::int64_t>(seconds)) +
                             " s, so what lies on it is lost; look at the system's log and start "
                             "again with another directory"};
}

}  // namespace sluice
