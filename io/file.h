// Files that are read: opened once, read at offsets, never mapped (a file that shrinks under a
// mapping ends the process instead of giving an error).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace sluice {

// A regular file, open for reading. Reads from several threads do not disturb each other.
class File {
 public:
  // Throws Error{not_found} if `path` is missing, unreadable or not a regular file, Error{io} if
  // the system cannot open it.
  static File open(const std::filesystem::path& path);

  // A file of a directory that is open already. A link in its place is refused with
  // Error{corrupt}: it could lead anywhere. `directory_path` is for messages.
  static File open_in(int directory, const std::filesystem::path& directory_path,
                      const std::string& name);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // Fills `destination` with the bytes from `offset` on. Throws Error{io} if the device fails or
  // the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> destination) const;

  // Throws Error{io} if the file has been written to since it was opened. One that took its place
  // makes no difference: this one is read to the end.
  void require_unchanged() const;

  int descriptor() const { return descriptor_; }
  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }  // bytes, when it was opened

 private:
  File(int descriptor, std::filesystem::path path)
      : descriptor_(descriptor), path_(std::move(path)) {}
  // Throws Error{not_found} unless it is a regular file.
  void note_status();

  int descriptor_ = -1;
  std::filesystem::path path_;
  std::uint64_t size_ = 0;
  std::int64_t written_ = 0;  // when it was opened: nanoseconds since the epoch
};

// Returns true if `path` exists, even as a dangling link: a file that cannot be opened is an error
// of open, not a missing file.
bool file_exists(const std::filesystem::path& path);

// Throws Error{corrupt} if a file that begins so is a pointer that Git LFS was to replace.
void require_not_lfs_pointer(const std::filesystem::path& path, std::string_view start);

// The whole file. Throws what File throws, and Error{corrupt} if it has more than `max_bytes`.
std::string read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes);

}  // namespace sluice
