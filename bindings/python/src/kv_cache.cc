// KvCache for models that run in Python: arrays of numpy, torch and whatever else speaks DLPack.
#include "sluice/kv_cache.h"

#include <nanobind/stl/filesystem.h>

#include <algorithm>
#include <string_view>
#include <thread>

#include "bindings/python/src/common.h"
#include "sluice/format_names.h"
#include "sluice/value_basis.h"

namespace sluice::python {
namespace {

using Input = nb::ndarray<nb::ro>;
using Output = nb::ndarray<>;

struct PyCache {
  explicit PyCache(const KvConfig& config) : cache(config) {}
  KvCache cache;
};

struct PySequence {
  PySequence(std::shared_ptr<PyCache> of, KvSequence made)
      : cache(std::move(of)), sequence(std::move(made)) {}

  std::shared_ptr<PyCache> cache;
  KvSequence sequence;
  Use::Owner owner;
};

struct PyStep {
  PyStep(std::vector<std::shared_ptr<PySequence>> of, std::int64_t count, KvStep begun)
      : sequences(std::move(of)), tokens(count), step(std::move(begun)) {}

  std::vector<std::shared_ptr<PySequence>> sequences;
  std::int64_t tokens;
  std::thread::id thread = std::this_thread::get_id();
  KvStep step;

  const KvShape& shape() const { return sequences.front()->cache->cache.plan().shape; }
};

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::usage, message); }

template <typename Array>
DType dtype_of(const Array& array, const char* name) {
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  if (is(nb::dlpack::dtype_code::Float, 32)) return DType::f32;
  if (is(nb::dlpack::dtype_code::Float, 16)) return DType::f16;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return DType::bf16;
  refuse(std::string(name) + ": the elements have to be float32, float16 or bfloat16");
}

template <typename Array>
ArrayLayout layout_of(const Array& array, const char* name, const PyStep& step, int heads) {
  const KvShape& shape = step.shape();
  const bool fits = array.ndim() == 3 && static_cast<std::int64_t>(array.shape(0)) == step.tokens &&
                    array.shape(1) == static_cast<std::size_t>(heads) &&
                    array.shape(2) == static_cast<std::size_t>(shape.head_dim);
  if (!fits) {
    refuse(std::string(name) + ": the shape has to be (" + std::to_string(step.tokens) + ", " +
           std::to_string(heads) + ", " + std::to_string(shape.head_dim) + ")");
  }
  if (shape.head_dim > 1 && array.stride(2) != 1) {
    refuse(std::string(name) + ": the elements of a head have to be contiguous");
  }
  const bool on_host = array.device_type() == nb::device::cpu::value;
  if (!on_host && array.device_type() != nb::device::cuda::value) {
    refuse(std::string(name) + ": the array is neither in host memory nor on a CUDA device");
  }
  // Of a dimension of several elements a stride of 0 repeats one, and to the library it means
  // dense.
  if ((heads > 1 && array.stride(1) == 0) || (step.tokens > 1 && array.stride(0) == 0)) {
    refuse(std::string(name) + ": the array repeats its elements (broadcast); give a copy");
  }
  // A dimension of one element may have any stride.
  const std::int64_t head_stride = heads > 1 ? array.stride(1) : shape.head_dim;
  const std::int64_t token_stride = step.tokens > 1 ? array.stride(0) : heads * head_stride;
  return {dtype_of(array, name), token_stride, head_stride, on_host ? Tier::host : Tier::device};
}

// The library expects no other thread than the one that began the step.
void require_thread(const PyStep& self) {
  if (self.thread != std::this_thread::get_id()) refuse("KvStep: another thread began it");
}

void append(PyStep& self, int layer, const Input& keys, const Input& values) {
  require_thread(self);
  const int heads = self.shape().kv_heads;
  const KvInput k(keys.data(), layout_of(keys, "keys", self, heads));
  const KvInput v(values.data(), layout_of(values, "values", self, heads));
  const Released unlocked;
  self.step.append(layer, k, v);
}

// A dimension of one element may have any stride.
template <typename Array>
void require_dense(const Array& array, const char* name) {
  std::int64_t stride = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != stride) {
      refuse(std::string(name) + ": the array has to be contiguous");
    }
    stride *= static_cast<std::int64_t>(array.shape(i));
  }
}

// The caller's array for log-sum-exps, where `out` is; null without one.
float* lse_of(const PyStep& self, const std::optional<Output>& lse, const Output& out) {
  if (!lse) return nullptr;
  const auto heads = static_cast<std::size_t>(self.shape().query_heads);
  const bool fits = lse->ndim() == 2 && static_cast<std::int64_t>(lse->shape(0)) == self.tokens &&
                    lse->shape(1) == heads && dtype_of(*lse, "lse") == DType::f32;
  if (!fits) {
    refuse("lse: float32 of shape (" + std::to_string(self.tokens) + ", " + std::to_string(heads) +
           ") is needed");
  }
  require_dense(*lse, "lse");
  if (lse->device_type() != out.device_type()) refuse("lse: it has to be where `out` is");
  return static_cast<float*>(lse->data());
}

