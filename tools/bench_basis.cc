#include "tools/bench_basis.h"

#include <algorithm>
#include <cstddef>
#include <span>

#include "sluice/element.h"
#include "sluice/value_basis.h"

namespace sluice::tools {
namespace {

constexpr std::int64_t kMostTokens = 1024;

// One head's values, [tokens, heads, head_dim], as rows of channels: [head_dim, tokens].
std::vector<float> channels_of(const std::vector<std::byte>& values, DType dtype,
                               const KvShape& shape, std::int64_t tokens, int head) {
  std::vector<float> channels;
  for (int c = 0; c < shape.head_dim; ++c) {
    for (std::int64_t token = 0; token < tokens; ++token) {
      const std::int64_t at = (token * shape.kv_heads + head) * shape.head_dim + c;
      channels.push_back(
          read_element(values.data() + static_cast<std::size_t>(at) * size_of(dtype), dtype));
    }
  }
  return channels;
}

}  // namespace

std::vector<float> basis_of_rows(const BenchRows& rows, std::int64_t first, std::int64_t tokens) {
  const KvShape shape = rows.shape();
  const DType dtype = rows.dtype(RowPart::v);
  const std::int64_t count = std::min(tokens, kMostTokens);
  std::vector<std::byte> values(static_cast<std::size_t>(count * shape.kv_heads * shape.head_dim) *
                                size_of(dtype));
  std::vector<float> basis;
  for (int layer = 0; layer < shape.layers; ++layer) {
    rows.read(RowPart::v, layer, first, count, values);
    for (int head = 0; head < shape.kv_heads; ++head) {
      const std::vector<float> channels = channels_of(values, dtype, shape, count, head);
      const std::vector<float> own =
          value_basis(std::as_bytes(std::span(channels)), DType::f32, shape.head_dim);
      basis.insert(basis.end(), own.begin(), own.end());
    }
  }
  return basis;
}

}  // namespace sluice::tools
