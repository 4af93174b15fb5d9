#include "io/spill_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "io/error_text.h"
#include "lib/bytes.h"
#include "lib/system_files.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

enum class Medium : std::uint8_t { disk, memory, network, user_space };

struct FileSystem {
  std::uint32_t magic;
  std::string_view name;
  Medium medium;
};

constexpr std::uint32_t kOverlay = 0x794c7630;

// f_type of statfs(2); numbers from linux/magic.h and the manual page.
constexpr std::array kFileSystems = {
    FileSystem{0x01021994, "tmpfs", Medium::memory},
    FileSystem{0x858458f6, "ramfs", Medium::memory},
    FileSystem{0x958458f6, "hugetlbfs", Medium::memory},
    FileSystem{0x00006969, "nfs", Medium::network},
    FileSystem{0x0000517b, "smb", Medium::network},
    FileSystem{0xff534d42, "cifs", Medium::network},
    FileSystem{0xfe534d42, "smb2", Medium::network},
    FileSystem{0x01021997, "9p", Medium::network},
    FileSystem{0x00c36400, "ceph", Medium::network},
    FileSystem{0x5346414f, "afs", Medium::network},
    FileSystem{0x73757245, "coda", Medium::network},
    FileSystem{0x0bd00bd0, "lustre", Medium::network},
    FileSystem{0x65735546, "fuse", Medium::user_space},
    FileSystem{0x0000ef53, "ext4", Medium::disk},
    FileSystem{0x58465342, "xfs", Medium::disk},
    FileSystem{0x9123683e, "btrfs", Medium::disk},
    FileSystem{0xf2f52010, "f2fs", Medium::disk},
    FileSystem{0x2fc12fc1, "zfs", Medium::disk},
    FileSystem{kOverlay, "overlay", Medium::disk},
};

const FileSystem* find_file_system(std::uint32_t magic) {
  const auto* const found = std::find_if(kFileSystems.begin(), kFileSystems.end(),
                                         [&](const auto& one) { return one.magic == magic; });
  return found != kFileSystems.end() ? found : nullptr;
}

std::string file_system_name(std::uint32_t magic) {
  if (const FileSystem* const found = find_file_system(magic)) return std::string(found->name);
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "0x%x", magic);
  return text.data();
}

std::optional<struct statfs> statfs_of(const std::filesystem::path& path) {
  struct statfs status {};
  if (::statfs(path.c_str(), &status) != 0) return std::nullopt;
  return status;
}

std::string refusal(const FileSystem& file_system, const std::string& name) {
  constexpr std::string_view kRemedy = "; name a directory on a local disk (ext4, xfs, btrfs)";
  switch (file_system.medium) {
    case Medium::memory:
      return "is on " + name + ", which keeps files in memory" + std::string(kRemedy);
    case Medium::network:
      return "is on " + name + ", a network file system" + std::string(kRemedy);
    case Medium::user_space:
      return "is on " + name + ", a file system in user space" + std::string(kRemedy);
    case Medium::disk:
      break;
  }
  return "";
}

// The directory in which an overlay mount keeps what is written, from its options in mountinfo
// (proc(5)). Empty if this process cannot know it.
std::filesystem::path upper_directory(const std::filesystem::path& directory) {
  struct stat status {};
  if (::stat(directory.c_str(), &status) != 0) return {};
  std::array<char, 32> device{};
  std::snprintf(device.data(), device.size(), "%u:%u", major(status.st_dev), minor(status.st_dev));
  const std::string mounts = system_text("/proc/self/mountinfo");
  for (const std::string_view line : lines_of(mounts)) {
    const std::vector<std::string_view> words = words_of(line);
    if (words.size() < 3 || words[2] != device.data()) continue;
    constexpr std::string_view kKey = "upperdir=";
    const std::string_view options = words.back();
    const std::size_t start = options.find(kKey);
    if (start == std::string_view::npos) continue;
    const std::string_view rest = options.substr(start + kKey.size());
    return std::filesystem::path(rest.substr(0, rest.find(',')));
  }
  return {};
}

void require_local_disk(const std::filesystem::path& directory, std::uint32_t magic) {
  const FileSystem* found = find_file_system(magic);
  std::string name = file_system_name(magic);
  if (magic == kOverlay) {
    const auto upper = statfs_of(upper_directory(directory));
    if (!upper) return;
    found = find_file_system(static_cast<std::uint32_t>(upper->f_type));
    if (found != nullptr) name = "overlay over " + std::string(found->name);
  }
  if (found == nullptr) return;
  const std::string message = refusal(*found, name);
  if (message.empty()) return;
  throw Error(ErrorCode::unsupported, directory.string() + ": " + message);
}

