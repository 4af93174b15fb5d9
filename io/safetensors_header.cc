#include "io/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::size_t kMaxTensors = 1 << 17;  // the largest files in use have some thousands
constexpr std::size_t kMaxNumbers = 16;       // dimensions of a shape

struct StoredDType {
  std::string_view name;
  std::uint64_t bits;
  std::optional<DType> loaded;
};

// Every dtype of the format; those without a DType may be in a file but cannot be loaded.
constexpr std::array<StoredDType, 22> kDTypes = {{
    {"F32", 32, DType::f32},          {"F16", 16, DType::f16},
    {"BF16", 16, DType::bf16},        {"BOOL", 8, std::nullopt},
    {"U8", 8, std::nullopt},          {"I8", 8, std::nullopt},
    {"U16", 16, std::nullopt},        {"I16", 16, std::nullopt},
    {"U32", 32, std::nullopt},        {"I32", 32, std::nullopt},
    {"U64", 64, std::nullopt},        {"I64", 64, std::nullopt},
    {"F64", 64, std::nullopt},        {"C64", 64, std::nullopt},
    {"F8_E4M3", 8, std::nullopt},     {"F8_E5M2", 8, std::nullopt},
    {"F8_E8M0", 8, std::nullopt},     {"F8_E4M3FNUZ", 8, std::nullopt},
    {"F8_E5M2FNUZ", 8, std::nullopt}, {"F4", 4, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},     {"F6_E3M2", 6, std::nullopt},
}};

