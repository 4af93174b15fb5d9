#include "tools/bench_arrays.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "io/checksum.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "lib/check.h"
#include "lib/text.h"
#include "sluice/element.h"
#include "sluice/errors.h"

namespace sluice::tools {
namespace {

constexpr std::array<const char*, 3> kPartNames = {"q", "k", "v"};
constexpr std::array<const char*, 4> kDimensions = {"layers", "tokens", "heads", "channels"};

[[noreturn]] void refuse_array(const std::string& name, const std::string& what,
                               ErrorCode code = ErrorCode::corrupt) {
  throw Error(code, name + " " + what);
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

std::array<std::int64_t, 4> four_sizes(const std::string& name,
                                       std::span<const std::int64_t> shape) {
  std::array<std::int64_t, 4> sizes{};
  if (shape.size() != sizes.size()) {
    refuse_array(name, "has the shape " + shape_text(shape) + ", not " +
                           std::to_string(sizes.size()) +
                           " dimensions: layers, tokens, heads, head_dim");
  }
  std::copy(shape.begin(), shape.end(), sizes.begin());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes.at(i) > 0) continue;
    refuse_array(name, "has the shape " + shape_text(shape) + ", which has no " +
                           std::string(kDimensions.at(i)));
  }
  return sizes;
}

std::vector<ArrayFile> tensors_of(const std::filesystem::path& path) {
  const auto file = std::make_shared<const SafetensorsFile>(SafetensorsFile::open(path));
  std::vector<ArrayFile> arrays;
  for (const char* const part : kPartNames) {
    const TensorInfo* const tensor = file->find(part);
    if (tensor == nullptr) {
      refuse_array(path.string() + ":",
                   "has no tensor " + in_quotes(part) + "; bench reads q, k and v");
    }
    file->require_loadable(*tensor);
    ArrayFile& array = arrays.emplace_back();
    array.name = path.string() + ": tensor " + in_quotes(part);
    array.dtype = *tensor->dtype;
    array.shape = four_sizes(array.name, tensor->shape);
    array.read = [file, tensor](std::uint64_t first, std::span<std::byte> to) {
      file->require_unchanged();
      file->read(*tensor, first, to);
    };
  }
  return arrays;
}

std::vector<ArrayFile> npy_files_of(const std::filesystem::path& folder) {
  std::vector<ArrayFile> arrays;
  for (const char* const part : kPartNames) {
    const std::filesystem::path path = folder / (std::string(part) + ".npy");
    if (!file_exists(path)) {
      throw Error(ErrorCode::not_found, path.string() +
                                            " is missing; a folder of arrays has q.npy, k.npy "
                                            "and v.npy");
    }
    const auto file = std::make_shared<const NpyFile>(NpyFile::open(path));
    ArrayFile& array = arrays.emplace_back();
    array.name = path.string() + ": its array";
    array.dtype = file->dtype();
    array.shape = four_sizes(array.name, file->shape());
    array.read = [file](std::uint64_t first, std::span<std::byte> to) {
      file->require_unchanged();
      file->read(first, to);
    };
  }
  return arrays;
}

// What KvCache takes.
void require_limits(const ArrayFile& file) {
  constexpr std::array<std::int64_t, 4> kMost = {4096, std::int64_t{1} << 30, 4096, 256};
  for (std::size_t i = 0; i < kMost.size(); ++i) {
    if (file.shape.at(i) <= kMost.at(i)) continue;
    refuse_array(file.name,
                 "has " + std::to_string(file.shape.at(i)) + " " + kDimensions.at(i) +
                     "; Sluice takes up to " + std::to_string(kMost.at(i)),
                 ErrorCode::unsupported);
  }
  if (file.shape.back() % 2 == 0) return;
  refuse_array(file.name,
               "has a head_dim of " + std::to_string(file.shape.back()) + "; it has to be even",
               ErrorCode::unsupported);
}

// Index of the first element that is no finite number, or the number of elements.
std::size_t first_not_finite(std::span<const std::byte> bytes, DType dtype) {
  const std::size_t size = size_of(dtype);
  const std::size_t count = bytes.size() / size;
  std::size_t i = 0;
  while (i < count && std::isfinite(read_element(bytes.data() + i * size, dtype))) ++i;
  return i;
}

}  // namespace

BenchArrays::BenchArrays(std::vector<ArrayFile> files) : files_(std::move(files)) {}

