// Tensors that are read in pieces by several threads are those that a plain read gives.
#include "engine/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/weights.h"
#include "tests/io/test_files.h"
#include "tests/support/backends.h"
#include "tests/support/elements.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::encoded;
using testing::expect_error;
using testing::NamedBackend;
using testing::rounded;
using testing::TempDir;

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kConfig = R"({"model_type": "llama", "hidden_size": 64,
  "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 2,
  "max_position_embeddings": 16})";

std::string name_of(DType dtype) {
  return dtype == DType::f32 ? "F32" : dtype == DType::f16 ? "F16" : "BF16";
}

// A checkpoint of any tensors, written one after the other.
class MadeUp {
 public:
  MadeUp() { add(kEmbedding, {2, 64}, DType::bf16, std::vector<float>(128, 1.0f)); }

  void add(const std::string& name, const std::vector<std::int64_t>& shape, DType dtype,
           const std::vector<float>& values) {
    const std::vector<std::byte> bytes = encoded(values, dtype);
    const std::size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    header_[name] = {
        {"dtype", name_of(dtype)}, {"shape", shape}, {"data_offsets", {begin, data_.size()}}};
  }

  Checkpoint open() const {
    dir_.write("config.json", kConfig);
    dir_.write("model.safetensors", testing::safetensors(header_.dump(), data_));
    return Checkpoint::open(dir_.path());
  }

  // As if another program had cut the file that is open.
  void cut(std::size_t bytes) const {
    const std::filesystem::path path = dir_.path() / "model.safetensors";
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - bytes);
  }

 private:
  TempDir dir_;
  nlohmann::json header_;
  std::string data_;
};

// A group of random parts, where it goes, and the values that should be there.
struct Case {
  TensorGroup group;
  DType wanted = DType::f32;  // of memory
  std::unique_ptr<Weight> weight;
  Buffer memory;
  std::vector<float> expected;

  TensorPlace place() const { return {&group, weight.get(), memory.data(), wanted}; }
};

class LoaderParity : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { device_ = testing::make_or_skip(GetParam()); }

  DType any_dtype() {
    return std::vector{DType::f32, DType::f16, DType::bf16}.at(
        static_cast<std::size_t>(random_.integer(0, 2)));
  }

  // Adds a part of `rows` to the group.
  void add_part(Case& c, MadeUp& file, std::int64_t rows, DType stored) {
    const std::string name = "t" + std::to_string(names_++);
    const std::int64_t columns = std::max<std::int64_t>(c.group.columns, 1);
    const std::vector<float> values = rounded(random_.normal(rows * columns), stored);
    c.group.parts.push_back({name, rows});
    file.add(name, c.group.shape(c.group.parts.size() - 1), stored, values);
    c.expected.insert(c.expected.end(), values.begin(), values.end());
  }

  // Matrices one below the other, whose parts do not end where a backend's blocks do.
  Case weight_case(MadeUp& file) {
    Case c;
    c.group.columns = 16 * random_.integer(1, 12);
    const DType stored = any_dtype();
    for (std::int64_t parts = random_.integer(1, 3); parts > 0; --parts) {
      add_part(c, file, 8 * random_.integer(1, 40), stored);
    }
    c.weight = device_->backend->make_weight(
        {c.group.rows(), c.group.columns, device_->backend->weight_format()});
    const std::optional<DType> dense = device_->backend->dense_weights();
    c.expected = rounded(c.expected, dense.value_or(device_->info().compute_dtype));
    return c;
  }

  // A matrix as it is stored.
  Case table_case(MadeUp& file) {
    Case c;
    c.group.columns = random_.integer(1, 200);
    c.wanted = any_dtype();
    add_part(c, file, random_.integer(1, 300), c.wanted);
    allocate(c);
    return c;
  }

  // Vectors in f32, whatever each is stored in. None of an empty group.
  Case vector_case(MadeUp& file) {
    Case c;
    for (std::int64_t parts = random_.integer(0, 3); parts > 0; --parts) {
      add_part(c, file, random_.integer(1, 500), any_dtype());
    }
    allocate(c);
    return c;
  }

  void allocate(Case& c) {
    c.memory =
        device_->allocate(device_->info().compute_tier, c.expected.size() * size_of(c.wanted));
  }

  // Products with unit vectors are the weights themselves.
  std::vector<float> values_of(const Weight& weight) {
    const DType compute = device_->info().compute_dtype;
    const std::int64_t inputs = weight.inputs();
    const std::int64_t outputs = weight.outputs();
    std::vector<float> units(static_cast<std::size_t>(inputs * inputs));
    for (std::size_t i = 0; i < units.size(); i += static_cast<std::size_t>(inputs) + 1) {
      units[i] = 1.0f;
    }
    const Buffer x = testing::upload(*device_, encoded(units, compute));
    const Buffer y =
        testing::upload(*device_, std::vector<float>(static_cast<std::size_t>(inputs * outputs)));
    device_->queue->run(LinearParams{{x.data(), compute, inputs, inputs, inputs},
                                     &weight,
                                     nullptr,
                                     {y.data(), DType::f32, inputs, outputs, outputs}});
    const std::vector<float> columns = testing::values_of(*device_, y, DType::f32);
    std::vector<float> rows(columns.size());
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const auto output = static_cast<std::int64_t>(i) % outputs;
      const auto input = static_cast<std::int64_t>(i) / outputs;
      rows[static_cast<std::size_t>(output * inputs + input)] = columns[i];
    }
    return rows;
  }

  std::vector<float> values_of(const Case& c) {
    if (c.weight != nullptr) return values_of(*c.weight);
    return testing::values_of(*device_, c.memory, c.wanted);
  }

  const std::uint64_t seed_ = testing::seed(31);
  testing::Random random_{seed_};
  std::unique_ptr<testing::Device> device_;
  int names_ = 0;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

