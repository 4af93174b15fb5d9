// A directory that holds one saved thing: a small manifest and the data file that it names. The
// manifest is the commit point: until it is renamed into place the old one and its data stay valid.
//
//   manifest.json            read first; names the data file
//   rows-0123456789abcdef.bin  a new name for every save
//
// The directory is locked (flock) while it is used, so a killed process leaves no lock behind.
// Several may load at a time; one that saves is alone. All files are opened relative to the
// directory's descriptor and links are refused, so that no name leads out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "io/file.h"

namespace sluice {

// A descriptor that is closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();
  int get() const { return number_; }

 private:
  int number_;
};

class SavedDirectory {
 public:
  static constexpr const char* kManifest = "manifest.json";
  static constexpr std::uint64_t kMaxManifestBytes = 64 << 10;

  // Locks an existing directory. Throws Error{not_found} if there is none, Error{io} if it is being
  // saved to.
  static SavedDirectory open_to_load(const std::filesystem::path& path);
  // The same, alone; creates the directory (mode 0700) if there is none. Throws Error{usage} if it
  // has files that this class did not write, Error{io} if it is in use or cannot be written.
  static SavedDirectory open_to_save(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path manifest_path() const { return path_ / kManifest; }
  bool has_manifest() const;
  // Throws Error{corrupt} if it is longer than kMaxManifestBytes or a link.
  std::string read_manifest() const;
  // Throws Error{corrupt} unless `name` is one that a DataFile may have.
  File open_data(const std::string& name) const;

  // Throws Error{io} if `bytes` more do not fit the disk or RLIMIT_FSIZE.
  void require_room(std::uint64_t bytes) const;

 private:
  friend class DataFile;
  SavedDirectory(std::filesystem::path path, Descriptor descriptor)
      : path_(std::move(path)), descriptor_(std::move(descriptor)) {}

  void lock(int how) const;
  void require_own_files() const;
  // Removes what killed or earlier saves left: every file of this class but the data file `keep`.
  void remove_others(const std::string& keep) const;

  std::filesystem::path path_;
  Descriptor descriptor_;
};

// A data file that is being written. It is removed with the object unless it was committed.
class DataFile {
 public:
  // Creates a file of `bytes` bytes, mode 0600, and reserves its space where the file system can.
  // Throws Error{io}. `directory` was opened to save, and must outlive the file.
  DataFile(const SavedDirectory& directory, std::uint64_t bytes);
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;
  ~DataFile();

  const std::string& name() const { return name_; }
  std::uint64_t id() const { return id_; }  // the number in its name
  std::uint64_t written() const { return written_; }

  // Appends. Throws Error{io}.
  void write(std::span<const std::byte> bytes);
  // Puts data and manifest on the disk, in this order, then removes the earlier data file. Throws
  // Error{io} with the earlier manifest and data in force.
  void commit(std::string_view manifest);

 private:
  void begin_writeback();

  const SavedDirectory* directory_;
  std::uint64_t id_ = 0;
  std::string name_;
  Descriptor descriptor_;
  std::uint64_t written_ = 0;
  std::uint64_t begun_ = 0;  // bytes that the disk was asked to write
  bool is_committed_ = false;
};

}  // namespace sluice
