// Implementations of `attend` and `attend_batch`: backends and single kernels, and the fixture that
// compares each of them with the fp64 oracle.
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/reference/backend.h"
#include "cpu/runtime/threads.h"
#include "tests/support/attention_cases.h"
#include "tests/support/attention_parity.h"
#include "tests/support/backends.h"
#include "tests/support/paged_cases.h"
#include "tests/support/random.h"

namespace sluice::testing {

// The reference queue with one kernel replaced by another, for one instruction set.
class KernelQueue : public cpu::ReferenceQueue {
 public:
  KernelQueue(cpu::ReferenceBackend& backend, cpu::AttendKernel kernel, std::int64_t targets)
      : ReferenceQueue(backend), kernel_(kernel) {
    hwy::SetSupportedTargetsForTest(targets);
  }
  ~KernelQueue() override { hwy::SetSupportedTargetsForTest(0); }

  void submit(const Operation& operation) override {
    if (const auto* attend = params_of<AttendParams>(operation)) {
      cpu::attend(*attend, threads_, kernel_);
    } else if (const auto* attend_batch = params_of<AttendBatchParams>(operation)) {
      cpu::attend_batch(*attend_batch, threads_);
    } else {
      ReferenceQueue::submit(operation);
    }
  }

 private:
  cpu::AttendKernel kernel_;
  cpu::Threads threads_{2};
};

class KernelBackend : public cpu::ReferenceBackend {
 public:
  KernelBackend(cpu::AttendKernel kernel, std::int64_t targets)
      : kernel_(kernel), targets_(targets) {}

  std::unique_ptr<Queue> make_queue(const QueueOptions& /*options*/) override {
    return std::make_unique<KernelQueue>(*this, kernel_, targets_);
  }

 private:
  cpu::AttendKernel kernel_;
  std::int64_t targets_;
};

struct AttentionImplementation {
  NamedBackend backend;
  bool batches = true;  // false: attend_batch() is another implementation's
  std::vector<RowFormat> formats = {DType::f32, DType::f16, DType::bf16, RowCode::int8,
                                    RowCode::k8v4};
  std::vector<int> head_dims = {32, 40, 64, 80, 128, 256};
  // Rounding by the rows' format: of attend(), then of attend_batch().
  std::function<Rounding(RowFormat)> rounding = [](RowFormat) { return Rounding(); };
  std::function<Rounding(RowFormat)> batch_rounding = [](RowFormat) { return Rounding(); };
  bool rounds_codes = false;  // attend() rounds the elements of coded rows to bf16
};

inline AttentionImplementation forced(const std::string& name, cpu::AttendKernel kernel,
                                      std::int64_t targets) {
  return {.backend = {name, [=] { return std::make_unique<KernelBackend>(kernel, targets); }},
          .batches = kernel == cpu::AttendKernel::decode};
}

inline Rounding bf16_rounding(RowFormat format) {
  const bool in_bf16 = format.is_coded() || format == DType::bf16;
  return in_bf16 ? Rounding{kBf16Step, kBf16Step} : Rounding();
}

// Prefill rounds the elements of coded rows to bf16 as well as queries and weights.
inline Rounding cuda_rounding(RowFormat format) {
  const double step = format.is_coded()       ? 1.5 * kBf16Step
                      : format == DType::bf16 ? kBf16Step
                                              : kHalfStep;
  return {step, step};
}

// Queries and weights of decoded tokens are sums of two numbers of the rows' dtype, or of bf16 if
// rows are coded; codes are exact.
inline Rounding cuda_batch_rounding(RowFormat format) {
  const Rounding one = cuda_rounding(format.is_coded() ? RowFormat(DType::bf16) : format);
  return {one.queries * one.queries, one.weights * one.weights};
}

// Every backend, and every kernel of the CPU backend with every instruction set of this machine.
inline std::vector<AttentionImplementation> implementations() {
  std::vector<AttentionImplementation> all;
  all.push_back({.backend = reference_backend()});
  all.push_back({.backend = cpu_backend(DType::f32)});
  for (const std::int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SCALAR}) {
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    const std::string suffix = std::string("_") + hwy::TargetName(target);
    for (const auto& [name, kernel] : {std::pair{"decode", cpu::AttendKernel::decode},
                                       std::pair{"prefill", cpu::AttendKernel::prefill}}) {
      all.push_back(forced(name + suffix, kernel, target));
      // The CPU backend above has every head_dim with this processor's own instructions. Of the
      // others one that is no whole number of vectors, a usual one and the largest are enough, and
      // vectors of one element fit rows of any length.
      all.back().head_dims = {40, 64};
      if (target != HWY_SCALAR) all.back().head_dims.push_back(256);
    }
  }
  for (const cpu::AttendKernel kernel : {cpu::AttendKernel::amx, cpu::AttendKernel::avx512_bf16}) {
    if (!cpu::attend_supported(kernel, {.rows = DType::bf16})) continue;
    all[1].rounding = bf16_rounding;
    all.push_back(forced(kernel == cpu::AttendKernel::amx ? "amx" : "avx512_bf16", kernel, 0));
    all.back().formats = {DType::bf16, RowCode::int8, RowCode::k8v4};
    all.back().rounding = bf16_rounding;
  }
  const std::vector<NamedBackend> gpu = gpu_backends();
  if (!gpu.empty()) {
    // One backend is enough, because attention does not depend on the dtype of matrix products.
    all.push_back({.backend = {"cuda", gpu.front().make},
                   .formats = {DType::f16, DType::bf16, RowCode::int8, RowCode::k8v4},
                   .head_dims = {32, 64, 80, 96, 128, 256},
                   .rounding = cuda_rounding,
                   .batch_rounding = cuda_batch_rounding,
                   .rounds_codes = true});
  }
  return all;
}

