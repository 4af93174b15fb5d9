#include "engine/fingerprint.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensors.h"
#include "io/checksum.h"

namespace sluice {
namespace {

constexpr std::uint64_t kProbe = 4096;  // bytes at each end of a tensor

class Fingerprint {
 public:
  void add(std::int64_t value) { sum_.add(std::as_bytes(std::span(&value, 1))); }
  void add(std::span<const float> values) {
    add(std::ssize(values));
    sum_.add(std::as_bytes(values));
  }
  // With its length, so that neighbours cannot share characters.
  void add(std::string_view text) {
    add(std::ssize(text));
    sum_.add(std::as_bytes(std::span(text)));
  }
  void add(std::span<const std::byte> bytes) { sum_.add(bytes); }
  std::uint64_t value() const { return sum_.value(); }

 private:
  Checksum sum_;
};

void add_config(Fingerprint& print, const ModelConfig& config) {
  print.add(std::string_view(config.architecture));
  for (const int value :
       {config.hidden_size, config.intermediate_size, config.num_hidden_layers,
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size,
        int{config.qkv_bias}, int{config.o_bias}, int{config.qk_norm}}) {
    print.add(std::int64_t{value});
  }
  const float factor = static_cast<float>(config.rope.attention_factor());
  print.add(std::span(&config.rms_norm_eps, 1));
  print.add(std::span(&factor, 1));
  print.add(std::span<const float>(inverse_frequencies(config)));
}

void add_tensor(Fingerprint& print, const Checkpoint& checkpoint, const std::string& name) {
  const TensorInfo& info = checkpoint.info(name);
  print.add(std::string_view(name));
  const DType dtype = info.dtype.value();  // check_tensors() refuses others
  std::uint64_t bytes = size_of(dtype);
  for (const std::int64_t dimension : info.shape) {
    print.add(dimension);
    bytes *= static_cast<std::uint64_t>(dimension);
  }
  print.add(to_string(dtype));
  std::vector<std::byte> probe(static_cast<std::size_t>(std::min(kProbe, bytes)));
  checkpoint.read(name, 0, probe);
  print.add(std::span<const std::byte>(probe));
  checkpoint.read(name, bytes - probe.size(), probe);
  print.add(std::span<const std::byte>(probe));
}

}  // namespace

std::uint64_t fingerprint_of(const Checkpoint& checkpoint) {
  Fingerprint print;
  add_config(print, checkpoint.config());
  const ModelTensors tensors = model_tensors(checkpoint.config());
  const auto add = [&](const TensorGroup& group) {
    for (const NamedRows& part : group.parts) add_tensor(print, checkpoint, part.name);
  };
  add(tensors.embedding);
  add(tensors.lm_head);
  add(tensors.final_norm);
  for (const LayerTensors& layer : tensors.layers) {
    for (const TensorGroup* const group : layer.all()) add(*group);
  }
  return print.value();
}

}  // namespace sluice
