#include "model/weights.h"

#include <algorithm>
#include <span>
#include <string>

#include "lib/check.h"
#include "lib/element.h"
#include "model/tensors.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Reads the tensors of a checkpoint into a backend.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, Backend& backend)
      : checkpoint_(&checkpoint),
        backend_(&backend),
        queue_(backend.make_queue({.computes = false})) {}

  // Matrices with the same inputs, one below the other.
  std::unique_ptr<Weight> matrix(const TensorGroup& group) {
    std::vector<std::byte> stacked;
    DType dtype = DType::bf16;
    for (std::size_t i = 0; i < group.parts.size(); ++i) {
      const Tensor tensor = checkpoint_->load(group.parts[i].name, group.shape(i));
      check(i == 0 || tensor.dtype == dtype, "matrices of two dtypes in a group");
      dtype = tensor.dtype;
      stacked.insert(stacked.end(), tensor.data.begin(), tensor.data.end());
    }
    return backend_->prepare_weight(
        {stacked.data(), dtype, group.rows(), group.columns, group.columns});
  }

  // Vectors, one after the other, as f32. An empty buffer for an empty group.
  Buffer vector(const TensorGroup& group) {
    std::vector<float> values;
    for (std::size_t part = 0; part < group.parts.size(); ++part) {
      const Tensor tensor = checkpoint_->load(group.parts[part].name, group.shape(part));
      for (std::int64_t i = 0; i < group.parts[part].rows; ++i) {
        const std::size_t offset = static_cast<std::size_t>(i) * size_of(tensor.dtype);
        values.push_back(read_element(tensor.data.data() + offset, tensor.dtype));
      }
    }
    return upload(std::as_bytes(std::span(values)));
  }

  Buffer upload(std::span<const std::byte> bytes) {
    if (bytes.empty()) return {};
    Buffer buffer = backend_->allocate(backend_->info().compute_tier, bytes.size());
    const CopyOp op{buffer.data(), bytes.data(), bytes.size()};
    queue_->copy({&op, 1});
    queue_->synchronize();
    return buffer;
  }

 private:
  const Checkpoint* checkpoint_;
  Backend* backend_;
  std::unique_ptr<Queue> queue_;
};

LayerWeights load_layer(Loader& loader, const LayerTensors& t) {
  LayerWeights w;
  w.input_norm = loader.vector(t.input_norm);
  w.qkv = loader.matrix(t.qkv);
  w.qkv_bias = loader.vector(t.qkv_bias);
  w.q_norm = loader.vector(t.q_norm);
  w.k_norm = loader.vector(t.k_norm);
  w.o = loader.matrix(t.o);
  w.o_bias = loader.vector(t.o_bias);
  w.post_norm = loader.vector(t.post_norm);
  w.gate_up = loader.matrix(t.gate_up);
  w.down = loader.matrix(t.down);
  return w;
}

}  // namespace

WeightSizes weight_sizes(const Checkpoint& checkpoint, const Backend& backend) {
  const ModelTensors tensors = model_tensors(checkpoint.config());
  const auto bytes = [&](const TensorGroup& group) -> std::uint64_t {
    if (group.columns > 0) return backend.weight_bytes(group.rows(), group.columns);
    return static_cast<std::uint64_t>(group.rows()) * sizeof(float);
  };
  const auto stored = [&](const TensorGroup& group) {
    return static_cast<std::uint64_t>(group.rows() * group.columns) * size_of(checkpoint.dtype());
  };
  WeightSizes sizes;
  sizes.total = stored(tensors.embedding) + bytes(tensors.lm_head) + bytes(tensors.final_norm);
  std::uint64_t largest = stored(tensors.embedding);
  for (const LayerTensors& layer : tensors.layers) {
    for (const TensorGroup* group : layer.all()) {
      sizes.total += bytes(*group);
      largest = std::max(largest, stored(*group));
    }
  }
  sizes.transient = 2 * largest;  // as read, and in the compute dtype
  return sizes;
}

ModelWeights load_weights(const Checkpoint& checkpoint, Backend& backend,
                          const std::function<void(double)>& progress) {
  const ModelTensors tensors = model_tensors(checkpoint.config());
  Loader loader(checkpoint, backend);
  const auto report = [&](double share) {
    if (progress) progress(share);
  };
  ModelWeights weights;
  {
    const TensorGroup& group = tensors.embedding;
    const Tensor table = checkpoint.load(group.parts.front().name, group.shape(0));
    weights.embedding_dtype = table.dtype;
    weights.embedding = loader.upload(table.data);
  }
  weights.lm_head = loader.matrix(tensors.lm_head);
  weights.final_norm = loader.vector(tensors.final_norm);
  for (const LayerTensors& layer : tensors.layers) {
    report(static_cast<double>(weights.layers.size() + 1) /
           static_cast<double>(tensors.layers.size() + 1));
    weights.layers.push_back(load_layer(loader, layer));
  }
  report(1.0);
  return weights;
}

}  // namespace sluice
