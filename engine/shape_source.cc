#include "engine/shape_source.h"

#include <utility>

#include "engine/tensors.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported, "a shape has sizes alone; give the checkpoint itself");
}

class ShapeTensors : public TensorSource {
 public:
  explicit ShapeTensors(const ModelConfig& config) {
    const ModelTensors tensors = model_tensors(config);
    for (const TensorGroup* group : {&tensors.embedding, &tensors.lm_head, &tensors.final_norm}) {
      add(*group);
    }
    for (const LayerTensors& layer : tensors.layers) {
      for (const TensorGroup* group : layer.all()) add(*group);
    }
  }

  const std::filesystem::path& path() const override { return path_; }
  std::string_view config_name() const override { return "config.json"; }
  std::string_view layer_fields() const override { return "num_hidden_layers"; }
  std::string own_name(std::string_view name) const override { return std::string(name); }
  std::map<std::string_view, SourceTensor> tensors() const override {
    std::map<std::string_view, SourceTensor> all;
    for (const auto& [name, info] : infos_) all[name] = {&info, &path_, 0, info.bytes()};
    return all;
  }
  void require_loadable(const SourceTensor& /*tensor*/) const override {}
  void read(const SourceTensor& /*tensor*/, std::uint64_t /*first*/,
            std::span<std::byte> /*destination*/) const override {
    refuse();
  }
  void require_unchanged() const override {}

 private:
  void add(const TensorGroup& group) {
    for (std::size_t i = 0; i < group.parts.size(); ++i) {
      TensorInfo info;
      info.name = group.parts[i].name;
      info.stored_dtype = "BF16";
      info.dtype = DType::bf16;
      info.shape = group.shape(i);
      info.end = static_cast<std::uint64_t>(info.elements()) * size_of(DType::bf16);
      infos_[info.name] = std::move(info);
    }
  }

  std::filesystem::path path_ = "shape";
  std::map<std::string, TensorInfo> infos_;
};

class ShapeSource : public CheckpointSource {
 public:
  explicit ShapeSource(ModelConfig config) : config_(std::move(config)) {}

  ModelConfig config() const override { return config_; }
  std::unique_ptr<const TensorSource> tensors() const override {
    return std::make_unique<ShapeTensors>(config_);
  }
  std::string missing_tokenizer() const override { return "a shape has no tokenizer"; }
  TokenizerSpec tokenizer(int /*vocabulary*/, std::optional<TokenId> /*bos*/) const override {
    refuse();
  }
  ChatSource chat() const override { refuse(); }

 private:
  ModelConfig config_;
};

}  // namespace

std::unique_ptr<const CheckpointSource> make_shape_source(const ModelConfig& config) {
  return std::make_unique<ShapeSource>(config);
}

}  // namespace sluice