void require_directory(const std::filesystem::path& directory) {
  struct stat status {};
  if (::stat(directory.c_str(), &status) != 0) {
    throw Error(ErrorCode::not_found, directory.string() + ": cannot be used for spilled rows: " +
                                          error_text(errno) + "; name an existing directory");
  }
  if (!S_ISDIR(status.st_mode)) {
    throw Error(ErrorCode::not_found,
                directory.string() + ": is not a directory; name one for spilled rows");
  }
}

std::string needed_and_free(const std::filesystem::path& directory, std::uint64_t bytes) {
  const auto status = statfs_of(directory);
  const std::uint64_t free = status ? static_cast<std::uint64_t>(status->f_bavail) *
                                          static_cast<std::uint64_t>(status->f_bsize)
                                    : 0;
  return "needs " + format_bytes(bytes) + " for spilled rows, and " + format_bytes(free) +
         " are free";
}

[[noreturn]] void throw_no_room(const std::filesystem::path& directory, std::uint64_t bytes,
                                int error) {
  throw Error(ErrorCode::io, directory.string() + ": " + needed_and_free(directory, bytes) + ": " +
                                 error_text(error) + "; make room or name another directory");
}

[[noreturn]] void throw_create_failed(const std::filesystem::path& directory, std::uint64_t bytes,
                                      int error) {
  if (error == EOPNOTSUPP || error == EISDIR || error == ENOENT) {
    throw Error(ErrorCode::unsupported,
                directory.string() +
                    ": its file system has no unnamed files (O_TMPFILE), so that a killed process "
                    "would leave its file behind; name a directory on ext4, xfs or btrfs");
  }
  throw_no_room(directory, bytes, error);
}

// The signal of an exceeded RLIMIT_FSIZE would end the process before any error is returned.
void require_file_size(const std::filesystem::path& directory, std::uint64_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (bytes <= limit.rlim_cur) return;
  throw Error(ErrorCode::io, directory.string() + ": " + needed_and_free(directory, bytes) +
                                 ", but RLIMIT_FSIZE allows files of " +
                                 format_bytes(limit.rlim_cur) + "; raise it with 'ulimit -f'");
}

void reserve(int descriptor, const std::filesystem::path& directory, std::uint64_t bytes) {
  int error = 0;
  do {
    error = ::fallocate(descriptor, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == 0) return;
  if (error == EOPNOTSUPP || error == ENOSYS) {
    throw Error(ErrorCode::unsupported,
                directory.string() +
                    ": its file system cannot reserve space (fallocate), so that it could be full "
                    "in mid-run; name a directory on ext4, xfs or btrfs");
  }
  throw_no_room(directory, bytes, error);
}

}  // namespace

SpillFile SpillFile::create(const std::filesystem::path& directory, std::uint64_t bytes) {
  require_directory(directory);
  const auto status = statfs_of(directory);
  if (!status) throw_create_failed(directory, bytes, errno);
  const auto magic = static_cast<std::uint32_t>(status->f_type);
  require_local_disk(directory, magic);
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    throw_no_room(directory, bytes, EFBIG);
  }
  require_file_size(directory, bytes);

  SpillFile file;
  file.directory_ = directory;
  file.file_system_ = file_system_name(magic);
  file.descriptor_ =
      ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (file.descriptor_ < 0) throw_create_failed(directory, bytes, errno);
  // Checked first although fallocate() checks, too: some file systems fill up before they refuse.
  const std::uint64_t free =
      static_cast<std::uint64_t>(status->f_bavail) * static_cast<std::uint64_t>(status->f_bsize);
  if (bytes > free) throw_no_room(directory, bytes, ENOSPC);
  reserve(file.descriptor_, directory, bytes);
  file.size_ = bytes;
  return file;
}

SpillFile::SpillFile(SpillFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      size_(std::exchange(other.size_, 0)),
      direct_(other.direct_),
      directory_(std::move(other.directory_)),
      file_system_(std::move(other.file_system_)) {}

SpillFile& SpillFile::operator=(SpillFile&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  std::swap(direct_, other.direct_);
  std::swap(directory_, other.directory_);
  std::swap(file_system_, other.file_system_);
  return *this;
}

SpillFile::~SpillFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool SpillFile::set_direct(bool direct) {
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0) return false;
  const int wanted = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
  if (::fcntl(descriptor_, F_SETFL, wanted) != 0) return false;
  direct_ = direct;
  return true;
}

}  // namespace sluice
