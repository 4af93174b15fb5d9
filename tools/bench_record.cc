#include "tools/bench_record.h"

#include <nlohmann/json.hpp>

#include "io/file.h"
#include "lib/bytes.h"
#include "lib/check.h"
#include "sluice/element.h"
#include "sluice/errors.h"
#include "sluice/version.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kLengthBytes = 8;

std::string stored_name(DType dtype) {
  if (dtype == DType::f32) return "F32";
  return dtype == DType::f16 ? "F16" : "BF16";
}

}  // namespace

void require_recordable_to(const std::string& path, const std::string& flag, bool force) {
  if (path.empty()) return;
  if (!force && file_exists(path)) {
    throw Error(ErrorCode::usage,
                path + ": is there already; choose another file for " + flag + ", or give --force");
  }
  require_replaceable(path);
}

RowRecorder::RowRecorder(const std::filesystem::path& path, const KvShape& shape,
                         std::int64_t context, std::int64_t steps)
    : shape_(shape),
      context_(context),
      written_(static_cast<std::size_t>(shape.layers)),
      draft_(path, FileDraft::Name::none) {
  const DType rows = shape.rows.is_coded() ? DType::f32 : shape.rows.element;
  tensors_ = {{{DType::f32, shape.query_heads, steps},
               {rows, shape.kv_heads, context + steps},
               {rows, shape.kv_heads, context + steps}}};
  const std::string head = place_tensors();
  draft_.reserve(tensors_.back().offset + bytes(tensors_.back()));
  draft_.write_at(0, std::as_bytes(std::span(head)));
}

std::uint64_t RowRecorder::row_bytes(const Tensor& tensor) const {
  return bytes_of(std::int64_t{tensor.heads} * shape_.head_dim, size_of(tensor.dtype));
}

std::uint64_t RowRecorder::bytes(const Tensor& tensor) const {
  return static_cast<std::uint64_t>(shape_.layers * tensor.rows) * row_bytes(tensor);
}

std::string RowRecorder::place_tensors() {
  constexpr std::array<const char*, 3> kNames = {"q", "k", "v"};
  nlohmann::json header = {{"__metadata__", {{"written_by", std::string("sluice ") + kVersion}}}};
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    Tensor& tensor = tensors_.at(i);
    tensor.offset = end;
    end += bytes(tensor);
    header[kNames.at(i)] = {{"dtype", stored_name(tensor.dtype)},
                            {"shape", {shape_.layers, tensor.rows, tensor.heads, shape_.head_dim}},
                            {"data_offsets", {tensor.offset, end}}};
  }
  std::string text = header.dump();
  text.resize(static_cast<std::size_t>(round_up(text.size(), kLengthBytes)), ' ');
  for (Tensor& tensor : tensors_) tensor.offset += kLengthBytes + text.size();
  std::string length;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length += static_cast<char>((text.size() >> (8 * i)) & 0xffu);
  }
  return length + text;
}

void RowRecorder::write(RowPart part, int layer, std::int64_t first, std::int64_t count,
                        const float* from, std::int64_t stride) {
  const Tensor& tensor = tensors_.at(static_cast<std::size_t>(part));
  const std::int64_t width = std::int64_t{tensor.heads} * shape_.head_dim;
  buffer_.resize(bytes_of(count * width, size_of(tensor.dtype)));
  std::byte* to = buffer_.data();
  for (std::int64_t row = 0; row < count; ++row) {
    for (std::int64_t i = 0; i < width; ++i, to += size_of(tensor.dtype)) {
      write_element(to, tensor.dtype, from[row * stride + i]);
    }
  }
  const auto at = static_cast<std::uint64_t>(layer * tensor.rows + first);
  draft_.write_at(tensor.offset + at * row_bytes(tensor), buffer_);
}

void RowRecorder::observe(const ObservedRows& rows) {
  std::int64_t& written = written_.at(static_cast<std::size_t>(rows.layer));
  check(written + rows.tokens <= tensors_.back().rows && rows.phase != Phase::correction,
        "more rows than a recording has");
  write(RowPart::k, rows.layer, written, rows.tokens, rows.k, rows.stride);
  write(RowPart::v, rows.layer, written, rows.tokens, rows.v, rows.stride);
  if (written >= context_) {
    write(RowPart::q, rows.layer, written - context_, rows.tokens, rows.q, rows.stride);
  }
  written += rows.tokens;
}

void RowRecorder::finish() {
  for (const std::int64_t written : written_) {
    check(written == tensors_.back().rows, "a recording with rows missing");
  }
  draft_.put_in_place();
}

}  // namespace sluice::tools
