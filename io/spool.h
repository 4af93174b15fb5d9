// Text that is too long to be kept in memory until it is wanted.
#pragma once

#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <string_view>

namespace sluice {

// A file without a name, gone with the object, in a folder for temporary ones: the system's
// (TMPDIR) unless another is named. All of it throws Error{io}.
class Spool {
 public:
  Spool();
  explicit Spool(const std::filesystem::path& folder);

  void write(std::string_view text);
  // All that was written, piece by piece; as often as it is asked for.
  void read(const std::function<void(std::string_view)>& to);

 private:
  std::filesystem::path folder_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace sluice
