// KvCache, its sequences and steps.
#include "sluice/kv_cache.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <thread>
#include <utility>

#include "bindings/c/call.h"
#include "bindings/c/objects.h"
#include "sluice/value_basis.h"

namespace sluice::c {
namespace {

struct CacheObject {
  static constexpr Kind kKind{"sluice_kv_cache"};
  KvCache cache;
};

struct SequenceObject {
  static constexpr Kind kKind{"sluice_kv_sequence"};
  std::shared_ptr<CacheObject> cache;
  KvSequence sequence;
  Use::Owner owner;
};

struct StepObject {
  static constexpr Kind kKind{"sluice_kv_step"};
  std::vector<std::shared_ptr<SequenceObject>> sequences;
  std::int64_t tokens;
  std::thread::id thread;
  KvStep step;

  const KvShape& shape() const { return sequences.front()->cache->cache.plan().shape; }
};

class UsedSequence {
 public:
  explicit UsedSequence(sluice_kv_sequence* handle)
      : object_(find<SequenceObject>(handle)), use_(object_->owner, SequenceObject::kKind.name) {}

  const std::shared_ptr<SequenceObject>& object() const { return object_; }
  KvSequence* operator->() { return &object_->sequence; }
  KvSequence& operator*() { return object_->sequence; }

