#include "engine/weights.h"

#include <algorithm>
#include <span>
#include <vector>

#include "engine/loader.h"
#include "engine/tensors.h"

namespace sluice {
namespace {

std::uint64_t elements_of(const TensorGroup& group) {
  return static_cast<std::uint64_t>(group.rows() * std::max<std::int64_t>(group.columns, 1));
}

WeightShape shape_of(const TensorGroup& group, const WeightFormat& format) {
  return {group.rows(), group.columns, format};
}

struct MatrixFormat {
  WeightFormat format;
  bool has_codes = false;  // of the checkpoint's files
};

// The formats of a model's matrices on a backend.
class MatrixFormats {
 public:
  MatrixFormats(const Checkpoint& checkpoint, const Backend& backend, const WeightChoice& choice)
      : checkpoint_(&checkpoint), backend_(&backend), choice_(choice) {}

  MatrixFormat of(const TensorGroup& group) const {
    if (!choice_) return stored(group);
    return {choice_->is_coded() ? *choice_ : backend_->weight_format()};
  }
  // V loses most by 4 bits: in sluice-22m its 3 % of the weights cost a third of the KL divergence.
  // With Q, K and V in 8 bits it falls from 0.108 to 0.073.
  MatrixFormat of_qkv(const TensorGroup& group) const {
    if (choice_ == WeightFormat(WeightCode::int4)) return {WeightCode::int8};
    return of(group);
  }

 private:
  // The codes of all parts, or int8, which has them all.
  MatrixFormat stored(const TensorGroup& group) const {
    WeightCode code = checkpoint_->code(group.parts.front().name);
    for (const NamedRows& part : group.parts) {
      const WeightCode own = checkpoint_->code(part.name);
      if (own == WeightCode::elements) return {backend_->weight_format()};
      if (own != code) code = WeightCode::int8;
    }
    if (!backend_->stores(code)) code = WeightCode::int8;
    if (!backend_->stores(code)) return {backend_->weight_format()};
    return {code, true};
  }

  const Checkpoint* checkpoint_;
  const Backend* backend_;
  WeightChoice choice_;
};

// Allocates memory for a model's tensors and records where each goes.
class Places {
 public:
  explicit Places(Backend& backend) : backend_(&backend) {}

  // Stacks matrices with the same inputs by rows.
  std::unique_ptr<Weight> matrix(const TensorGroup& group, const MatrixFormat& of) {
    std::unique_ptr<Weight> weight = backend_->make_weight(shape_of(group, of.format));
    all_.push_back({&group, weight.get(), nullptr, of.format, of.has_codes});
    return weight;
  }

  // Concatenates tensors. An empty group gets an empty buffer.
  Buffer rows(const TensorGroup& group, DType dtype) {
    Buffer buffer =
        backend_->allocate(backend_->info().compute_tier, elements_of(group) * size_of(dtype));
    all_.push_back({&group, nullptr, buffer.data(), dtype});
    return buffer;
  }
  Buffer vector(const TensorGroup& group) { return rows(group, DType::f32); }

  std::span<const TensorPlace> all() const { return all_; }

