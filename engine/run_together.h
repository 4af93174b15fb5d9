// Threads of the loader, for work that the backend's threads do not do.
#pragma once

#include <cstddef>
#include <functional>

namespace sluice {

// Runs work(i) for i in [0, count), each on its own thread and 0 on the calling one; on fewer
// threads if the system refuses to start more. Rethrows the first exception after stop().
void run_together(std::size_t count, const std::function<void(std::size_t)>& work,
                  const std::function<void()>& stop);

}  // namespace sluice
