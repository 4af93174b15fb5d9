// The tensors of a checkpoint, whatever files they are in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "io/safetensors_header.h"
#include "lib/check.h"
#include "sluice/weight_format.h"

namespace sluice {

struct SourceTensor {
  const TensorInfo* info = nullptr;             // as it is read: its bytes are those of its dtype
  const std::filesystem::path* file = nullptr;  // that it is in
  std::size_t part = 0;                         // number of that file among the source's
  std::uint64_t stored_bytes = 0;               // in the file
  // The narrowest code that has a matrix's weights as the file does; elements: it has no codes.
  WeightCode code = WeightCode::elements;
};

// Has tensors under the names and with the rows of Hugging Face checkpoints; what the pointers of
// SourceTensor point to lives as long as it. Tensors can be read from several threads.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // The folder or file that a user gave.
  virtual const std::filesystem::path& path() const = 0;
  // The name, in messages, of the file that shapes of tensors are compared with: "config.json".
  virtual std::string_view config_name() const = 0;
  // The fields there that say which layers and biases there are, for messages.
  virtual std::string_view layer_fields() const = 0;
  // The source's own name of a tensor, for messages.
  virtual std::string own_name(std::string_view name) const = 0;

  virtual std::map<std::string_view, SourceTensor> tensors() const = 0;

  // Throws Error{unsupported} unless the tensor's elements can be read.
  virtual void require_loadable(const SourceTensor& tensor) const = 0;
  // Fills `destination` with a tensor's elements from their byte `first` on; both begin and end
  // between elements. Throws Error{io} if reading fails.
  virtual void read(const SourceTensor& tensor, std::uint64_t first,
                    std::span<std::byte> destination) const = 0;
  // Fills `destination` with coded rows of a tensor with codes from its row `first` on, in its own
  // code or in int8. Throws Error{io} if reading fails.
  virtual void read_codes(const SourceTensor& /*tensor*/, std::int64_t /*first*/,
                          WeightCode /*code*/, std::span<std::byte> /*destination*/) const {
    check(false, "codes of a source that has none");
  }
  // Bytes of host memory that a call of read() or read_codes() takes besides its destination.
  virtual std::uint64_t scratch_bytes() const { return 0; }
  // Throws Error{io} if a file was written to since it was opened.
  virtual void require_unchanged() const = 0;
};

}  // namespace sluice