// Takes the parser's events one by one and refuses at once what a header cannot have, so that no
// tree of an arbitrary document is ever built.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(std::size_t header_bytes, std::uint64_t data_bytes,
               const std::filesystem::path& file)
      : header_bytes_(header_bytes), data_bytes_(data_bytes), file_(&file) {}

  // The tensors read, once their ranges have been checked against each other.
  TensorMap finish() {
    check_coverage();
    return std::move(tensors_);
  }

  bool null() override { refuse_value("null"); }
  bool boolean(bool) override { refuse_value("a boolean"); }
  bool number_integer(number_integer_t) override { refuse_value("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    refuse_value("a number that is no 64-bit integer");
  }
  bool binary(binary_t&) override { refuse_value("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::numbers) refuse_value("a number");
    if (numbers_.size() == kMaxNumbers) {
      refuse_tensor("has more than " + std::to_string(kMaxNumbers) + " numbers in " +
                    in_quotes(field_));
    }
    numbers_.push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) return true;
    if (place_ != Place::tensor || field_ != "dtype") refuse_value("a string");
    tensor_.stored_dtype = value;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::header;
    } else if (place_ == Place::header) {
      place_ = name_ == kMetadata ? Place::metadata : Place::tensor;
      tensor_ = {};
      keys_.clear();
    } else {
      refuse_value("an object");
    }
    return true;
  }

  bool key(string_t& key) override {
    if (place_ == Place::header) {
      name_ = key;
      if (tensors_.contains(key) || (key == kMetadata && has_metadata_)) {
        refuse("has the key " + in_quotes(key) + " twice");
      }
      return true;
    }
    field_ = key;
    if (!keys_.insert(key).second) refuse_tensor("has the key " + in_quotes(key) + " twice");
    if (place_ == Place::tensor && key != "dtype" && key != "shape" && key != "data_offsets") {
      refuse_tensor("has an unknown key " + in_quotes(key));
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) finish_tensor();
    if (place_ == Place::metadata) has_metadata_ = true;
    place_ = place_ == Place::header ? Place::outside : Place::header;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || field_ == "dtype") refuse_value("an array");
    place_ = Place::numbers;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    if (field_ == "shape") {
      take_shape();
    } else {
      take_offsets();
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    refuse("has a header that is not JSON: " + json_fault(position, header_bytes_));
  }

 private:
  static constexpr std::string_view kMetadata = "__metadata__";

  enum class Place { outside, header, metadata, tensor, numbers };

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::corrupt, file_->string() + ": " + what + "; download it again");
  }
  [[noreturn]] void refuse_tensor(const std::string& what) const {
    refuse((place_ == Place::metadata ? "" : "tensor ") + in_quotes(name_) + " " + what);
  }
  [[noreturn]] void refuse_value(const std::string& what) const {
    if (place_ == Place::outside) refuse("has a header that is " + what + ", not an object");
    if (place_ == Place::header) refuse_tensor("is " + what + ", not an object");
    refuse_tensor("has " + what + " in " + in_quotes(field_));
  }

  void take_shape() {
    // The most elements whose size in bits still fits 64 bits.
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max() / 64;
    std::uint64_t product = 1;
    for (const std::uint64_t size : numbers_) {
      if (size > kMost || (product != 0 && size > kMost / product)) {
        refuse_tensor("has a shape whose product overflows");
      }
      product *= size;
      tensor_.shape.push_back(static_cast<std::int64_t>(size));
    }
  }

  void take_offsets() {
    if (numbers_.size() != 2) {
      refuse_tensor("has " + std::to_string(numbers_.size()) + " data_offsets, not 2");
    }
    tensor_.begin = numbers_[0];
    tensor_.end = numbers_[1];
    if (tensor_.begin > tensor_.end) refuse_tensor("ends before it begins");
    if (tensor_.end > data_bytes_) {
      refuse_tensor("ends at byte " + std::to_string(tensor_.end) + " of the data, but there are " +
                    std::to_string(data_bytes_) + ": the file is incomplete");
    }
  }

  void finish_tensor() {
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      if (!keys_.contains(field)) refuse_tensor("has no " + std::string(field));
    }
    const auto* const dtype =
        std::find_if(kDTypes.begin(), kDTypes.end(),
                     [&](const StoredDType& known) { return known.name == tensor_.stored_dtype; });
    if (dtype == kDTypes.end()) {
      refuse_tensor("has the unknown dtype " + in_quotes(tensor_.stored_dtype));
    }
    const std::uint64_t bits = static_cast<std::uint64_t>(tensor_.elements()) * dtype->bits;
    if (bits % 8 != 0 || bits / 8 != tensor_.bytes()) {
      refuse_tensor("takes " + std::to_string(tensor_.bytes()) +
                    " bytes, but dtype and shape give " + std::to_string(bits) + " bits");
    }
    if (tensors_.size() == kMaxTensors) {
      refuse("has more than " + std::to_string(kMaxTensors) + " tensors");
    }
    tensor_.name = name_;
    tensor_.dtype = dtype->loaded;
    tensors_.emplace(name_, std::move(tensor_));
  }

  void check_coverage() {
    std::vector<const TensorInfo*> in_order;
    for (const auto& [name, tensor] : tensors_) in_order.push_back(&tensor);
    std::sort(in_order.begin(), in_order.end(), [](const TensorInfo* a, const TensorInfo* b) {
      return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
    });
    std::uint64_t covered = 0;
    for (const TensorInfo* tensor : in_order) {
      name_ = tensor->name;
      if (tensor->begin < covered) refuse_tensor("overlaps the tensor before it");
      if (tensor->begin > covered) {
        refuse_tensor("follows a hole of " + std::to_string(tensor->begin - covered) + " bytes");
      }
      covered = tensor->end;
    }
    if (covered != data_bytes_) {
      refuse("has " + std::to_string(data_bytes_ - covered) + " bytes that belong to no tensor");
    }
  }

  std::size_t header_bytes_;
  std::uint64_t data_bytes_;
  const std::filesystem::path* file_;
  TensorMap tensors_;
  bool has_metadata_ = false;

  Place place_ = Place::outside;
  std::string name_;                    // of the tensor that is being read
  std::string field_;                   // the key whose value comes next
  std::set<std::string> keys_;          // of the object that is being read
  std::vector<std::uint64_t> numbers_;  // of the array that is being read
  TensorInfo tensor_;
};

}  // namespace

std::int64_t TensorInfo::elements() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

TensorMap parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                   const std::filesystem::path& file) {
  HeaderReader reader(json.size(), data_bytes, file);
  // The parser would skip a byte order mark before the '{' and take a NUL for the end.
  if (json.empty() || json.front() != '{' || json.find('\0') != std::string_view::npos) {
    throw Error(ErrorCode::corrupt, file.string() +
                                        ": is not a safetensors file: its header is not a JSON "
                                        "object; download it again");
  }
  nlohmann::json::sax_parse(json, &reader);
  return reader.finish();
}

}  // namespace sluice
