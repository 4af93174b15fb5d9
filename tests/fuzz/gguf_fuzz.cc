// A GGUF file. In an accepted file the tensors lie in it without overlap, have as many bytes as
// their shapes and types say, and can be read and decoded; every value of the metadata is read by
// each accessor or refused. The model, the tokenizer and the chat template in it are accepted, too,
// or refused; what is accepted can be read, and encodes a text into ids of the model.
#include <algorithm>
#include <map>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/checkpoint_source.h"
#include "engine/tensors.h"
#include "io/gguf.h"
#include "sluice/chat.h"
#include "sluice/tokenizer.h"
#include "tests/fuzz/fuzz.h"

namespace sluice::fuzz {
namespace {

constexpr std::size_t kMostEntries = std::size_t{1} << 20;

void decode_tensor(const GgufFile& file, const GgufTensor& tensor) {
  const GgufType& type = *tensor.type;
  const std::int64_t blocks = tensor.elements() / type.block;
  require(static_cast<std::uint64_t>(blocks * type.bytes) == tensor.bytes,
          "a tensor has the bytes of its shape");
  std::vector<std::byte> bytes(static_cast<std::size_t>(type.bytes));
  std::vector<float> weights(static_cast<std::size_t>(type.block));
  for (std::int64_t i = 0; i < blocks; ++i) {
    file.read(tensor, static_cast<std::uint64_t>(i * type.bytes), bytes);
    if (type.decode != nullptr) type.decode(bytes.data(), 1, weights.data());
  }
}

void read_values(const GgufMetadata& metadata) {
  for (const auto& [key, value] : metadata.values()) {
    const auto try_read = [](const auto& read) {
      answer_of(
          {ErrorCode::corrupt}, [&] { return read(), true; }, [](bool) { return std::string(); });
    };
    try_read([&] { metadata.integer(key, 0, 1 << 20); });
    try_read([&] { metadata.number(key, -1.0, 1.0); });
    try_read([&] { metadata.boolean(key); });
    try_read([&] { metadata.string(key); });
    try_read([&] { metadata.strings(key, kMostEntries); });
    try_read([&] { metadata.integers(key, kMostEntries); });
  }
}

std::string hold(const std::vector<GgufFile>& parts) {
  std::string types;
  for (const GgufFile& file : parts) {
    read_values(file.metadata());
    std::map<std::uint64_t, std::uint64_t> ranges;
    for (const auto& [name, tensor] : file.tensors()) {
      decode_tensor(file, tensor);
      require(ranges.emplace(tensor.begin, tensor.begin + tensor.bytes).second,
              "tensors begin at different bytes");
      types += std::string(tensor.type->name) + " ";
    }
    std::uint64_t covered = 0;
    for (const auto& [begin, end] : ranges) {
      require(begin >= covered, "tensors do not overlap");
      covered = end;
    }
  }
  return types;
}

// Rows of codes, in a matrix's own code and in int8, are the same at once and one by one.
void hold_codes(const Checkpoint& checkpoint, std::string_view name) {
  const std::vector<std::int64_t>& shape = checkpoint.info(name).shape;
  for (const WeightFormat& format :
       {WeightFormat(checkpoint.code(name)), WeightFormat(WeightCode::int8)}) {
    const std::size_t row_bytes = format.row_bytes(shape[1]);
    std::vector<std::byte> whole(static_cast<std::size_t>(shape[0]) * row_bytes);
    checkpoint.read_codes(name, 0, format.code, whole);
    std::vector<std::byte> row(row_bytes);
    for (std::int64_t i = 0; i < shape[0]; ++i) {
      checkpoint.read_codes(name, i, format.code, row);
      require(std::equal(row.begin(), row.end(),
                         whole.begin() + i * static_cast<std::ptrdiff_t>(row_bytes)),
              "a row of codes is the same by itself");
    }
  }
}

std::string hold_model(const Checkpoint& checkpoint) {
  for (const std::string_view name : checkpoint.names()) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(checkpoint.info(name).bytes()));
    checkpoint.read(name, 0, bytes);
    if (checkpoint.code(name) != WeightCode::elements) hold_codes(checkpoint, name);
  }
  return checkpoint.config().architecture;
}

std::string hold_tokenizer(const Tokenizer& tokenizer) {
  for (const TokenId id : tokenizer.encode("It's a b<|c|>\n 12345")) {
    require(id >= 0 && id < tokenizer.vocabulary(), "ids are of the model");
  }
  return std::to_string(tokenizer.prefix().size());
}

// What the parts of the model are, or why they are refused.
std::string answers_of_model(const std::filesystem::path& path) {
  constexpr int kVocabulary = 260;
  const std::initializer_list<ErrorCode> codes = {ErrorCode::corrupt, ErrorCode::unsupported,
                                                  ErrorCode::tokenizer};
  const auto open = [&] {
    Checkpoint checkpoint = Checkpoint::open(path);
    check_tensors(checkpoint);
    return checkpoint;
  };
  const Answer model = answer_of(codes, open, hold_model);
  const auto load = [&] { return Tokenizer::load_checkpoint(path, kVocabulary); };
  const Answer tokenizer = answer_of(codes, load, hold_tokenizer);
  std::string text = model.text + tokenizer.text;
  if (!model.accepted || !tokenizer.accepted) return text;
  const Tokenizer loaded = load();
  const auto chat = [&] { return ChatFormat::load(path, loaded); };
  return text + answer_of(codes, chat, [](const ChatFormat& format) {
                  return std::to_string(format.end_tokens().size());
                }).text;
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "model.gguf";
  write_file(path, input);
  Answer answer = answer_of(
      {ErrorCode::corrupt, ErrorCode::unsupported, ErrorCode::not_found, ErrorCode::usage},
      [&] { return open_gguf(path); }, hold);
  if (answer.accepted) answer.text += answers_of_model(path);
  return answer;
}

}  // namespace sluice::fuzz
