// The module sluice._sluice: errors, policies, and what the other files bind.
#include <algorithm>
#include <array>
#include <cctype>
#include <exception>

#include "bindings/python/src/common.h"
#include "sluice/version.h"

namespace sluice::python {
namespace {

constexpr std::array kErrors{"UsageError",     "NotFoundError", "CorruptError", "UnsupportedError",
                             "TokenizerError", "PromptError",   "CapError",     "StorageError",
                             "InternalError",  "NumericError"};
static_assert(kErrors.size() == static_cast<std::size_t>(ErrorCode::numeric) + 1);

// sluice.Error and a class for every ErrorCode, which last as long as the interpreter.
struct Classes {
  nb::object base;
  std::array<nb::object, kErrors.size()> by_code;
};

nb::object new_class(const std::string& name, nb::handle base, const char* code) {
  nb::dict attributes;
  attributes["code"] = code;
  const std::string full = "sluice._sluice." + name;
  return nb::steal(PyErr_NewException(full.c_str(), base.ptr(), attributes.ptr()));
}

void bind_errors(nb::module_& module) {
  auto* const classes = new Classes;
  classes->base = new_class("Error", PyExc_Exception, "");
  module.attr("Error") = classes->base;
  for (std::size_t i = 0; i < kErrors.size(); ++i) {
    const std::string name(to_string(static_cast<ErrorCode>(i)));
    classes->by_code[i] = new_class(kErrors[i], classes->base, name.c_str());
    module.attr(kErrors[i]) = classes->by_code[i];
  }
  nb::register_exception_translator(
      [](const std::exception_ptr& exception, void* payload) {
        try {
          std::rethrow_exception(exception);
        } catch (const Error& error) {
          const auto& all = *static_cast<const Classes*>(payload);
          const nb::object& kind = all.by_code[static_cast<std::size_t>(error.code())];
          PyErr_SetString(kind.ptr(), error.what());
        }
      },
      classes);
}

}  // namespace

Floats numpy_copy(std::span<const float> from) {
  auto* const data = new float[std::max<std::size_t>(from.size(), 1)];
  nb::capsule owner(data, [](void* floats) noexcept { delete[] static_cast<float*>(floats); });
  std::copy(from.begin(), from.end(), data);
  return {data, {from.size()}, owner};
}

nb::object from_json(const std::string& json) {
  return nb::module_::import_("json").attr("loads")(json);
}

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

Progress progress_of(nb::handle callback) {
  return [callback](std::int64_t done, std::int64_t total) {
    const Locked locked;
    check_signals();
    if (callback.is_none()) return true;
    const nb::object answer = callback(done, total);
    if (answer.is_none()) return true;
    const int is_true = PyObject_IsTrue(answer.ptr());
    if (is_true < 0) throw nb::python_error();
    return is_true != 0;
  };
}

SamplingParams sampling_of(int max_tokens, double temperature, int top_k, double top_p,
                           double min_p, double repetition_penalty, std::uint64_t seed,
                           std::vector<std::string> stop) {
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  params.repetition_penalty = repetition_penalty;
  params.seed = seed;
  params.max_tokens = max_tokens;
  params.stop = std::move(stop);
  return params;
}

NB_MODULE(_sluice, module) {
  module.attr("__version__") = kVersion;
  bind_errors(module);
  module.def(
      "parse_policy", [](const std::string& text) { return to_string(parse_policy(text)); },
      nb::arg("text"), "The policy in full; raises UsageError for one that makes no sense.");
  bind_generation(module);
  bind_engine(module);
  bind_batcher(module);
  bind_kv_cache(module);
}

}  // namespace sluice::python
