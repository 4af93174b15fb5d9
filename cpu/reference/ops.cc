#include "cpu/reference/ops.h"

#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "sluice/half.h"

namespace sluice::cpu {

float read_element(const void* data, DType dtype, std::int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return dtype == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

void write_element(void* data, DType dtype, std::int64_t index, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] =
        dtype == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
  }
}

namespace {

float at(const Matrix& m, std::int64_t row, std::int64_t column) {
  return read_element(m.data, m.dtype, row * m.stride + column);
}

void put(const Matrix& m, std::int64_t row, std::int64_t column, float value) {
  write_element(m.data, m.dtype, row * m.stride + column, value);
}

// 1 / rms of `n` values.
double inverse_rms(const float* x, std::int64_t n, float epsilon) {
  double squares = 0;
  for (std::int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
  return 1.0 / std::sqrt(squares / static_cast<double>(n) + epsilon);
}

// Writes K, then V.
void write_row(std::byte* row, const float* k, const float* v, const KvShape& shape) {
  if (shape.rows.is_coded()) {
    return encode_row(shape.rows.code, k, v, shape.head_dim, row);
  }
  for (int c = 0; c < shape.head_dim; ++c) {
    write_element(row, shape.rows.element, c, k[c]);
    write_element(row + shape.value_offset(), shape.rows.element, c, v[c]);
  }
}

void rotate(float* x, std::int64_t position, const RopeParams& p) {
  const int half = p.head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * p.inverse_frequency[i];
    const double cosine = p.factor * std::cos(angle);
    const double sine = p.factor * std::sin(angle);
    const double low = x[i];
    const double high = x[i + half];
    x[i] = static_cast<float>(low * cosine - high * sine);
    x[i + half] = static_cast<float>(high * cosine + low * sine);
  }
}

}  // namespace

void reference_embed(const EmbedParams& p) {
  for (std::int64_t i = 0; i < p.y.rows; ++i) {
    const bool known = p.ids[i] >= 0 && p.ids[i] < p.table.rows;
    for (std::int64_t c = 0; c < p.table.columns; ++c) {
      put(p.y, i, c, known ? at(p.table, p.ids[i], c) : 0.0f);
    }
  }
}

namespace {

// Uses several sums, because their additions need not wait for each other.
double dot(const std::vector<double>& x, const float* y) {
  std::array<double, 8> sums = {};
  std::size_t i = 0;
  for (; i + sums.size() <= x.size(); i += sums.size()) {
    for (std::size_t s = 0; s < sums.size(); ++s) sums[s] += x[i + s] * y[i + s];
  }
  for (; i < x.size(); ++i) sums[0] += x[i] * y[i];
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace

void reference_linear(const LinearParams& p, const float* weight) {
  std::vector<double> x(static_cast<std::size_t>(p.weight->inputs()));
  for (std::int64_t t = 0; t < p.x.rows; ++t) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = at(p.x, t, static_cast<std::int64_t>(i));
    for (std::int64_t o = 0; o < p.weight->outputs(); ++o) {
      double sum = p.accumulate ? at(p.y, t, o) : 0;
      if (p.bias != nullptr) sum += p.bias[o];
      sum += dot(x, weight + o * p.weight->inputs());
      put(p.y, t, o, static_cast<float>(sum));
    }
  }
}

void reference_rms_norm(const RmsNormParams& p) {
  for (std::int64_t t = 0; t < p.x.rows; ++t) {
    const float* const x = static_cast<const float*>(p.x.data) + t * p.x.stride;
    const double factor = inverse_rms(x, p.x.columns, p.epsilon);
    for (std::int64_t c = 0; c < p.x.columns; ++c) {
      put(p.y, t, c, static_cast<float>(x[c] * factor * p.weight[c]));
    }
  }
}

void reference_rope(const RopeParams& p) {
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    for (int h = 0; h < p.heads(); ++h) {
      float* const x = p.x + t * p.stride + static_cast<std::int64_t>(h) * p.head_dim;
      if (const float* const norm = p.norm_of(h)) {
        const double factor = inverse_rms(x, p.head_dim, p.norm_epsilon);
        for (int c = 0; c < p.head_dim; ++c) {
          x[c] = static_cast<float>(x[c] * factor * norm[c]);
        }
      }
      rotate(x, p.position_of(t), p);
    }
  }
}

void reference_swiglu(const SwigluParams& p) {
  const std::int64_t columns = p.y.columns;
  for (std::int64_t t = 0; t < p.y.rows; ++t) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const double gate = at(p.gate_up, t, c);
      const double up = at(p.gate_up, t, columns + c);
      put(p.y, t, c, static_cast<float>(gate / (1.0 + std::exp(-gate)) * up));
    }
  }
}

void reference_cast(const CastParams& p) {
  for (std::int64_t row = 0; row < p.from.rows; ++row) {
    for (std::int64_t c = 0; c < p.from.columns; ++c) put(p.to, row, c, at(p.from, row, c));
  }
}

void reference_sample(const SampleParams& p) {
  const auto* row = static_cast<const float*>(p.logits.data);
  for (std::size_t i = 0; i < p.tokens.size(); ++i, row += p.logits.stride) {
    p.tokens[i] = draw_token({row, static_cast<std::size_t>(p.logits.columns)}, p.draws[i]);
  }
}

void reference_append(const AppendParams& p) {
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    for (int h = 0; h < p.shape.kv_heads; ++h) {
      const std::int64_t from = t * p.stride + static_cast<std::int64_t>(h) * p.shape.head_dim;
      std::byte* const row =
          p.rows[static_cast<std::size_t>(h)] + static_cast<std::size_t>(t) * p.shape.row_bytes();
      write_row(row, p.k + from, p.v + from, p.shape);
    }
  }
}

void reference_append_batch(const AppendBatchParams& p) {
  const auto row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  const int d = p.shape.head_dim;
  for (std::int64_t t = 0; t < p.batch.count; ++t) {
    const BatchToken& token = p.batch.tokens[t];
    const PageSlots& page = p.rows.page(token.sequence, token.pages());
    const std::int64_t offset = token.position % kPageTokens * row_bytes;
    for (int h = 0; h < p.shape.kv_heads; ++h) {
      const std::int64_t from = t * p.stride + static_cast<std::int64_t>(h) * d;
      std::vector<std::byte> row(p.shape.row_bytes());
      write_row(row.data(), p.k + from, p.v + from, p.shape);
      const std::size_t bytes = p.shape.rows.payload_bytes(d);
      if (page.device != PageSlots::kNone) {
        std::memcpy(p.rows.in_device(h, page.device, row_bytes) + offset, row.data(), bytes);
      }
      if (p.rows.is_in_host(page)) {
        std::memcpy(p.rows.in_host(h, page.host, row_bytes) + offset, row.data(), bytes);
      }
      if (p.sums == nullptr) continue;
      for (int c = 0; c < d; ++c) {
        float& sum = p.sums[(std::int64_t{token.sequence} * p.shape.kv_heads + h) * d + c];
        sum += value_element(p.shape, row.data(), c);
        if (p.token_sums != nullptr) p.token_sums[(t * p.shape.kv_heads + h) * d + c] = sum;
      }
    }
  }
}

}  // namespace sluice::cpu