void attend(PyStep& self, int layer, const Input& queries, const Output& out,
            const std::optional<Output>& lse) {
  require_thread(self);
  const int heads = self.shape().query_heads;
  const KvInput q(queries.data(), layout_of(queries, "queries", self, heads));
  const KvOutput o(out.data(), layout_of(out, "out", self, heads));
  float* const sums = lse_of(self, lse, out);
  const Released unlocked;
  self.step.attend(layer, q, o, sums);
}

// The bytes of a float array in host memory without gaps, whatever its dimensions.
template <typename Array>
std::size_t dense_bytes(const Array& array, const char* name) {
  require_dense(array, name);
  if (array.device_type() != nb::device::cpu::value) {
    refuse(std::string(name) + ": the array has to be in host memory");
  }
  return array.size() * size_of(dtype_of(array, name));
}

void write_value_basis(const Input& weights, const Output& out) {
  if (weights.ndim() != 2) refuse("weights: the shape has to be (head_dim, hidden)");
  const std::size_t bytes = dense_bytes(weights, "weights");
  const auto head_dim = static_cast<int>(std::min<std::size_t>(weights.shape(0), 1u << 16));
  const std::vector<float> basis =
      value_basis({static_cast<const std::byte*>(weights.data()), bytes},
                  dtype_of(weights, "weights"), head_dim);
  if (dtype_of(out, "out") != DType::f32 ||
      dense_bytes(out, "out") != basis.size() * sizeof(float)) {
    refuse("out: float32 of shape (head_dim / 2, head_dim) is needed");
  }
  std::copy(basis.begin(), basis.end(), static_cast<float*>(out.data()));
}

std::vector<float> floats_of(const Input& array, const char* name) {
  static_cast<void>(dense_bytes(array, name));
  if (dtype_of(array, name) != DType::f32) refuse(std::string(name) + ": float32 is needed");
  const auto* const first = static_cast<const float*>(array.data());
  return {first, first + array.size()};
}

Phase phase_named(std::string_view name) {
  for (const Phase phase : {Phase::prefill, Phase::decode, Phase::correction}) {
    if (name == to_string(phase)) return phase;
  }
  refuse("phase: prefill, decode or correction");
}

std::shared_ptr<PyCache> open_cache(
    int layers, int query_heads, int kv_heads, int head_dim, std::int64_t context,
    const std::string& rows, const std::string& device, int threads, int chunk, int sequences,
    std::int64_t tokens, int decode_batch, const std::vector<std::string>& policies,
    std::optional<double> scale, std::optional<std::uint64_t> device_memory,
    std::optional<std::uint64_t> host_memory, std::optional<std::uint64_t> row_cache,
    const std::vector<std::filesystem::path>& disk, std::optional<std::uint64_t> disk_bytes,
    std::uintptr_t stream, const std::optional<Input>& basis) {
  KvConfig config;
  if (basis) config.value_basis = floats_of(*basis, "value_basis");
  config.shape = {layers, query_heads, kv_heads, head_dim, DType::bf16};
  config.shape.rows = parse_row_format(rows, "rows");
  config.context = context;
  config.device = device;
  config.stream = reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr)
  config.threads = threads;
  config.chunk = chunk;
  config.sequences = sequences;
  config.tokens = tokens;
  config.decode_batch = decode_batch;
  config.policies =
      policies_of(policies, [](const std::string& text) { return parse_policy(text); });
  config.scale = scale;
  config.device_memory = device_memory;
  config.host_memory = host_memory;
  config.row_cache = row_cache;
  if (!disk.empty()) config.disk = DiskConfig{disk, disk_bytes};
  return make_owned<PyCache>(config);
}

auto with(PySequence& self, const auto& body) {
  const Use use(self.owner, "KvSequence");
  const Released unlocked;
  return body();
}

std::shared_ptr<PyStep> begin_batch(PyCache& self,
                                    const std::vector<std::shared_ptr<PySequence>>& sequences) {
  std::vector<std::unique_ptr<Use>> uses;
  std::vector<KvSequence*> batch;
  for (const auto& sequence : sequences) {
    if (sequence == nullptr) refuse("begin_step: a sequence is None");
    uses.push_back(std::make_unique<Use>(sequence->owner, "KvSequence"));
    batch.push_back(&sequence->sequence);
  }
  return make_owned<PyStep>(sequences, static_cast<std::int64_t>(sequences.size()),
                            self.cache.begin_step(batch));
}

nb::dict memory_of(const PyCache& self) {
  const MemoryUse use = self.cache.memory();
  nb::dict dict;
  dict["device_bytes"] = use.device_bytes;
  dict["device_peak"] = use.device_peak;
  dict["host_bytes"] = use.host_bytes;
  dict["host_peak"] = use.host_peak;
  return dict;
}

