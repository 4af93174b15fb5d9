#include "engine/value_basis.h"

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>

#include "engine/run_together.h"
#include "engine/tensors.h"
#include "lib/value_tiles.h"
#include "sluice/element.h"
#include "sluice/errors.h"
#include "sluice/value_basis.h"

namespace sluice {
namespace {

// Columns of weights in fp64: so few that Eigen adds up their products in one go, whatever caches
// the processor has, so that rounding is the same everywhere.
constexpr std::int64_t kColumnsAtOnce = 128;

// The value projection of a layer.
const std::string& value_weights(const LayerTensors& layer) { return layer.qkv.parts.at(2).name; }

// One KV head's weights, as stored: [head_dim, hidden].
std::size_t head_bytes(const ModelConfig& config, DType dtype) {
  return static_cast<std::size_t>(config.head_dim) * static_cast<std::size_t>(config.hidden_size) *
         size_of(dtype);
}

// W W^T in fp64. `weights`: [rows, columns].
Eigen::MatrixXd gram(std::span<const std::byte> weights, DType dtype, std::int64_t rows,
                     std::int64_t columns) {
  Eigen::MatrixXd sum = Eigen::MatrixXd::Zero(rows, rows);
  for (std::int64_t first = 0; first < columns; first += kColumnsAtOnce) {
    Eigen::MatrixXd part(rows, std::min(kColumnsAtOnce, columns - first));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < part.cols(); ++i) {
        const auto at = static_cast<std::size_t>(row * columns + first + i);
        part(row, i) =
            static_cast<double>(read_element(weights.data() + at * size_of(dtype), dtype));
      }
    }
    sum.selfadjointView<Eigen::Lower>().rankUpdate(part);
  }
  return sum;
}

// Eigenvectors have no sign of their own; the largest element becomes positive.
void write_vector(const Eigen::VectorXd& vector, float* out) {
  Eigen::Index largest = 0;
  vector.cwiseAbs().maxCoeff(&largest);
  const double sign = vector(largest) < 0.0 ? -1.0 : 1.0;
  for (const double x : vector) *out++ = static_cast<float>(sign * x);
}

class BasisReader {
 public:
  explicit BasisReader(const Checkpoint& checkpoint)
      : checkpoint_(&checkpoint),
        config_(checkpoint.config()),
        tensors_(model_tensors(checkpoint.config())) {}

  std::size_t heads() const {
    return static_cast<std::size_t>(config_.num_hidden_layers) *
           static_cast<std::size_t>(config_.num_key_value_heads);
  }

  // Writes the basis of a layer's KV head, `number` in [0, heads()).
  void read(std::size_t number, std::vector<float>& bases) const {
    const auto kv_heads = static_cast<std::size_t>(config_.num_key_value_heads);
    const int d = config_.head_dim;
    const std::string& name = value_weights(tensors_.layers[number / kv_heads]);
    const DType dtype = checkpoint_->info(name).dtype.value();
    std::vector<std::byte> weights(head_bytes(config_, dtype));
    checkpoint_->read(name, number % kv_heads * weights.size(), weights);
    try {
      const std::vector<float> basis = sluice::value_basis(weights, dtype, d);
      std::copy(basis.begin(), basis.end(),
                bases.begin() + static_cast<std::int64_t>(number) * ValueTiles::basis_floats(d));
    } catch (const Error& error) {
      throw Error(error.code(), checkpoint_->file_of(name).string() + ": tensor " +
                                    checkpoint_->own_name(name) + ": " + error.what());
    }
  }

 private:
  const Checkpoint* checkpoint_;
  const ModelConfig& config_;
  ModelTensors tensors_;
};

constexpr int kMostHeadDim = 256;

}  // namespace

std::vector<float> value_basis(std::span<const std::byte> weights, DType dtype, int head_dim) {
  if (head_dim < 2 || head_dim > kMostHeadDim || head_dim % 2 != 0) {
    throw Error(ErrorCode::usage, "value basis: head_dim is even, 2 to 256");
  }
  const std::size_t column_bytes = static_cast<std::size_t>(head_dim) * size_of(dtype);
  if (weights.empty() || weights.size() % column_bytes != 0) {
    throw Error(ErrorCode::usage,
                "value basis: the weights are not " + std::to_string(head_dim) + " rows");
  }
  const Eigen::MatrixXd products =
      gram(weights, dtype, head_dim, static_cast<std::int64_t>(weights.size() / column_bytes));
  if (!products.allFinite()) {
    throw Error(ErrorCode::numeric, "value basis: weights are NaN or infinite");
  }
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(products);
  if (solver.info() != Eigen::Success) {
    throw Error(ErrorCode::numeric, "value basis: no eigenvectors were found");
  }
  std::vector<float> basis(static_cast<std::size_t>(ValueTiles::basis_floats(head_dim)));
  float* out = basis.data();
  // Eigenvalues ascend.
  for (int i = 0; i < head_dim / 2; ++i, out += head_dim) {
    write_vector(solver.eigenvectors().col(head_dim - 1 - i), out);
  }
  return basis;
}

bool halves_values(std::span<const Policy> policies, int layers) {
  for (const Policy& policy : policies) {
    for (int layer = 0; layer < layers; ++layer) {
      if (policy.compensates(layer, Compensation::values) && policy.at(layer).values.half) {
        return true;
      }
    }
  }
  return false;
}

std::uint64_t value_basis_bytes(const ModelConfig& config) {
  return static_cast<std::uint64_t>(config.num_hidden_layers) *
         static_cast<std::uint64_t>(config.num_key_value_heads) *
         static_cast<std::uint64_t>(ValueTiles::basis_floats(config.head_dim)) * sizeof(float);
}

std::uint64_t value_basis_scratch_bytes(const Checkpoint& checkpoint, int threads) {
  const ModelConfig& config = checkpoint.config();
  const auto d = static_cast<std::uint64_t>(config.head_dim);
  // The weights as stored and the columns, then products, vectors and the solver's copies.
  const std::uint64_t of_thread = head_bytes(config, DType::f32) +
                                  (d * kColumnsAtOnce + 4 * d * d) * sizeof(double) +
                                  checkpoint.scratch_bytes();
  return of_thread * static_cast<std::uint64_t>(threads);
}

std::vector<float> value_basis(const Checkpoint& checkpoint, int threads) {
  const BasisReader reader(checkpoint);
  std::vector<float> bases(value_basis_bytes(checkpoint.config()) / sizeof(float));
  std::atomic<std::size_t> next = 0;
  const auto work = [&](std::size_t) {
    for (std::size_t i = next++; i < reader.heads(); i = next++) reader.read(i, bases);
  };
  run_together(std::min<std::size_t>(static_cast<std::size_t>(threads), reader.heads()), work,
               [&] { next = reader.heads(); });
  checkpoint.require_unchanged();
  return bases;
}

}  // namespace sluice
