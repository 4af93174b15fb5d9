// Files that are replaced: whole or not at all.
#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace sluice {

// What is to take the place of whatever `path` is, with the permissions of the file that is there.
// It is written beside it first, under a name that nobody can have prepared, so `path` is never
// seen half written and no link is followed. All of it throws Error{io} and leaves `path` as it
// was; a draft that is not put in place is gone with the object.
class FileDraft {
 public:
  explicit FileDraft(const std::filesystem::path& path);
  FileDraft(const FileDraft&) = delete;
  FileDraft& operator=(const FileDraft&) = delete;
  ~FileDraft();

  void write(std::string_view text);
  void put_in_place();
  // The same, but false where the system refuses to put it there, as it does with what is mounted.
  bool try_put_in_place();

 private:
  std::filesystem::path path_;
  std::string draft_;  // empty once it is in place
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

// Puts a file with this text there. Throws what FileDraft throws.
void replace_file(const std::filesystem::path& path, std::string_view text);

// Throws what replace_file would throw before it writes: for those who will have work to store.
void require_replaceable(const std::filesystem::path& path);

}  // namespace sluice
