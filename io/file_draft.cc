#include "io/file_draft.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <random>

#include "io/error_text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr mode_t kPermissions = S_IRUSR | S_IWUSR | S_IRGRP | S_IWGRP | S_IROTH | S_IWOTH;

[[noreturn]] void throw_unwritable(const std::filesystem::path& path, int error) {
  throw Error(ErrorCode::io, path.string() + ": cannot be written: " + error_text(error) +
                                 "; check that its folder is writable and the disk has room");
}

std::string name_beside(const std::filesystem::path& path, std::random_device& random) {
  return path.string() + "." + std::to_string(random()) + ".new";
}

// The descriptor of a new file without a name in the folder of `path`; negative if the file system
// has none.
int create_unnamed(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  return ::open(folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, kPermissions);
}

// The descriptor of a new file beside `path`, whose name is put into `draft`.
int create_beside(const std::filesystem::path& path, std::string& draft) {
  std::random_device random;
  int descriptor = -1;
  do {
    draft = name_beside(path, random);
    descriptor =
        ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kPermissions);
  } while (descriptor < 0 && (errno == EEXIST || errno == EINTR));
  if (descriptor < 0) throw_unwritable(path, errno);
  return descriptor;
}

}  // namespace

FileDraft::FileDraft(const std::filesystem::path& path, Name name)
    : path_(path), file_(nullptr, &std::fclose) {
  int descriptor = name == Name::none ? create_unnamed(path) : -1;
  if (descriptor < 0) descriptor = create_beside(path, draft_);
  struct stat status {};
  const bool replaces = ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
  if (replaces) ::fchmod(descriptor, status.st_mode & kPermissions);
  file_.reset(::fdopen(descriptor, "w"));
  if (file_) return;
  const int error = errno;
  ::close(descriptor);
  if (!draft_.empty()) ::unlink(draft_.c_str());
  throw_unwritable(path_, error);
}

FileDraft::~FileDraft() {
  if (!draft_.empty()) ::unlink(draft_.c_str());
}

void FileDraft::write(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size()) {
    throw_unwritable(path_, errno);
  }
}

void FileDraft::reserve(std::uint64_t bytes) {
  const int descriptor = ::fileno(file_.get());
  int error = EINTR;
  while (error == EINTR) error = ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  if (error != 0) throw_unwritable(path_, error);
}

void FileDraft::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count =
        ::pwrite(::fileno(file_.get()), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_unwritable(path_, errno);
    offset += static_cast<std::uint64_t>(count);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void FileDraft::put_in_place() {
  if (!try_put_in_place()) throw_unwritable(path_, errno);
}

// By /proc, because linking a descriptor itself takes a privilege; see open(2), O_TMPFILE.
void FileDraft::link_beside() {
  std::random_device random;
  const std::string descriptor = "/proc/self/fd/" + std::to_string(::fileno(file_.get()));
  std::string name;
  int status = 0;
  do {
    name = name_beside(path_, random);
    status = ::linkat(AT_FDCWD, descriptor.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW);
  } while (status != 0 && errno == EEXIST);
  if (status != 0) throw_unwritable(path_, errno);
  draft_ = name;
}

bool FileDraft::try_put_in_place() {
  // Some systems tell only now that the disk is full.
  if (std::fflush(file_.get()) != 0 || ::fsync(::fileno(file_.get())) != 0) {
    throw_unwritable(path_, errno);
  }
  if (draft_.empty()) link_beside();
  if (::rename(draft_.c_str(), path_.c_str()) != 0) return false;
  draft_.clear();
  return true;
}

void replace_file(const std::filesystem::path& path, std::string_view text) {
  FileDraft draft(path);
  draft.write(text);
  draft.put_in_place();
}

void require_replaceable(const std::filesystem::path& path) { const FileDraft draft(path); }

}  // namespace sluice
