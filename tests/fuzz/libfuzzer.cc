// Lets libFuzzer drive a fuzzer.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/fuzz.h"
#include "tests/support/temp_dir.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const sluice::testing::TempDir folder;
  sluice::fuzz::answer({reinterpret_cast<const char*>(data), size}, folder.path());
  return 0;
}
