#include "io/spool.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>

#include "io/error_text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

[[noreturn]] void throw_unusable(const std::filesystem::path& folder, int error) {
  throw Error(ErrorCode::io, folder.string() + ": a temporary file cannot be written or read: " +
                                 error_text(error) +
                                 "; make room there or set TMPDIR to a folder for such files");
}

std::filesystem::path system_folder() {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(error);
  if (error) throw_unusable("TMPDIR", error.value());
  return folder;
}

}  // namespace

Spool::Spool() : Spool(system_folder()) {}

Spool::Spool(const std::filesystem::path& folder) : folder_(folder), file_(nullptr, &std::fclose) {
  std::string name = (folder / "sluice-XXXXXX").string();
  const int descriptor = ::mkstemp(name.data());
  if (descriptor < 0) throw_unusable(folder_, errno);
  ::unlink(name.c_str());
  file_.reset(::fdopen(descriptor, "w+"));
  if (file_) return;
  const int error = errno;
  ::close(descriptor);
  throw_unusable(folder_, error);
}

void Spool::write(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size()) {
    throw_unusable(folder_, errno);
  }
}

void Spool::read(const std::function<void(std::string_view)>& to) {
  if (std::fflush(file_.get()) != 0 || std::fseek(file_.get(), 0, SEEK_SET) != 0) {
    throw_unusable(folder_, errno);
  }
  std::array<char, 1 << 16> piece;
  std::size_t size = 0;
  while ((size = std::fread(piece.data(), 1, piece.size(), file_.get())) > 0) {
    to({piece.data(), size});
  }
  if (std::ferror(file_.get()) != 0) throw_unusable(folder_, errno);
  std::fseek(file_.get(), 0, SEEK_END);
}

}  // namespace sluice
