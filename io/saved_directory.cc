#include "io/saved_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "io/error_text.h"
#include "lib/bytes.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr const char* kDraft = "manifest.json.new";
constexpr std::string_view kDataPrefix = "rows-";
constexpr std::string_view kDataSuffix = ".bin";
constexpr std::size_t kDigits = 16;
constexpr mode_t kOwnerOnly = S_IRUSR | S_IWUSR;

[[noreturn]] void throw_unwritable(const std::filesystem::path& path, int error) {
  throw Error(ErrorCode::io, path.string() + ": cannot be written: " + error_text(error) +
                                 "; check that the directory is writable and the disk has room");
}

bool is_data_name(std::string_view name) {
  if (name.size() != kDataPrefix.size() + kDigits + kDataSuffix.size()) return false;
  if (!name.starts_with(kDataPrefix) || !name.ends_with(kDataSuffix)) return false;
  const std::string_view digits = name.substr(kDataPrefix.size(), kDigits);
  return digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool is_own_name(std::string_view name) {
  return name == SavedDirectory::kManifest || name == kDraft || is_data_name(name);
}

std::string data_name(std::uint64_t id) {
  std::array<char, kDigits + 1> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(id));
  return std::string(kDataPrefix) + digits.data() + std::string(kDataSuffix);
}

std::uint64_t random_id() {
  std::random_device random;
  return (static_cast<std::uint64_t>(random()) << 32) | random();
}