std::vector<TensorPlace> places_of(const std::vector<Case>& cases) {
  std::vector<TensorPlace> places;
  for (const Case& c : cases) places.push_back(c.place());
  return places;
}

// Pieces from one row to whole tensors, by one thread to five.
TEST_P(LoaderParity, GivesWhatAPlainReadGives) {
  for (int round = 0; round < 12; ++round) {
    MadeUp file;
    std::vector<Case> cases;
    for (int i = 0; i < 3; ++i) {
      cases.push_back(weight_case(file));
      cases.push_back(table_case(file));
      cases.push_back(vector_case(file));
    }
    const Checkpoint checkpoint = file.open();
    const std::vector<TensorPlace> places = places_of(cases);
    ReadOptions options;
    options.readers = static_cast<int>(random_.integer(1, 5));
    options.piece_bytes = round % 3 == 0 ? 0 : random_.integer(1, 20'000);
    SCOPED_TRACE(::testing::Message()
                 << options.readers << " readers, " << options.piece_bytes << " bytes");
    read_tensors(checkpoint, *device_->backend, places, options, {});
    for (const Case& c : cases) {
      if (c.group.empty()) continue;
      EXPECT_EQ(values_of(c), c.expected) << c.group.parts.front().name;
    }
  }
}

TEST_P(LoaderParity, TakesTheHostMemoryThatItSays) {
  MadeUp file;
  std::vector<Case> cases;
  for (int i = 0; i < 3; ++i) cases.push_back(weight_case(file));
  const Checkpoint checkpoint = file.open();
  const std::vector<TensorPlace> places = places_of(cases);
  MemoryAccount& account = device_->backend->account(Tier::host);
  const std::uint64_t before = account.used();
  // The peak of what was before lies above what is in use now by less than this takes.
  const ReadOptions options{7, 0};
  const std::uint64_t bytes = reading_bytes(checkpoint, *device_->backend, places, options);
  ASSERT_GT(before + bytes, account.peak());
  read_tensors(checkpoint, *device_->backend, places, options, {});
  EXPECT_EQ(account.peak(), before + bytes);
  EXPECT_EQ(account.used(), before);
}

TEST_P(LoaderParity, AFileThatShrinksIsAnIoErrorWhoeverReadsIt) {
  MadeUp file;
  std::vector<Case> cases;
  for (int i = 0; i < 4; ++i) cases.push_back(weight_case(file));
  const Checkpoint checkpoint = file.open();
  const std::vector<TensorPlace> places = places_of(cases);
  file.cut(1);
  for (const int readers : {1, 4}) {
    expect_error(ErrorCode::io, "model.safetensors: ends at byte", [&] {
      read_tensors(checkpoint, *device_->backend, places, {readers, 1000}, {});
    });
  }
}

TEST_P(LoaderParity, ProgressIsToldByTheCallerAndMayStopIt) {
  MadeUp file;
  std::vector<Case> cases;
  cases.push_back(weight_case(file));
  const Checkpoint checkpoint = file.open();
  const std::vector<TensorPlace> places = places_of(cases);
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<double> shares;
  read_tensors(checkpoint, *device_->backend, places, {3, 100}, [&](double share) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    shares.push_back(share);
  });
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  EXPECT_GE(shares.front(), 0.0);
  EXPECT_EQ(shares.back(), 1.0);
  EXPECT_THROW(read_tensors(checkpoint, *device_->backend, places, {3, 100},
                            [](double) { throw std::runtime_error("enough"); }),
               std::runtime_error);
}

// What weight_sizes() says is what load_weights() holds. Embeddings that are tied to the head are
// there once, if the head's rows are what is stored.
TEST_P(LoaderParity, HoldsTiedEmbeddingsOnceWhereItCan) {
  const Checkpoint checkpoint =
      Checkpoint::open(std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m");
  ASSERT_TRUE(checkpoint.config().tie_word_embeddings);
  Backend& backend = *device_->backend;
  const MemoryAccount& account = backend.account(backend.info().compute_tier);
  const std::uint64_t before = account.used();
  const ModelWeights weights = load_weights(checkpoint, backend, backend.weight_format(), 2, {});
  EXPECT_EQ(account.used() - before,
            weight_sizes(checkpoint, backend, backend.weight_format(), 2).total);
  const bool is_once = backend.dense_weights() == checkpoint.dtype();
  EXPECT_EQ(weights.embedding.bytes() == 0, is_once);
  EXPECT_EQ(weights.table.data == weights.lm_head->dense_rows().data, is_once);
  EXPECT_EQ(weights.table.rows, checkpoint.config().vocab_size);
  EXPECT_EQ(weights.table.dtype, checkpoint.dtype());
}

// All, and one that computes in f32 with weights of 16 bits.
std::vector<NamedBackend> backends_and_weights() {
  std::vector<NamedBackend> all = testing::backends();
  all.push_back({"cpu_f32_of_bf16", [] {
                   cpu::CpuOptions options;
                   options.threads = 2;
                   options.compute = DType::f32;
                   options.weight_dtype = DType::bf16;
                   return std::make_unique<cpu::CpuBackend>(options);
                 }});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, LoaderParity, ::testing::ValuesIn(backends_and_weights()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
