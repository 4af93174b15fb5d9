#include "engine/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "engine/checkpoint_source.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

}  // namespace

Checkpoint::Checkpoint(ModelConfig config, std::unique_ptr<const TensorSource> source)
    : config_(std::move(config)), source_(std::move(source)), tensors_(source_->tensors()) {}

Checkpoint Checkpoint::open(const std::filesystem::path& path) {
  return open(*CheckpointSource::open(path));
}

Checkpoint Checkpoint::open(const CheckpointSource& source) {
  ModelConfig config = source.config();
  Checkpoint checkpoint(std::move(config), source.tensors());
  checkpoint.settle_tied_embeddings();
  const SourceTensor& embedding = checkpoint.locate(kEmbedding);
  checkpoint.source_->require_loadable(embedding);
  checkpoint.dtype_ = embedding.info->dtype.value();
  return checkpoint;
}

// As in transformers 5 (PreTrainedModel.tie_weights): if one of the two is missing, the other
// serves as both; two that differ are not tied.
void Checkpoint::settle_tied_embeddings() {
  if (!config_.tie_word_embeddings || !has(kHead)) return;
  if (has(kEmbedding)) {
    config_.tie_word_embeddings = are_equal(kEmbedding, kHead);
  } else {
    require(kHead, {config_.vocab_size, config_.hidden_size});
    auto head = tensors_.extract(kHead);
    head.key() = kEmbedding;
    tensors_.insert(std::move(head));
  }
}

// Compares all bytes.
bool Checkpoint::are_equal(std::string_view first, std::string_view second) const {
  const TensorInfo& info = this->info(first);
  const TensorInfo& other = this->info(second);
  if (info.shape != other.shape || info.stored_dtype != other.stored_dtype) return false;
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 20;
  std::vector<std::byte> piece(std::min(kPiece, info.bytes()));
  std::vector<std::byte> other_piece(piece.size());
  for (std::uint64_t at = 0; at < info.bytes(); at += piece.size()) {
    const auto bytes = static_cast<std::size_t>(std::min(kPiece, info.bytes() - at));
    read(first, at, std::span(piece).first(bytes));
    read(second, at, std::span(other_piece).first(bytes));
    if (std::memcmp(piece.data(), other_piece.data(), bytes) != 0) return false;
  }
  return true;
}

std::vector<std::string_view> Checkpoint::names() const {
  std::vector<std::string_view> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

const std::filesystem::path& Checkpoint::file_of(std::string_view name) const {
  return *locate(name).file;
}

const SourceTensor& Checkpoint::locate(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw Error(ErrorCode::corrupt, source_->path().string() + ": the checkpoint has no tensor " +
                                        in_quotes(own_name(name)) + ", which its " +
                                        std::string(config_name()) +
                                        " calls for; download it again");
  }
  return found->second;
}

std::int64_t Checkpoint::parameters() const {
  std::int64_t sum = 0;
  for (const auto& [name, tensor] : tensors_) sum += tensor.info->elements();
  return sum;
}

std::uint64_t Checkpoint::parameter_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& [name, tensor] : tensors_) sum += tensor.stored_bytes;
  return sum;
}

std::string Checkpoint::stored_types() const {
  std::map<std::string, std::uint64_t> bytes;
  for (const auto& [name, tensor] : tensors_) {
    bytes[tensor.info->stored_dtype] += tensor.stored_bytes;
  }
  std::vector<std::pair<std::string, std::uint64_t>> types(bytes.begin(), bytes.end());
  std::sort(types.begin(), types.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  std::string names;
  for (const auto& [type, size] : types) names += (names.empty() ? "" : ", ") + type;
  return names;
}

void Checkpoint::require(std::string_view name, const std::vector<std::int64_t>& shape) const {
  const SourceTensor& tensor = locate(name);
  const TensorInfo& info = *tensor.info;
  const std::string named = tensor.file->string() + ": tensor " + in_quotes(own_name(name)) +
                            " is " + shape_text(info.shape);
  if (info.elements() == 0) {
    throw Error(ErrorCode::corrupt, named +
                                        ", so it was saved without its values, as training in "
                                        "parts does; save the checkpoint again with all values "
                                        "gathered");
  }
  if (info.shape != shape) {
    throw Error(ErrorCode::corrupt, named + " but " + std::string(config_name()) + " calls for " +
                                        shape_text(shape) + "; download the checkpoint again");
  }
  source_->require_loadable(tensor);
}

bool Checkpoint::has_codes() const {
  return std::any_of(tensors_.begin(), tensors_.end(),
                     [](const auto& entry) { return entry.second.code != WeightCode::elements; });
}

void Checkpoint::read_codes(std::string_view name, std::int64_t first, WeightCode code,
                            std::span<std::byte> destination) const {
  source_->read_codes(locate(name), first, code, destination);
}

void Checkpoint::read(std::string_view name, std::uint64_t first,
                      std::span<std::byte> destination) const {
  source_->read(locate(name), first, destination);
}

}  // namespace sluice
