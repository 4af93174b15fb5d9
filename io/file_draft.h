// Files that are replaced: whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace sluice {

// A file that replaces `path` once it is complete, with the permissions of the existing file. It is
// written beside `path` under an unguessable name, so `path` is never seen half written and no link
// is followed. Functions throw Error{io} and leave `path` as it was; a draft that is not put in
// place is removed with the object.
class FileDraft {
 public:
  // The name of a draft until it is put in place. Where the file system can, `none` leaves nothing
  // behind if the process is killed, which matters for files that take minutes to write.
  enum class Name : std::uint8_t { beside, none };

  explicit FileDraft(const std::filesystem::path& path, Name name = Name::beside);
  FileDraft(const FileDraft&) = delete;
  FileDraft& operator=(const FileDraft&) = delete;
  ~FileDraft();

  void write(std::string_view text);
  // For drafts that are not written in order: takes the disk space of `bytes` bytes, and fills part
  // of it. Not mixed with write().
  void reserve(std::uint64_t bytes);
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void put_in_place();
  // The same, but returns false if the system refuses the rename, as it does onto a mount point.
  bool try_put_in_place();

 private:
  // Gives a draft without a name one beside `path`.
  void link_beside();

  std::filesystem::path path_;
  std::string draft_;  // empty without a name, and once it is in place
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

// Puts a file with this text there. Throws what FileDraft throws.
void replace_file(const std::filesystem::path& path, std::string_view text);

// Throws what replace_file would throw before it writes: for those who will have work to store.
void require_replaceable(const std::filesystem::path& path);

}  // namespace sluice
