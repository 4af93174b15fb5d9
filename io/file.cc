#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "io/error_text.h"
#include "lib/bytes.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

std::int64_t time_of(const timespec& time) {
  constexpr std::int64_t kNanoseconds = 1'000'000'000;
  return std::int64_t{time.tv_sec} * kNanoseconds + time.tv_nsec;
}

[[noreturn]] void throw_open_failed(const std::filesystem::path& path, int error) {
  std::error_code ignored;
  const std::filesystem::path target = std::filesystem::read_symlink(path, ignored);
  if (error == ENOENT && !target.empty()) {
    throw Error(ErrorCode::not_found, path.string() + ": is a link to " + target.string() +
                                          ", where there is no file; download it again");
  }
  if (error == ENOENT || error == ENOTDIR) {
    throw Error(ErrorCode::not_found,
                path.string() + ": there is no such file; check the path or download it again");
  }
  if (error == EACCES || error == EPERM) {
    throw Error(ErrorCode::not_found,
                path.string() + ": " + error_text(error) +
                    "; make it readable and its folder accessible for this user");
  }
  throw Error(ErrorCode::io, path.string() + ": cannot be opened: " + error_text(error) +
                                 "; check the limits and the disk of this machine");
}

}  // namespace

File File::open(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer. It changes nothing for regular files.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) throw_open_failed(path, errno);
  File file(descriptor, path);
  file.note_status();
  return file;
}

File File::open_in(int directory, const std::filesystem::path& directory_path,
                   const std::string& name) {
  const std::filesystem::path path = directory_path / name;
  const int descriptor =
      ::openat(directory, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (descriptor < 0 && errno == ELOOP) {
    throw Error(ErrorCode::corrupt,
                path.string() + ": is a link, which may not be here; put the file itself there");
  }
  if (descriptor < 0) throw_open_failed(path, errno);
  File file(descriptor, path);
  file.note_status();
  return file;
}

void File::note_status() {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) throw_open_failed(path_, errno);
  if (!S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::not_found, path_.string() + ": is not a regular file; check the path");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
  written_ = time_of(status.st_mtim);
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      path_(std::move(other.path_)),
      size_(std::exchange(other.size_, 0)),
      written_(other.written_) {}

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(path_, other.path_);
  std::swap(size_, other.size_);
  std::swap(written_, other.written_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::read(std::uint64_t offset, std::span<std::byte> destination) const {
  while (!destination.empty()) {
    const ssize_t count =
        ::pread(descriptor_, destination.data(), destination.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw Error(ErrorCode::io, path_.string() + ": reading at byte " + std::to_string(offset) +
                                     " failed: " + error_text(errno) + "; check the disk");
    }
    if (count == 0) {
      throw Error(ErrorCode::io, path_.string() + ": ends at byte " + std::to_string(offset) +
                                     ", before what was to be read; it became shorter after it "
                                     "was opened, try again");
    }
    offset += static_cast<std::uint64_t>(count);
    destination = destination.subspan(static_cast<std::size_t>(count));
  }
}

void File::require_unchanged() const {
  struct stat status {};
  const bool is_same = ::fstat(descriptor_, &status) == 0 &&
                       static_cast<std::uint64_t>(status.st_size) == size_ &&
                       time_of(status.st_mtim) == written_;
  if (is_same) return;
  throw Error(ErrorCode::io, path_.string() +
                                 ": was changed while it was being read, so that what was read may "
                                 "be of two files; try again once it stays as it is");
}

bool file_exists(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::symlink_status(path, ignored).type() !=
         std::filesystem::file_type::not_found;
}

std::string read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const File file = File::open(path);
  if (file.size() > max_bytes) {
    throw Error(ErrorCode::corrupt, path.string() + ": has " + format_bytes(file.size()) +
                                        ", more than the " + format_bytes(max_bytes) +
                                        " that such a file may have; download it again");
  }
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void require_not_lfs_pointer(const std::filesystem::path& path, std::string_view start) {
  if (!start.starts_with("version https://git-lfs")) return;
  throw Error(ErrorCode::corrupt, path.string() +
                                      ": is a pointer of Git LFS, not the file itself; run "
                                      "'git lfs pull' where it was cloned");
}

}  // namespace sluice