 private:
  std::shared_ptr<SequenceObject> object_;
  Use use_;
};

// The step, for the thread that began it: the library expects no other.
std::shared_ptr<StepObject> own_step(sluice_kv_step* handle) {
  auto object = find<StepObject>(handle);
  if (object->thread != std::this_thread::get_id()) {
    refuse("sluice_kv_step: another thread began it");
  }
  return object;
}

KvConfig config_of(const sluice_kv_options& from) {
  KvConfig to;
  to.shape = {from.layers, from.query_heads, from.kv_heads, from.head_dim, dtype(from.rows)};
  to.context = from.context;
  to.device = string_or(from.device, "cpu");
  to.stream = from.stream;
  to.threads = from.threads;
  if (from.chunk != 0) to.chunk = from.chunk;
  if (from.sequences != 0) to.sequences = from.sequences;
  if (from.decode_batch != 0) to.decode_batch = from.decode_batch;
  to.tokens = from.tokens;
  to.policies = policies(from.policies, from.policy_count,
                         [](const char* text) { return parse_policy(text); });
  if (from.scale != 0.0) to.scale = from.scale;
  to.device_memory = set(from.device_memory);
  to.host_memory = set(from.host_memory);
  if (from.row_cache != nullptr) to.row_cache = *from.row_cache;
  to.disk = disk(from.disk, from.disk_count, from.disk_bytes);
  if (from.value_basis != nullptr) {
    to.value_basis.assign(from.value_basis, from.value_basis + from.value_basis_count);
  } else if (from.value_basis_count != 0) {
    refuse("`value_basis` is NULL");
  }
  return to;
}

Phase phase_of(sluice_phase phase) {
  switch (phase) {
    case SLUICE_PREFILL:
      return Phase::prefill;
    case SLUICE_DECODE:
      return Phase::decode;
    case SLUICE_CORRECTION:
      return Phase::correction;
    default:
      refuse("no such sluice_phase");
  }
}

struct CallerArray {
  void* data;
  ArrayLayout layout;
};

// Checks that [tokens, heads, head_dim] lies within the caller's bytes. Numbers stay far below what
// would overflow, because the strides are bounded by the bytes.
CallerArray array_of(const sluice_array* array, const char* name, const StepObject& step,
                     int heads) {
  const sluice_array from = read(array, name);
  need(from.data, name);
  const DType type = dtype(from.dtype);
  const std::int64_t head_dim = step.shape().head_dim;
  const std::int64_t head_stride = from.head_stride != 0 ? from.head_stride : head_dim;
  const auto elements = static_cast<std::int64_t>(
      std::min<std::size_t>(from.bytes, std::numeric_limits<std::int64_t>::max() / 2) /
      size_of(type));
  const auto outside = [&] {
    refuse(std::string("`") + name + "`: " + std::to_string(step.tokens) + " tokens of " +
           std::to_string(heads) + " heads with these strides do not fit `bytes` " +
           std::to_string(from.bytes));
  };
  if (head_stride < 0 || from.token_stride < 0) {
    refuse(std::string("`") + name + "`: negative stride");
  }
  if (head_stride > elements / heads || from.token_stride > elements) outside();
  const std::int64_t token_stride =
      from.token_stride != 0 ? from.token_stride : heads * head_stride;
  const __int128 last = static_cast<__int128>(step.tokens - 1) * token_stride +
                        static_cast<__int128>(heads - 1) * head_stride + head_dim;
  if (last > elements) outside();
  if (reinterpret_cast<std::uintptr_t>(from.data) % size_of(type) != 0) {
    refuse(std::string("`") + name + "`: the data is not aligned to its elements");
  }
  return {from.data,
          {type, token_stride, head_stride, from.on_device != 0 ? Tier::device : Tier::host}};
}

void open(std::shared_ptr<CacheObject> cache, KvSequence sequence, sluice_kv_sequence** to) {
  auto object = std::make_shared<SequenceObject>(std::move(cache), std::move(sequence));
  *to = add<SequenceObject, sluice_kv_sequence>(std::move(object));
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT(google-build-using-namespace)

sluice_code sluice_value_basis(const void* weights, size_t bytes, sluice_dtype dtype,
                               int32_t head_dim, float* basis, size_t count) {
  return call([&] {
    need(weights, "weights");
    need(basis, "basis");
    const auto* const first = static_cast<const std::byte*>(weights);
    const std::vector<float> found =
        sluice::value_basis({first, bytes}, sluice::c::dtype(dtype), head_dim);
    if (count < found.size()) {
      refuse("basis: room for " + std::to_string(found.size()) + " floats is needed");
    }
    std::copy(found.begin(), found.end(), basis);
  });
}

sluice_code sluice_kv_cache_open(const sluice_kv_options* options, sluice_kv_cache** cache) {
  return call([&] {
    need(cache, "cache");
    auto object =
        std::make_shared<CacheObject>(sluice::KvCache(config_of(read(options, "options"))));
    *cache = add<CacheObject, sluice_kv_cache>(std::move(object));
  });
}

sluice_code sluice_kv_cache_free(sluice_kv_cache* cache) {
  return call([&] { take<CacheObject>(cache); });
}

sluice_code sluice_kv_cache_info(sluice_kv_cache* cache, sluice_kv_info* info) {
  return call([&] {
    const auto object = find<CacheObject>(cache);
    require_struct(info, "info");
    const sluice::KvPlan& plan = object->cache.plan();
    write(info,
          {0, plan.chunk, plan.context, plan.device_bytes, plan.host_bytes, plan.dense_bytes()});
  });
}

sluice_code sluice_kv_cache_memory(sluice_kv_cache* cache, sluice_memory* memory) {
  return call([&] {
    const auto object = find<CacheObject>(cache);
    require_struct(memory, "memory");
    const sluice::MemoryUse use = object->cache.memory();
    write(memory, {0, use.device_bytes, use.device_peak, use.host_bytes, use.host_peak});
  });
}

sluice_code sluice_kv_sequence_open(sluice_kv_cache* cache, sluice_kv_sequence** sequence) {
  return call([&] {
    const auto object = find<CacheObject>(cache);
    need(sequence, "sequence");
    open(object, object->cache.new_sequence(), sequence);
  });
}

sluice_code sluice_kv_sequence_fork(sluice_kv_sequence* sequence, sluice_kv_sequence** fork) {
  return call([&] {
    UsedSequence used(sequence);
    need(fork, "fork");
    open(used.object()->cache, used->fork(), fork);
  });
}

sluice_code sluice_kv_sequence_free(sluice_kv_sequence* sequence) {
  return call([&] { take<SequenceObject>(sequence); });
}

sluice_code sluice_kv_sequence_use(sluice_kv_sequence* sequence, const char* policy) {
  return call([&] {
    UsedSequence used(sequence);
    used->use(sluice::parse_policy(need(policy, "policy")));
  });
}

sluice_code sluice_kv_sequence_truncate(sluice_kv_sequence* sequence, int64_t length) {
  return call([&] { UsedSequence(sequence)->truncate(length); });
}

sluice_code sluice_kv_sequence_reset(sluice_kv_sequence* sequence) {
  return call([&] { UsedSequence(sequence)->reset(); });
}

sluice_code sluice_kv_sequence_length(sluice_kv_sequence* sequence, int64_t* length) {
  return call([&] {
    UsedSequence used(sequence);
    *need(length, "length") = used->length();
  });
}

sluice_code sluice_kv_sequence_ledger_json(sluice_kv_sequence* sequence, char* json,
                                           size_t capacity, size_t* bytes) {
  return call([&] {
    UsedSequence used(sequence);
    put(used->ledger().to_json(), json, capacity, bytes);
  });
}

sluice_code sluice_kv_step_begin(sluice_kv_sequence* sequence, sluice_phase phase, int64_t tokens,
                                 sluice_kv_step** step) {
  return call([&] {
    UsedSequence used(sequence);
    need(step, "step");
    auto object =
        std::make_shared<StepObject>(std::vector{used.object()}, tokens, std::this_thread::get_id(),
                                     used->begin_step(phase_of(phase), tokens));
    *step = add<StepObject, sluice_kv_step>(std::move(object));
  });
}

sluice_code sluice_kv_step_begin_batch(sluice_kv_cache* cache, sluice_kv_sequence* const* sequences,
                                       size_t count, sluice_kv_step** step) {
  return call([&] {
    const auto object = find<CacheObject>(cache);
    need(step, "step");
    std::vector<std::unique_ptr<UsedSequence>> used;
    std::vector<std::shared_ptr<SequenceObject>> objects;
    std::vector<sluice::KvSequence*> batch;
    for (sluice_kv_sequence* handle : array(sequences, count, "sequences")) {
      used.push_back(std::make_unique<UsedSequence>(handle));
      objects.push_back(used.back()->object());
      batch.push_back(&**used.back());
    }
    sluice::KvStep begun = object->cache.begin_step(batch);
    const auto tokens = static_cast<std::int64_t>(count);
    auto made = std::make_shared<StepObject>(std::move(objects), tokens, std::this_thread::get_id(),
                                             std::move(begun));
    *step = add<StepObject, sluice_kv_step>(std::move(made));
  });
}

sluice_code sluice_kv_step_append(sluice_kv_step* step, int32_t layer, const sluice_array* keys,
                                  const sluice_array* values) {
  return call([&] {
    const auto object = own_step(step);
    const int heads = object->shape().kv_heads;
    const CallerArray k = array_of(keys, "keys", *object, heads);
    const CallerArray v = array_of(values, "values", *object, heads);
    object->step.append(layer, {k.data, k.layout}, {v.data, v.layout});
  });
}

sluice_code sluice_kv_step_attend(sluice_kv_step* step, int32_t layer, const sluice_array* queries,
                                  const sluice_array* out, float* lse, size_t capacity) {
  return call([&] {
    const auto object = own_step(step);
    const int heads = object->shape().query_heads;
    const CallerArray q = array_of(queries, "queries", *object, heads);
    const CallerArray o = array_of(out, "out", *object, heads);
    require_floats(lse, capacity, static_cast<std::size_t>(object->tokens * heads));
    object->step.attend(layer, {q.data, q.layout}, {o.data, o.layout}, lse);
  });
}

sluice_code sluice_kv_step_end(sluice_kv_step* step) {
  return call([&] { own_step(step)->step.end(); });
}

sluice_code sluice_kv_step_free(sluice_kv_step* step) {
  return call([&] {
    own_step(step);
    take<StepObject>(step);
  });
}