struct AttentionParameter {
  AttentionImplementation implementation;
  RowFormat format;
  int head_dim;
};

inline std::ostream& operator<<(std::ostream& out, const AttentionParameter& p) {
  return out << p.implementation.backend.name << ' ' << to_string(p.format) << ' ' << p.head_dim;
}

// All implementations with those of their head dimensions that `wanted` accepts.
inline std::vector<AttentionParameter> parameters(const std::function<bool(int)>& wanted) {
  std::vector<AttentionParameter> all;
  for (const AttentionImplementation& implementation : implementations()) {
    for (const RowFormat format : implementation.formats) {
      for (const int head_dim : implementation.head_dims) {
        if (wanted(head_dim) && format.fits(head_dim)) {
          all.push_back({implementation, format, head_dim});
        }
      }
    }
  }
  return all;
}

inline std::string parameter_name(const ::testing::TestParamInfo<AttentionParameter>& info) {
  return info.param.implementation.backend.name + "_" + to_string(info.param.format) + "_d" +
         std::to_string(info.param.head_dim);
}

class AttentionParity : public ::testing::TestWithParam<AttentionParameter> {
 protected:
  KvShape shape(int kv_heads, int group) const {
    return {.layers = 1,
            .query_heads = kv_heads * group,
            .kv_heads = kv_heads,
            .head_dim = GetParam().head_dim,
            .rows = GetParam().format};
  }
  void SetUp() override {
    backend_ = make_or_skip(GetParam().implementation.backend, GetParam().head_dim);
  }
  Rounding rounding() const { return GetParam().implementation.rounding(GetParam().format); }
  // Returns true if attend() rounds the elements of the rows.
  static bool rounds_codes() {
    return GetParam().implementation.rounds_codes && GetParam().format.is_coded();
  }
  Rounding batch_rounding() const {
    return GetParam().implementation.batch_rounding(GetParam().format);
  }
  // Shows all rows to all queries, unless the case says otherwise.
  static void show_all(AttentionCase& c) {
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      c.first_query_position = std::max(c.first_query_position, c.count(head));
    }
  }
  void check(const AttentionCase& c) {
    AttentionRun run(*backend_, c);
    run.attend();
    expect_parity(c, run.result(), rounding());
  }
  void check_batch(const std::vector<AttentionCase>& cases, Places places = Places::either,
                   std::int64_t arena_rows = 0) {
    if (!GetParam().implementation.batches) return;
    BatchRun run(*backend_, random_, cases, places);
    check_results(cases, run.attend(arena_rows), batch_rounding());
  }
  // Attends to the newest token of a sequence in one batch with a token of another sequence.
  void check_in_batch(const AttentionCase& c) {
    AttentionCase other = newest_case(random_, c.shape, 200);
    other.scale = c.scale;
    std::vector<AttentionCase> cases = {other, c};
    cases[1].first_query_position = c.count(0) - 1;
    check_batch(cases);
  }
  static void check_results(const std::vector<AttentionCase>& cases,
                            const std::vector<Partial>& results, const Rounding& rounding) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << "sequence " << i << " of " << cases[i].count(0));
      expect_parity(cases[i], results[i], rounding);
      if (HasFatalFailure()) return;
    }
  }

  const std::uint64_t seed_ = seed(20250611);
  Random random_{seed_};
  std::unique_ptr<Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, seed_message(seed_)};
};

class AttentionParityOfShapes : public AttentionParity {};

inline std::vector<AttentionParameter> all_shapes() {
  return parameters([](int) { return true; });
}

inline std::vector<AttentionParameter> common_shapes() {
  return parameters([](int head_dim) { return head_dim == 64 || head_dim == 128; });
}

}  // namespace sluice::testing
