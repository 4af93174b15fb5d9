// Runs inputs: the corpus first, then changed inputs. Those with a new kind of answer are kept as
// the start of further ones.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace sluice::fuzz {

inline constexpr std::size_t kMaxLength = 1 << 16;  // bytes of an input

// The input under test, in shared memory, so that it outlives the process that runs it.
struct Current {
  std::uint64_t runs = 0;  // before this input
  std::size_t length = 0;
  char bytes[kMaxLength] = {};  // NOLINT(modernize-avoid-c-arrays)

  void set(std::string_view input);
  std::string_view input() const { return {bytes, length}; }
};

struct Options {
  std::string name;  // of the fuzzer
  std::filesystem::path corpus;
  std::filesystem::path folder;  // for the fuzzer's files
  std::uint64_t seed = 1;
  std::uint64_t runs = 0;  // 0: until `seconds` have passed
  double seconds = 60.0;
  std::size_t max_length = 2048;  // bytes of a changed input
};

// Prints a summary line. A finding ends the process, with the violated promise on stderr and
// `current` set to the input. Returns false if all inputs, or none, were accepted, because then
// nothing was tested.
bool run(const Options& options, Current& current);

// Runs one input and prints its answer.
void run_input(std::string_view input, const std::filesystem::path& folder, Current& current);

}  // namespace sluice::fuzz
