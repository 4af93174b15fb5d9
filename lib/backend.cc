#include "lib/backend.h"

#include <utility>

#include "lib/check.h"
#include "lib/read_heads.h"

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
  if (data_ == nullptr) return;
  owner_->give_back(tier_, data_, bytes_);
  owner_->account(tier_).release(bytes_);
}

Buffer Backend::allocate(Tier tier, std::size_t bytes) {
  if (bytes == 0) return {};
  account(tier).charge(bytes);
  std::byte* data = nullptr;
  try {
    data = take(tier, bytes);
  } catch (...) {
    account(tier).release(bytes);
    throw;
  }
  return {this, tier, data, bytes};
}

void Backend::linear_chain(const LinearChain& chain) {
  if (chain.norm) rms_norm(*chain.norm);
  if (chain.cast) cast(chain.cast->from, chain.cast->to);
  linear(chain.linear);
  if (chain.swiglu) swiglu(*chain.swiglu);
}

void Backend::read_heads(const ReadHeadsParams& params) {
  check(info().compute_tier == Tier::host, "reading heads that are not in host memory");
  sluice::read_heads(params);
}

void Backend::sample(const Matrix& logits, std::span<const SampleParams> params,
                     std::span<SampledToken> tokens) {
  check(info().compute_tier == Tier::host, "sampling what is not in host memory");
  const auto* row = static_cast<const float*>(logits.data);
  for (std::size_t i = 0; i < tokens.size(); ++i, row += logits.stride) {
    tokens[i] = draw_token({row, static_cast<std::size_t>(logits.columns)}, params[i]);
  }
}

void Backend::replay(std::unique_ptr<Recording>& /*recording*/,
                     const std::function<void()>& issue) {
  issue();
}

void copy_home(Backend& backend, const AppendParams& p) {
  std::vector<CopyOp> ops;
  for (std::size_t head = 0; head < p.home.size(); ++head) {
    ops.push_back(
        {p.home[head], p.rows[head], static_cast<std::size_t>(p.tokens) * p.shape.row_bytes()});
  }
  if (!ops.empty()) backend.copy(ops, Stream::compute);
}

}  // namespace sluice
