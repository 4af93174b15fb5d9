// Tries inputs: those of a corpus first, then changed ones, kept as the start of others when their
// answer is a new one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace sluice::fuzz {

inline constexpr std::size_t kMaxLength = 1 << 16;  // bytes of an input

// The input that is being tried, in memory that outlives the process that tries it.
struct Current {
  std::uint64_t runs = 0;  // before it
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
  std::uint64_t runs = 0;  // 0: until `seconds` are over
  double seconds = 60.0;
  std::size_t max_length = 2048;  // bytes of a changed input
};

// Prints a line of what was done. Ends the process with what does not hold on stderr, and with
// `current` set, if there is a finding. False if all inputs, or none, were accepted: then nothing
// was tested.
bool run(const Options& options, Current& current);

// One input only; prints its answer.
void run_input(std::string_view input, const std::filesystem::path& folder, Current& current);

}  // namespace sluice::fuzz
