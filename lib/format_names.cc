#include "sluice/format_names.h"

#include <algorithm>
#include <array>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::array kDTypes = {DType::bf16, DType::f16, DType::f32};
constexpr std::array<RowFormat, 5> kRowFormats = {DType::bf16, DType::f16, DType::f32,
                                                  RowCode::int8, RowCode::k8v4};
constexpr std::array kWeightCodes = {WeightCode::elements, WeightCode::int8, WeightCode::int4};

std::vector<std::string> names_of(const auto& formats) {
  std::vector<std::string> names;
  for (const auto& format : formats) names.emplace_back(to_string(format));
  return names;
}

auto parse(const auto& formats, std::string_view name, std::string_view setting) {
  const auto found = std::find_if(formats.begin(), formats.end(),
                                  [&](const auto& format) { return to_string(format) == name; });
  if (found != formats.end()) return *found;
  throw Error(ErrorCode::usage,
              "`" + std::string(setting) + "` is " + alternatives(names_of(formats)));
}

}  // namespace

std::vector<std::string> dtype_names() { return names_of(kDTypes); }
std::vector<std::string> row_format_names() { return names_of(kRowFormats); }
std::vector<std::string> weight_code_names() { return names_of(kWeightCodes); }

DType parse_dtype(std::string_view name, std::string_view setting) {
  return parse(kDTypes, name, setting);
}
RowFormat parse_row_format(std::string_view name, std::string_view setting) {
  return parse(kRowFormats, name, setting);
}
WeightFormat parse_weight_code(std::string_view name, std::string_view setting) {
  return parse(kWeightCodes, name, setting);
}

}  // namespace sluice
