#include "lib/backend.h"

#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "lib/check.h"
#include "lib/weight_code.h"
#include "sluice/errors.h"

namespace sluice {

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(tier_, other.tier_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) owner_->release(tier_, data_, bytes_);
}

Buffer Memory::allocate(Tier tier, std::size_t bytes) {
  if (bytes == 0) return {};
  account(tier).charge(bytes);
  std::byte* data = nullptr;
  try {
    data = take(tier, bytes);
    if (tier == Tier::device) {
      const std::lock_guard lock(mutex_);
      on_device_.emplace(data, bytes);
    }
  } catch (...) {
    if (data != nullptr) give_back(tier, data, bytes);
    account(tier).release(bytes);
    throw;
  }
  return {this, tier, data, bytes};
}

void Memory::release(Tier tier, std::byte* data, std::size_t bytes) noexcept {
  if (tier == Tier::device) {
    const std::lock_guard lock(mutex_);
    on_device_.erase(data);
  }
  give_back(tier, data, bytes);
  account(tier).release(bytes);
}

bool Memory::is_on_device(const void* address) const {
  const auto* const data = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mutex_);
  const auto after = on_device_.upper_bound(data);
  if (after == on_device_.begin()) return false;
  const auto& [first, bytes] = *std::prev(after);
  return data < first + bytes;
}

bool Memory::has_device_buffers() const {
  const std::lock_guard lock(mutex_);
  return !on_device_.empty();
}

std::unique_ptr<Weight> Backend::make_weight(const WeightShape& shape) {
  require_format(shape);
  return take_weight(shape);
}

void Backend::require_format(const WeightShape& shape) const {
  const std::string name = to_string(shape.format);
  if (!stores(shape.format)) {
    throw Error(ErrorCode::unsupported,
                "device " + info().name + " does not store weights in " + name + " (`weights`)");
  }
  if (shape.format.fits(shape.inputs)) return;
  throw Error(ErrorCode::unsupported,
              name + " weights come in groups of " + std::to_string(kWeightGroup) +
                  ", which do not divide the " + std::to_string(shape.inputs) +
                  " inputs of a matrix of this model (`weights`)");
}

std::unique_ptr<Weight> Backend::prepare_weight(const Matrix& host, const WeightFormat& format) {
  check(host.stride == host.columns, "weights without dense rows");
  require_format({host.rows, host.columns, format});
  WeightRows rows = {nullptr, host.dtype, host.rows, host.columns};
  const std::size_t bytes = rows.bytes();
  const Buffer staging = allocate(Tier::host, bytes);
  std::memcpy(staging.data(), host.data, bytes);
  rows.data = staging.data();
  if (format.is_coded() && !info().codes_weights) {
    const Buffer scratch =
        allocate(Tier::host, static_cast<std::size_t>(host.columns) * sizeof(float));
    rows = encode_rows(rows, format, scratch.floats());
  }
  std::unique_ptr<Weight> weight = make_weight({host.rows, host.columns, format});
  const std::unique_ptr<Queue> queue = make_queue({.computes = false});
  queue->run(WriteWeightParams{weight.get(), 0, rows});
  queue->synchronize();
  return weight;
}

OperationLabel label_of(const Operation& operation) {
  return std::visit([](const auto* params) { return params->kLabel; }, operation);
}

void run_one_by_one(Queue& queue, const LinearChain& chain) {
  if (chain.norm) queue.run(*chain.norm);
  if (chain.cast) queue.run(*chain.cast);
  queue.run(chain.linear);
  if (chain.swiglu) queue.run(*chain.swiglu);
}

Queue::Queue(Backend& backend) : backend_(&backend), life_(backend.life_) {}

Backend& Queue::backend() const {
  if (has_backend()) return *backend_;
  throw Error(ErrorCode::usage, "a queue was used after its backend had ended");
}

QueueRange::QueueRange(Queue& queue, const Label& label) : queue_(queue) {
  queue.begin_range(label);
}

QueueRange::~QueueRange() { queue_.end_range(); }

std::unique_ptr<Queue> Queue::make_sibling(const QueueOptions& options) {
  return backend().make_queue(options);
}

void Queue::note_time(std::uint64_t* to) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *to = static_cast<std::uint64_t>(std::chrono::nanoseconds(now).count());
}

void Queue::branch(int /*number*/, const std::function<void()>& issue) { issue(); }

void Queue::replay(std::unique_ptr<Recording>& /*recording*/, const std::function<void()>& issue) {
  issue();
}

void copy_to_host(Queue& queue, const AppendParams& p) {
  std::vector<CopyOp> ops;
  for (std::size_t head = 0; head < p.host.size(); ++head) {
    ops.push_back(
        {p.host[head], p.rows[head], static_cast<std::size_t>(p.tokens) * p.shape.row_bytes()});
  }
  if (!ops.empty()) queue.copy(ops);
}

}  // namespace sluice
