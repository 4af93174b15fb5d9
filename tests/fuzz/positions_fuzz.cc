// A trace of positions for `sluice bench --positions`, as it is and with a corrected header length.
// Every list of an accepted one ascends below its token's page.
#include <algorithm>
#include <string>

#include "sluice/types.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/safetensors_input.h"
#include "tools/bench_positions.h"

namespace sluice::fuzz {
namespace {

std::string hold(const tools::PositionTrace& trace) {
  const KvShape& shape = trace.shape();
  std::int64_t most = 0;
  for (std::int64_t step = 0; step < trace.steps(); ++step) {
    const std::int64_t end = (trace.context() + step) / kPageTokens * kPageTokens;
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int head = 0; head < shape.kv_heads; ++head) {
        const auto positions = trace.at(step, layer, head);
        most = std::max<std::int64_t>(most, std::ssize(positions));
        require(positions.empty() || !trace.is_dense(layer), "a dense layer lists nothing");
        std::int64_t before = -1;
        for (const std::int32_t position : positions) {
          require(position > before && position < end, "positions ascend below the token's page");
          before = position;
        }
      }
    }
  }
  require(most == trace.most(), "the longest list is the longest");
  require(trace.missed().empty() || std::ssize(trace.missed()) == trace.steps(),
          "misses are of steps");
  return std::to_string(shape.layers) + " " + std::to_string(trace.steps());
}

Answer answer_file(std::string_view file, const std::filesystem::path& path) {
  write_file(path, file);
  return answer_of(
      {ErrorCode::corrupt, ErrorCode::unsupported},
      [&] { return tools::PositionTrace::open(path); }, hold);
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  Answer as_it_is = answer_file(input, folder / "positions.safetensors");
  if (as_it_is.accepted) return as_it_is;
  return answer_file(with_length(input), folder / "positions.safetensors");
}

}  // namespace sluice::fuzz
