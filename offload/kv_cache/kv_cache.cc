#include "sluice/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>
#include <utility>

#include "lib/bytes.h"
#include "lib/counted_queue.h"
#include "lib/process_limits.h"
#include "lib/value_tiles.h"
#include "offload/backends.h"
#include "offload/kv_cache/kv_cache_impl.h"
#include "offload/plan/planner.h"

namespace sluice {
namespace {

constexpr int kMaxChunk = 32768;
constexpr int kMaxThreads = 4096;
constexpr double kMaxScale = 1e6;  // of logits; queries times it stay finite

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::usage, "KV cache: " + message);
}

void validate(const KvConfig& config) {
  require(config.chunk >= 1 && config.chunk <= kMaxChunk, "chunk must be 1 to 32768 tokens");
  require(config.threads >= 0 && config.threads <= kMaxThreads,
          "threads must be 0 (one per core) to 4096");
  require(!config.scale || (*config.scale > 0.0 && *config.scale <= kMaxScale),
          "scale must be above 0, up to 1e6");
  for (const Policy& policy : config.policies) {
    const int layers = std::max(config.shape.layers, 0);
    if (policy.any_early(layers, Early::half) || policy.any_early(layers, Early::layer)) {
      throw Error(
          ErrorCode::unsupported,
          "KV cache: rows are chosen early by a model's hidden states, which only a Session "
          "has; the policies must have early=none");
    }
    if (policy.prefill.tau == 0.0) continue;
    throw Error(ErrorCode::unsupported,
                "KV cache: a prompt goes through layer by layer only in a Session; the policies' "
                "prefill must be dense or pages");
  }
}

BackendOptions backend_options(const KvConfig& config) {
  BackendOptions options;
  options.device = config.device;
  options.threads = config.threads;
  options.device_memory = config.device_memory;
  options.host_memory = config.host_memory;
  return options;
}

// Kernels and estimates divide logits by sqrt(head_dim); queries are multiplied by the rest of the
// caller's scale.
float query_factor(const KvConfig& config) {
  if (!config.scale) return 1.0f;
  return static_cast<float>(*config.scale * std::sqrt(static_cast<double>(config.shape.head_dim)));
}

std::uint64_t basis_bytes(const KvConfig& config) {
  return config.value_basis.size() * sizeof(float);
}

// Products of two of a KV head's vectors are 1 or 0. With other vectors answers would be wrong
// without any sign of it.
bool is_orthonormal(const float* basis, int head_dim) {
  constexpr double kTolerance = 1e-3;
  for (int i = 0; i < head_dim / 2; ++i) {
    for (int j = 0; j <= i; ++j) {
      double product = 0.0;
      for (int c = 0; c < head_dim; ++c) {
        product += double{basis[i * head_dim + c]} * double{basis[j * head_dim + c]};
      }
      if (!(std::fabs(product - (i == j ? 1.0 : 0.0)) <= kTolerance)) return false;
    }
  }
  return true;
}

// The shape has been checked.
void require_basis(const KvConfig& config) {
  if (config.value_basis.empty()) return;
  const KvShape& shape = config.shape;
  const std::int64_t heads = std::int64_t{shape.layers} * shape.kv_heads;
  const std::int64_t floats = ValueTiles::basis_floats(shape.head_dim);
  require(std::ssize(config.value_basis) == heads * floats,
          "value_basis has " + std::to_string(config.value_basis.size()) +
              " numbers; layers * kv_heads * head_dim / 2 * head_dim are " +
              std::to_string(heads * floats));
  for (std::int64_t head = 0; head < heads; ++head) {
    require(is_orthonormal(config.value_basis.data() + head * floats, shape.head_dim),
            "the vectors of value_basis are not orthonormal in layer " +
                std::to_string(head / shape.kv_heads) + ", KV head " +
                std::to_string(head % shape.kv_heads));
  }
}

// A copy of the caller's basis where the backend computes; no memory if there is none.
Buffer upload_basis(const KvConfig& config, Backend& backend, Queue& queue) {
  if (config.value_basis.empty()) return {};
  Buffer buffer = backend.allocate(backend.info().compute_tier, basis_bytes(config));
  const CopyOp op = {buffer.data(), reinterpret_cast<const std::byte*>(config.value_basis.data()),
                     buffer.bytes()};
  queue.copy({&op, 1});
  queue.synchronize();
  return buffer;
}

// Most tokens of a step.
std::int64_t step_tokens(const KvPlan& plan) { return std::max(plan.chunk, plan.decode_batch); }

KvRequest request_of(const KvConfig& config, const BackendInfo& info) {
  KvRequest request;
  request.shape = config.shape;
  request.on = info;
  request.context = config.context;
  request.chunk = config.chunk;
  request.sequences = config.sequences;
  request.tokens = config.tokens;
  request.decode_batch = config.decode_batch;
  request.reports_positions = config.reports_positions;
  request.policies = config.policies;
  request.scorers = &config.scorers;
  request.device_cap = config.device_memory;
  request.cache_memory = config.row_cache;
  request.has_value_basis = !config.value_basis.empty();
  return request;
}

// Rows in host memory are committed as they are used, so whether they fit is checked in advance.
// Without a GPU the device tier is host memory, too.
void require_host_memory(const KvPlan& plan, Backend& backend) {
  const MemoryAccount& account = backend.account(Tier::host);
  const bool on_device = backend.info().compute_tier == Tier::device;
  const std::uint64_t needed = account.used() + plan.host_bytes;
  if (needed <= account.cap()) {
    const ThreadWork work = {
        plan.shape, plan.context, step_tokens(plan), {}, plan.listed_blocks > 0};
    const std::uint64_t device = on_device || plan.device_in_host ? 0 : plan.device_bytes;
    return require_memory(plan.host_bytes + device + backend.thread_bytes(work), Counted::all,
                          "the plan needs", "shorten `context`, or raise the limit");
  }
  throw Error(ErrorCode::memory, "`host_memory` " + format_bytes(account.cap()) +
                                     " is too small: " + std::to_string(plan.tokens) +
                                     " tokens take " + format_bytes(plan.host_bytes) +
                                     "; give at least " + std::to_string(needed) + "B");
}

