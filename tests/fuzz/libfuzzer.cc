// Lets libFuzzer drive a fuzzer.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string folder = [] {
    std::string name = (std::filesystem::temp_directory_path() / "sluice_fuzz_XXXXXX").string();
    sluice::fuzz::require(::mkdtemp(name.data()) != nullptr, "a temporary folder can be made");
    return name;
  }();
  sluice::fuzz::answer({reinterpret_cast<const char*>(data), size}, folder);
  return 0;
}