std::unique_ptr<BenchArrays> BenchArrays::open(const std::filesystem::path& path) {
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  std::unique_ptr<BenchArrays> arrays(
      new BenchArrays(is_folder ? npy_files_of(path) : tensors_of(path)));
  arrays->require_shapes();
  return arrays;
}

void BenchArrays::require_shapes() const {
  const ArrayFile& q = array(RowPart::q);
  const ArrayFile& k = array(RowPart::k);
  const ArrayFile& v = array(RowPart::v);
  const auto has = [](std::int64_t count, const char* what) {
    return std::to_string(count) + " " + what;
  };
  if (v.shape != k.shape) {
    refuse_array(v.name, "has the shape " + shape_text(v.shape) + ", and 'k' " +
                             shape_text(k.shape) + "; they have to be the same");
  }
  if (q.shape[0] != k.shape[0]) {
    refuse_array(q.name,
                 "has " + has(q.shape[0], "layers") + ", and 'k' " + std::to_string(k.shape[0]));
  }
  if (q.shape[3] != k.shape[3]) {
    refuse_array(q.name, "has a head_dim of " + std::to_string(q.shape[3]) + ", and 'k' one of " +
                             std::to_string(k.shape[3]));
  }
  if (q.shape[1] >= k.shape[1]) {
    // Heads that come before tokens, as some programs have them, end here, too.
    refuse_array(q.name, "has " + has(q.shape[1], "steps") + ", but 'k' has " +
                             has(k.shape[1], "tokens") +
                             "; it needs those of the steps and at least one before them. "
                             "Arrays are [layers, tokens, heads, head_dim]");
  }
  if (q.shape[2] % k.shape[2] != 0) {
    refuse_array(q.name, "has " + has(q.shape[2], "query heads") +
                             ", which is no multiple of the " + has(k.shape[2], "KV heads") +
                             " of 'k'");
  }
  require_limits(q);
  require_limits(k);
}

KvShape BenchArrays::shape() const {
  const auto& q = array(RowPart::q).shape;
  KvShape shape;
  shape.layers = static_cast<int>(q[0]);
  shape.query_heads = static_cast<int>(q[2]);
  shape.kv_heads = static_cast<int>(array(RowPart::k).shape[2]);
  shape.head_dim = static_cast<int>(q[3]);
  return shape;
}

void BenchArrays::read(RowPart part, int layer, std::int64_t first, std::int64_t count,
                       std::span<std::byte> to) const {
  const ArrayFile& from = array(part);
  const std::size_t bytes = token_bytes(part);
  sluice::check(first >= 0 && count >= 0 && first + count <= from.shape[1] &&
                    to.size() == static_cast<std::size_t>(count) * bytes,
                "tokens that an array does not have");
  from.read(static_cast<std::uint64_t>(layer * from.shape[1] + first) * bytes, to);
}

std::uint64_t BenchArrays::check(const std::function<void(double)>& progress) const {
  constexpr std::size_t kPieceBytes = std::size_t{4} << 20;
  const double rows =
      static_cast<double>(shape().layers) * static_cast<double>(2 * tokens() + steps());
  Checksum sum;
  double done = 0.0;
  std::vector<std::byte> piece;
  for (const RowPart part : {RowPart::q, RowPart::k, RowPart::v}) {
    const ArrayFile& file = array(part);
    sum.add(std::as_bytes(std::span(file.shape)));
    sum.add(std::as_bytes(std::span(&file.dtype, 1)));
    const std::size_t bytes = token_bytes(part);
    const auto most = static_cast<std::int64_t>(std::max<std::size_t>(1, kPieceBytes / bytes));
    for (int layer = 0; layer < shape().layers; ++layer) {
      for (std::int64_t first = 0; first < file.shape[1]; first += most) {
        const std::int64_t count = std::min(most, file.shape[1] - first);
        piece.resize(static_cast<std::size_t>(count) * bytes);
        read(part, layer, first, count, piece);
        const std::size_t bad = first_not_finite(piece, file.dtype) * size_of(file.dtype);
        if (bad < piece.size()) {
          const std::int64_t token = first + static_cast<std::int64_t>(bad / bytes);
          refuse_array(file.name,
                       "has a NaN or an infinity in layer " + std::to_string(layer) +
                           (part == RowPart::q ? ", step " : ", token ") + std::to_string(token),
                       ErrorCode::numeric);
        }
        sum.add(piece);
        done += static_cast<double>(count);
        progress(done / rows);
      }
    }
  }
  return sum.value();
}

}  // namespace sluice::tools