// Callers' arrays are staged beside the rows. On a GPU they and the backend's own memory come off
// the cap.
KvPlan plan_cache(const KvConfig& config, Backend& backend) {
  const BackendInfo& info = backend.info();
  KvRequest request = request_of(config, info);
  request.device_cap.reset();
  const KvPlan free = plan_kv(request);  // refuses impossible requests, whatever the caps
  require_supported(info, config.shape);
  require_basis(config);
  const bool on_device = info.compute_tier == Tier::device;
  const std::uint64_t staging = CallerArrays::compute_bytes(config.shape, step_tokens(free));
  request.device_cap = config.device_memory;
  std::uint64_t of_kernels = 0;  // their scratch memory
  if (on_device) {
    const MemoryAccount& account = backend.account(Tier::device);
    of_kernels = account.used();
    request.beside = of_kernels + staging + basis_bytes(config);
    request.device_cap = account.cap();
  }
  const auto with_arrays = [&](KvPlan plan) {
    const std::uint64_t basis = basis_bytes(config);
    const std::uint64_t own =
        on_device
            ? CallerArrays::compute_bytes(config.shape, step_tokens(plan)) + basis + of_kernels
            : 0;
    const std::uint64_t host =
        CallerArrays::host_bytes(info, config.shape, step_tokens(plan)) + (on_device ? 0 : basis);
    plan.staging_bytes = own + host;
    plan.device_bytes += own;
    plan.host_bytes += host;
    return plan;
  };
  const auto disk = [&] {
    const MemoryAccount& account = backend.account(Tier::host);
    const std::uint64_t taken = account.used() +
                                CallerArrays::host_bytes(info, config.shape, step_tokens(free)) +
                                (on_device ? 0 : basis_bytes(config));
    std::optional<HostRoom> room;
    if (config.host_memory) room = HostRoom{account.cap(), taken};
    return disk_room(*config.disk, room, taken);
  };
  return with_arrays(
      plan_with_disk(request, config.disk.has_value(), disk,
                     [&](const KvPlan& plan) { require_host_memory(with_arrays(plan), backend); }));
}

const auto& of(const auto& impl) {
  if (impl == nullptr) throw Error(ErrorCode::usage, "a KV cache that was moved from");
  return impl;
}

}  // namespace

KvCache::Impl::Impl(const KvConfig& config, std::unique_ptr<Backend> owned,
                    std::unique_ptr<Queue> queue, const KvPlan& plan)
    : backend(std::move(owned)),
      value_basis(upload_basis(config, *backend, *queue)),
      pool(std::make_shared<KvPool>(
          std::move(queue), plan, config.policies, config.scorers, HostAttender(),
          DiskSource{config.disk ? config.disk->directories : std::vector<std::filesystem::path>()},
          ValueBasis{value_basis.floats()})),
      arrays(pool->queue(), plan.shape, step_tokens(plan), query_factor(config)),
      waits(config.stream == nullptr) {
  leaving.reserve(static_cast<std::size_t>(plan.sequences));
}

std::unique_lock<std::mutex> KvCache::Impl::between_steps() {
  std::unique_lock lock(mutex);
  if (stepping == std::this_thread::get_id()) {
    throw Error(ErrorCode::usage, "a step of this KV cache is under way; end it first");
  }
  step_over.wait(lock, [&] { return !stepping; });
  return lock;
}

void KvCache::Impl::end_step() {
  stepping.reset();
  leaving.clear();
  step_over.notify_all();
}

KvCache::KvCache(const KvConfig& config) {
  validate(config);
  std::unique_ptr<Backend> backend = make_backend(backend_options(config));
  std::unique_ptr<Queue> queue = backend->make_queue({.stream = config.stream, .records = false});
  if (config.counter) queue = std::make_unique<CountedQueue>(std::move(queue), config.counter);
  const KvPlan plan = plan_cache(config, *backend);
  try {
    impl_ = std::make_shared<Impl>(config, std::move(backend), std::move(queue), plan);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::memory, "the machine has no memory left for the tables of " +
                                       std::to_string(plan.tokens) +
                                       " tokens; lower `context`, `sequences` or `tokens`");
  }
}

KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;
KvCache::~KvCache() = default;

KvSequence KvCache::new_sequence() {
  const auto lock = of(impl_)->between_steps();
  return KvSequence(std::make_shared<KvSequence::Impl>(impl_, KvSession(impl_->pool)));
}

KvStep KvCache::begin_step(std::span<KvSequence* const> sequences) {
  std::vector<std::shared_ptr<KvSequence::Impl>> impls;
  for (const KvSequence* sequence : sequences) {
    if (sequence == nullptr) throw Error(ErrorCode::usage, "a batch: a null pointer");
    const bool is_own = sequence->impl().cache == of(impl_);
    if (!is_own) throw Error(ErrorCode::usage, "a batch: its sequences must be of this KV cache");
    impls.push_back(sequence->impl_);
  }
  return KvStep::Impl::begin(of(impl_), std::move(impls), Phase::decode, std::nullopt);
}

const KvPlan& KvCache::plan() const { return of(impl_)->pool->plan(); }
MemoryUse KvCache::memory() const { return memory_use(*of(impl_)->backend); }

}  // namespace sluice