 private:
  Backend* backend_;
  std::vector<TensorPlace> all_;
};

LayerWeights layer_weights(Places& places, const LayerTensors& t, const MatrixFormats& formats) {
  LayerWeights w;
  w.input_norm = places.vector(t.input_norm);
  w.qkv = places.matrix(t.qkv, formats.of_qkv(t.qkv));
  w.qkv_bias = places.vector(t.qkv_bias);
  w.q_norm = places.vector(t.q_norm);
  w.k_norm = places.vector(t.k_norm);
  w.o = places.matrix(t.o, formats.of(t.o));
  w.o_bias = places.vector(t.o_bias);
  w.post_norm = places.vector(t.post_norm);
  w.gate_up = places.matrix(t.gate_up, formats.of(t.gate_up));
  w.down = places.matrix(t.down, formats.of(t.down));
  return w;
}

// Returns true if the LM head uses the embedding table as it is stored.
bool head_is_table(const Checkpoint& checkpoint, const Backend& backend,
                   const WeightFormat& format) {  // of the head
  return checkpoint.config().tie_word_embeddings &&
         (format.is_coded() || backend.dense_weights() == checkpoint.dtype());
}

}  // namespace

void require_formats(const Checkpoint& checkpoint, const Backend& backend,
                     const WeightChoice& choice) {
  const ModelTensors tensors = model_tensors(checkpoint.config());
  const MatrixFormats formats(checkpoint, backend, choice);
  backend.require_format(shape_of(tensors.lm_head, formats.of(tensors.lm_head).format));
  for (const TensorGroup* group : tensors.layers.front().all()) {
    if (group->columns > 0) backend.require_format(shape_of(*group, formats.of(*group).format));
  }
}

WeightSizes weight_sizes(const Checkpoint& checkpoint, const Backend& backend,
                         const WeightChoice& choice, int readers) {
  const ModelTensors tensors = model_tensors(checkpoint.config());
  const MatrixFormats formats(checkpoint, backend, choice);
  WeightSizes sizes;
  std::vector<TensorPlace> places;
  const auto add = [&](const TensorGroup& group, const MatrixFormat& of, std::uint64_t bytes) {
    sizes.total += bytes;
    places.push_back({&group, nullptr, nullptr, of.format, of.has_codes});
  };
  std::uint64_t product_bytes = 0;
  const auto add_vector = [&](const TensorGroup& group) {
    add(group, {DType::f32}, elements_of(group) * sizeof(float));
  };
  const auto add_matrix = [&](const TensorGroup& group, const MatrixFormat& of) {
    const WeightShape shape = shape_of(group, of.format);
    add(group, of, backend.weight_bytes(shape));
    product_bytes = std::max(product_bytes, backend.product_bytes(shape));
    const auto known = std::find(sizes.products.begin(), sizes.products.end(), shape);
    if (known == sizes.products.end()) sizes.products.push_back(shape);
  };
  const MatrixFormat head = formats.of(tensors.lm_head);
  if (!head_is_table(checkpoint, backend, head.format)) {
    const MatrixFormat table = formats.of(tensors.embedding);
    if (table.format.is_coded()) {
      add(tensors.embedding, table,
          backend.weight_bytes(shape_of(tensors.embedding, table.format)));
    } else {
      add(tensors.embedding, {checkpoint.dtype()},
          elements_of(tensors.embedding) * size_of(checkpoint.dtype()));
    }
  }
  add_matrix(tensors.lm_head, head);
  add_vector(tensors.final_norm);
  for (const LayerTensors& layer : tensors.layers) {
    for (const TensorGroup* group : layer.all()) {
      if (group->columns == 0) {
        add_vector(*group);
      } else {
        add_matrix(*group, group == &layer.qkv ? formats.of_qkv(*group) : formats.of(*group));
      }
    }
  }
  sizes.total += product_bytes;
  sizes.transient = reading_bytes(checkpoint, backend, places, {readers});
  return sizes;
}

ModelWeights load_weights(const Checkpoint& checkpoint, Backend& backend,
                          const WeightChoice& choice, int readers,
                          const std::function<void(double)>& progress) {
  const ModelTensors tensors = model_tensors(checkpoint.config());
  const MatrixFormats formats(checkpoint, backend, choice);
  Places places(backend);
  ModelWeights weights;
  const MatrixFormat head = formats.of(tensors.lm_head);
  const MatrixFormat table = formats.of(tensors.embedding);
  weights.lm_head = places.matrix(tensors.lm_head, head);
  if (head_is_table(checkpoint, backend, head.format)) {
    weights.table = weights.lm_head->dense_rows();
    if (head.format.is_coded()) weights.coded_table = weights.lm_head.get();
  } else if (table.format.is_coded()) {
    weights.coded_embedding = places.matrix(tensors.embedding, table);
    weights.coded_table = weights.coded_embedding.get();
  } else {
    weights.embedding = places.rows(tensors.embedding, checkpoint.dtype());
    const std::int64_t columns = tensors.embedding.columns;
    weights.table = {weights.embedding.data(), checkpoint.dtype(), tensors.embedding.rows(),
                     columns, columns};
  }
  weights.final_norm = places.vector(tensors.final_norm);
  for (const LayerTensors& layer : tensors.layers) {
    weights.layers.push_back(layer_weights(places, layer, formats));
  }
  read_tensors(checkpoint, backend, places.all(), {readers}, progress);
  checkpoint.require_unchanged();
  return weights;
}

}  // namespace sluice
