// A file for bytes that live no longer than the process: it never has a name, so that the system
// frees it however the process ends.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace sluice {

class SpillFile {
 public:
  // Reserves `bytes` in `directory`, for this user only (mode 0600). The space is allocated on the
  // disk, so that no later write can find it full.
  // Throws Error{not_found} if `directory` is missing or not a directory, Error{unsupported} if its
  // file system is in memory, on the network or without unnamed files, Error{io} if it is
  // read-only, not writable for this user, has too little room, or RLIMIT_FSIZE is smaller.
  static SpillFile create(const std::filesystem::path& directory, std::uint64_t bytes);

  SpillFile(SpillFile&& other) noexcept;
  SpillFile& operator=(SpillFile&& other) noexcept;
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;
  ~SpillFile();

  // Turns O_DIRECT on or off: without it, reads and writes go through the page cache. Returns false
  // if the file system refuses.
  bool set_direct(bool direct);

  int descriptor() const { return descriptor_; }
  std::uint64_t size() const { return size_; }  // bytes
  bool direct() const { return direct_; }
  const std::filesystem::path& directory() const { return directory_; }
  const std::string& file_system() const { return file_system_; }  // "ext4", or its number in hex

 private:
  SpillFile() = default;

  int descriptor_ = -1;
  std::uint64_t size_ = 0;
  bool direct_ = false;
  std::filesystem::path directory_;
  std::string file_system_;
};

}  // namespace sluice
