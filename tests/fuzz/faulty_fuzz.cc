// A reader with the faults that the driver must find, each triggered by a word of the input.
#include <cstdlib>
#include <ctime>
#include <memory>
#include <stdexcept>

#include "tests/fuzz/fuzz.h"

namespace sluice::fuzz {
namespace {

void compute_for(double seconds) {
  const std::clock_t end = std::clock() + static_cast<std::clock_t>(seconds * CLOCKS_PER_SEC);
  while (std::clock() < end) {
  }
}

bool read(std::string_view input) {
  const auto has = [&](std::string_view word) {
    return input.find(word) != std::string_view::npos;
  };
  if (has("abort") || has("9223372036854775807")) std::abort();
  if (has("throw")) throw std::runtime_error("not an Error");
  if (has("slow")) compute_for(2.5);
  if (has("large")) return std::make_unique<std::string>(std::size_t{100} << 20, 'x')->empty();
  if (has("leak")) return std::make_unique<std::string>(1000, 'x').release()->empty();
  if (has("internal")) throw Error(ErrorCode::internal, "a code that no input may cause");
  if (!has("count")) throw Error(ErrorCode::usage, "there is no count");
  return true;
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& /*folder*/) {
  return answer_of(
      {ErrorCode::usage}, [&] { return read(input); }, [](bool) { return std::string("counts"); });
}

}  // namespace sluice::fuzz