nb::dict plan_of(const PyCache& self) {
  const KvPlan& plan = self.cache.plan();
  nb::dict dict;
  dict["chunk"] = plan.chunk;
  dict["context"] = plan.context;
  dict["decode_batch"] = plan.decode_batch;
  dict["device_bytes"] = plan.device_bytes;
  dict["host_bytes"] = plan.host_bytes;
  dict["dense_bytes"] = plan.dense_bytes();
  return dict;
}

void bind_sequence(nb::module_& module) {
  nb::class_<PySequence>(module, "KvSequence", "The rows of one sequence of tokens.")
      .def(
          "begin_step",
          [](const std::shared_ptr<PySequence>& self, const std::string& phase,
             std::int64_t tokens) {
            return with(*self, [&] {
              return make_owned<PyStep>(std::vector{self}, tokens,
                                        self->sequence.begin_step(phase_named(phase), tokens));
            });
          },
          nb::arg("phase"), nb::arg("tokens"),
          "A step that adds `tokens` to every layer; phase is prefill, decode or correction.")
      .def("decode_room",
           [](PySequence& self) { return with(self, [&] { return self.sequence.decode_room(); }); })
      .def("fork",
           [](PySequence& self) {
             return with(self,
                         [&] { return make_owned<PySequence>(self.cache, self.sequence.fork()); });
           })
      .def(
          "truncate",
          [](PySequence& self, std::int64_t length) {
            with(self, [&] { self.sequence.truncate(length); });
          },
          nb::arg("length"))
      .def("reset", [](PySequence& self) { with(self, [&] { self.sequence.reset(); }); })
      .def("__len__",
           [](PySequence& self) { return with(self, [&] { return self.sequence.length(); }); })
      .def_prop_rw(
          "policy",
          [](PySequence& self) {
            return with(self, [&] { return to_string(self.sequence.policy()); });
          },
          [](PySequence& self, const std::string& text) {
            with(self, [&] { self.sequence.use(parse_policy(text)); });
          })
      .def(
          "ledger",
          [](PySequence& self) {
            return from_json(with(self, [&] { return self.sequence.ledger().to_json(); }));
          },
          nb::sig("def ledger(self) -> dict"));
}

}  // namespace

void bind_kv_cache(nb::module_& module) {
  nb::class_<PyStep>(module, "KvStep",
                     "For every layer append, then attend; then end. The thread that begins a step "
                     "has to end it.")
      .def("append", &append, nb::arg("layer"), nb::arg("keys"), nb::arg("values"),
           "Keys (after RoPE) and values, (tokens, kv_heads, head_dim).")
      .def("attend", &attend, nb::arg("layer"), nb::arg("queries"), nb::arg("out"),
           nb::arg("lse") = nb::none(),
           "Attends with queries (tokens, query_heads, head_dim); writes the result to `out` and, "
           "if "
           "given, the log-sum-exp of the attended logits to `lse`, float32 (tokens, query_heads) "
           "where `out` is.")
      .def("end", [](PyStep& self) {
        require_thread(self);
        const Released unlocked;
        self.step.end();
      });
  bind_sequence(module);
  module.def("value_basis", &write_value_basis, nb::arg("weights"), nb::arg("out"),
             "Writes the basis of one KV head's values to `out`, float32 (head_dim / 2, head_dim). "
             "`weights` (head_dim, hidden) are the head's rows of the value projection.");
  nb::class_<PyCache>(module, "KvCache", "The KV cache alone; sluice/kv_cache.h says more.")
      .def(nb::new_(&open_cache), nb::kw_only(), nb::arg("layers"), nb::arg("query_heads"),
           nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("context"), nb::arg("rows") = "bf16",
           nb::arg("device") = "cpu", nb::arg("threads") = 0, nb::arg("chunk") = 512,
           nb::arg("sequences") = 1, nb::arg("tokens") = 0, nb::arg("decode_batch") = 1,
           nb::arg("policies") = std::vector<std::string>(), nb::arg("scale") = nb::none(),
           nb::arg("device_memory") = nb::none(), nb::arg("host_memory") = nb::none(),
           nb::arg("row_cache") = nb::none(),
           nb::arg("disk") = std::vector<std::filesystem::path>(),
           nb::arg("disk_bytes") = nb::none(), nb::arg("stream") = 0,
           nb::arg("value_basis") = nb::none(), Unlocked(),
           "`stream` is a cudaStream_t as a number, 1 for CUDA's default stream. The cache then "
           "computes in its order: arrays on the GPU need not be ready when they are passed, and "
           "only end() waits. 0: the cache has a stream of its own, and every call waits. "
           "`value_basis`, float32 (layers, kv_heads, head_dim / 2, head_dim), is for "
           "policies with components=half, such as compact: see value_basis().")
      .def(
          "new_sequence",
          [](const std::shared_ptr<PyCache>& self) {
            return make_owned<PySequence>(self, self->cache.new_sequence());
          },
          Unlocked())
      .def("begin_step", &begin_batch, nb::arg("sequences"), Unlocked(),
           "A decode step of several sequences, one token of each in this order.")
      .def_prop_ro("plan", &plan_of, nb::sig("def plan(self) -> dict"))
      .def("memory", &memory_of);
}

}  // namespace sluice::python
