// Shared by the parts of the Python module: ownership, arrays and arguments.
//
// Every call that computes or waits releases the GIL. A destructor of the library may wait for a
// call of another thread, which may wait for the GIL in a callback, so destructors release it, too.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/use.h"
#include "sluice/chat.h"
#include "sluice/constraint.h"
#include "sluice/engine.h"
#include "sluice/sampling.h"

namespace sluice::python {

namespace nb = nanobind;
using bindings::Use;

// Blocks a thread that would wait for the GIL of an interpreter that ends. Python would end the
// thread, through frames that cannot be unwound.
inline void stay_out_of_the_end() {
  while (_Py_IsFinalizing() != 0) std::this_thread::sleep_for(std::chrono::hours(1));
}

// The scope of a call without the GIL. The thread that ends the interpreter keeps it.
class Released {
 public:
  Released() : state_(_Py_IsFinalizing() != 0 ? nullptr : PyEval_SaveThread()) {}
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;
  ~Released() {
    if (state_ == nullptr) return;
    stay_out_of_the_end();
    PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

// The scope of a callback with it.
class Locked {
 public:
  Locked() {
    if (PyGILState_Check() == 0) stay_out_of_the_end();
    state_ = PyGILState_Ensure();
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

using Unlocked = nb::call_guard<Released>;

// An object that is destroyed without the GIL.
template <typename T, typename... Arguments>
std::shared_ptr<T> make_owned(Arguments&&... arguments) {
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [](T* object) {
    if (PyGILState_Check() == 0) {
      delete object;
      return;
    }
    const Released unlocked;
    delete object;
  });
}

struct PyEngine {
  explicit PyEngine(const EngineConfig& config)
      : engine(Engine::open(config)), model(config.model) {}

  Engine engine;
  std::filesystem::path model;
  std::mutex mutex;
  // Made when they are asked for; under the mutex.
  std::optional<ChatFormat> format;
  std::optional<Constraints> constraints;
};

struct PyConstraint {
  std::shared_ptr<PyEngine> engine;
  Constraint constraint;
};

struct PySession {
  PySession(std::shared_ptr<PyEngine> of, Session made)
      : engine(std::move(of)), session(std::move(made)) {}

  std::shared_ptr<PyEngine> engine;
  Session session;
  Use::Owner owner;
};

using Floats = nb::ndarray<nb::numpy, float, nb::c_contig>;
using Tokens = std::vector<TokenId>;

// A numpy array with a copy of `from`; its shape is `shape`, or that of `from`. Needs the GIL.
Floats numpy_copy(std::span<const float> from);
// A dict, or whatever else the JSON is. Needs the GIL.
nb::object from_json(const std::string& json);
// Throws KeyboardInterrupt, or what else a signal's handler raises. Needs the GIL.
void check_signals();
// Calls a Python function, or none, between steps; lets Ctrl-C through.
Progress progress_of(nb::handle callback);

SamplingParams sampling_of(int max_tokens, double temperature, int top_k, double top_p,
                           double min_p, double repetition_penalty, std::uint64_t seed,
                           std::vector<std::string> stop);
// The policies of a session, a batcher or a cache.
template <typename Parse>
std::vector<Policy> policies_of(const std::vector<std::string>& texts, const Parse& parse) {
  std::vector<Policy> all;
  for (const std::string& text : texts) all.push_back(parse(text));
  return all;
}

// The constraint of an answer of `engine`; none for null. Throws Error{usage} for one of another
// engine.
std::optional<Constraint> constraint_of(const std::shared_ptr<PyConstraint>& from,
                                        const PyEngine& engine);

void bind_constraint(nb::module_& module, nb::class_<PyEngine>& engine);
void bind_generation(nb::module_& module);
void bind_generate(nb::class_<PySession>& session);
void bind_engine(nb::module_& module);
void bind_batcher(nb::module_& module);
void bind_kv_cache(nb::module_& module);

}  // namespace sluice::python