// Names in a directory, besides "." and "..".
std::vector<std::string> names_in(int directory, const std::filesystem::path& path) {
  const int copy = ::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(copy < 0 ? nullptr : ::fdopendir(copy),
                                                   &::closedir);
  if (!stream) {
    const int error = errno;
    if (copy >= 0) ::close(copy);
    throw Error(ErrorCode::io, path.string() + ": cannot be listed: " + error_text(error));
  }
  std::vector<std::string> names;
  while (const dirent* const entry = ::readdir(stream.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  return names;
}

void sync(int descriptor, const std::filesystem::path& path) {
  if (::fsync(descriptor) != 0) throw_unwritable(path, errno);
}

void write_all(int descriptor, std::span<const std::byte> bytes,
               const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_unwritable(path, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

int create_in(int directory, const std::string& name) {
  return ::openat(directory, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                  kOwnerOnly);
}

Descriptor open_directory(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor >= 0) return Descriptor(descriptor);
  const int error = errno;
  throw Error(
      error == ENOENT || error == ENOTDIR || error == EACCES ? ErrorCode::not_found : ErrorCode::io,
      path.string() + ": cannot be opened as the directory of a saved session: " +
          error_text(error) + "; check the path");
}

// The new name is on the disk once the directory that has it is.
void make_directory(const std::filesystem::path& path) {
  if (::mkdir(path.c_str(), S_IRWXU) != 0) {
    if (errno == EEXIST) return;
    throw_unwritable(path, errno);
  }
  const std::filesystem::path parent = path.has_parent_path() ? path.parent_path() : ".";
  const Descriptor opened(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.get() >= 0) sync(opened.get(), parent);
}

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}
Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

SavedDirectory SavedDirectory::open_to_load(const std::filesystem::path& path) {
  SavedDirectory directory(path, open_directory(path));
  directory.lock(LOCK_SH);
  return directory;
}

SavedDirectory SavedDirectory::open_to_save(const std::filesystem::path& path) {
  // A trailing slash would make the parent the directory itself.
  const std::filesystem::path plain = path.has_filename() ? path : path.parent_path();
  make_directory(plain);
  SavedDirectory directory(plain, open_directory(plain));
  directory.lock(LOCK_EX);
  directory.require_own_files();
  if (::faccessat(directory.descriptor_.get(), ".", W_OK | X_OK, AT_EACCESS) != 0) {
    throw_unwritable(plain, errno);
  }
  return directory;
}

void SavedDirectory::lock(int how) const {
  if (::flock(descriptor_.get(), how | LOCK_NB) == 0) return;
  const int error = errno;
  if (error == EWOULDBLOCK) {
    throw Error(ErrorCode::io, path_.string() +
                                   ": is in use: another process or session loads from it or saves "
                                   "to it; try again once that is done");
  }
  throw Error(ErrorCode::io, path_.string() + ": cannot be locked: " + error_text(error) +
                                 "; choose a directory on a local disk");
}

void SavedDirectory::require_own_files() const {
  for (const std::string& name : names_in(descriptor_.get(), path_)) {
    if (is_own_name(name)) continue;
    throw Error(ErrorCode::usage, path_.string() +
                                      ": has files that are not of a saved session, such as '" +
                                      name + "'; choose a new or empty directory");
  }
}

bool SavedDirectory::has_manifest() const {
  struct stat status {};
  return ::fstatat(descriptor_.get(), kManifest, &status, AT_SYMLINK_NOFOLLOW) == 0;
}

std::string SavedDirectory::read_manifest() const {
  if (!has_manifest()) {
    throw Error(ErrorCode::not_found,
                path_.string() + ": has no saved session (no manifest.json); check the path");
  }
  const File file = File::open_in(descriptor_.get(), path_, kManifest);
  if (file.size() > kMaxManifestBytes) {
    throw Error(ErrorCode::corrupt, manifest_path().string() + ": has " +
                                        format_bytes(file.size()) +
                                        " and cannot be the manifest of a saved session");
  }
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

File SavedDirectory::open_data(const std::string& name) const {
  if (!is_data_name(name)) {
    throw Error(ErrorCode::corrupt, manifest_path().string() + ": names '" + name +
                                        "' as the file of rows, which is none of its names");
  }
  return File::open_in(descriptor_.get(), path_, name);
}

void SavedDirectory::require_room(std::uint64_t bytes) const {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      bytes > limit.rlim_cur) {
    throw Error(ErrorCode::io, path_.string() + ": the session takes a file of " +
                                   format_bytes(bytes) + ", but RLIMIT_FSIZE allows " +
                                   format_bytes(limit.rlim_cur) + "; raise it with 'ulimit -f'");
  }
  struct statvfs status {};
  if (::fstatvfs(descriptor_.get(), &status) != 0) return;
  const std::uint64_t free =
      static_cast<std::uint64_t>(status.f_bavail) * static_cast<std::uint64_t>(status.f_frsize);
  if (bytes <= free) return;
  throw Error(ErrorCode::io, path_.string() + ": the session takes " + format_bytes(bytes) +
                                 ", and the disk has " + format_bytes(free) +
                                 " left; make room or choose another directory");
}

void SavedDirectory::remove_others(const std::string& keep) const {
  for (const std::string& name : names_in(descriptor_.get(), path_)) {
    const bool is_old = name == kDraft || (is_data_name(name) && name != keep);
    if (is_old) ::unlinkat(descriptor_.get(), name.c_str(), 0);
  }
}

DataFile::DataFile(const SavedDirectory& directory, std::uint64_t bytes) : directory_(&directory) {
  directory.require_room(bytes);
  do {
    id_ = random_id();
    name_ = data_name(id_);
    descriptor_ = Descriptor(create_in(directory.descriptor_.get(), name_));
  } while (descriptor_.get() < 0 && (errno == EEXIST || errno == EINTR));
  if (descriptor_.get() < 0) throw_unwritable(directory.path(), errno);
  int error = 0;
  do {
    const auto size = static_cast<off_t>(bytes);
    error = ::fallocate(descriptor_.get(), 0, 0, size) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == 0 || error == EOPNOTSUPP || error == ENOSYS) return;
  ::unlinkat(directory.descriptor_.get(), name_.c_str(), 0);
  throw_unwritable(directory.path(), error);
}

DataFile::~DataFile() {
  if (is_committed_) return;
  ::unlinkat(directory_->descriptor_.get(), name_.c_str(), 0);
  ::unlinkat(directory_->descriptor_.get(), kDraft, 0);
}

void DataFile::write(std::span<const std::byte> bytes) {
  write_all(descriptor_.get(), bytes, directory_->path() / name_);
  written_ += bytes.size();
  begin_writeback();
}

// The disk writes while the next rows are gathered, so that commit() waits for little. A hint:
// commit() sees the errors.
void DataFile::begin_writeback() {
  constexpr std::uint64_t kAtOnce = 8 << 20;
  if (written_ - begun_ < kAtOnce) return;
  ::sync_file_range(descriptor_.get(), static_cast<off_t>(begun_),
                    static_cast<off_t>(written_ - begun_), SYNC_FILE_RANGE_WRITE);
  begun_ = written_;
}

void DataFile::commit(std::string_view manifest) {
  const int directory = directory_->descriptor_.get();
  sync(descriptor_.get(), directory_->path() / name_);
  const std::filesystem::path draft = directory_->path() / kDraft;
  ::unlinkat(directory, kDraft, 0);  // of a killed save
  {
    const Descriptor file(create_in(directory, kDraft));
    if (file.get() < 0) throw_unwritable(draft, errno);
    write_all(file.get(), std::as_bytes(std::span(manifest)), draft);
    sync(file.get(), draft);
  }
  if (::renameat(directory, kDraft, directory, SavedDirectory::kManifest) != 0) {
    throw_unwritable(directory_->manifest_path(), errno);
  }
  is_committed_ = true;
  sync(directory, directory_->path());
  directory_->remove_others(name_);
}

}  // namespace sluice
