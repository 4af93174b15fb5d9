// Every backend of this build, by name, for suites that compare all of them with the same answers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/reference/backend.h"
#include "sluice/errors.h"
#include "tests/support/device.h"
#ifdef SLUICE_CUDA
#include "kernels/cuda_backend.h"
#endif

namespace sluice::testing {

struct NamedBackend {
  std::string name;
  std::function<std::unique_ptr<Backend>()> make;
};

inline std::ostream& operator<<(std::ostream& out, const NamedBackend& backend) {
  return out << backend.name;
}

inline std::string name_of(const ::testing::TestParamInfo<NamedBackend>& info) {
  return info.param.name;
}

inline NamedBackend reference_backend() {
  return {"reference", [] { return std::make_unique<cpu::ReferenceBackend>(); }};
}

inline NamedBackend cpu_backend(DType compute) {
  return {"cpu_" + std::string(to_string(compute)), [compute] {
            cpu::CpuOptions options;
            options.threads = 2;
            options.compute = compute;
            return std::make_unique<cpu::CpuBackend>(options);
          }};
}

// The GPU backends, listed even without a GPU.
inline std::vector<NamedBackend> gpu_backends() {
  std::vector<NamedBackend> all;
#ifdef SLUICE_CUDA
  for (const DType compute : {DType::bf16, DType::f16, DType::f32}) {
    all.push_back({"cuda_" + std::string(to_string(compute)), [compute] {
                     cuda::CudaOptions options;
                     options.compute = compute;
                     return cuda::make_cuda_backend(options);
                   }});
  }
#endif
  return all;
}

// The devices that an engine or a cache accepts; includes a GPU even if there is none.
inline std::vector<std::string> devices() {
  std::vector<std::string> all = {"cpu"};
  if (!gpu_backends().empty()) all.emplace_back("cuda");
  return all;
}

inline std::vector<NamedBackend> backends() {
  std::vector<NamedBackend> all = {reference_backend(), cpu_backend(DType::f32)};
  if (cpu::Linear::bf16_is_fast()) all.push_back(cpu_backend(DType::bf16));
  for (NamedBackend& gpu : gpu_backends()) all.push_back(std::move(gpu));
  return all;
}

// One backend of each kind, for tests that do not depend on the dtype of matrix products.
inline std::vector<NamedBackend> backends_by_kind() {
  std::vector<NamedBackend> all = {reference_backend(), cpu_backend(DType::f32)};
  all.back().name = "cpu";
  const std::vector<NamedBackend> gpu = gpu_backends();
  if (!gpu.empty()) all.push_back({"cuda", gpu.front().make});
  return all;
}

// Returns null and skips the running test if a GPU backend finds no GPU.
inline std::unique_ptr<Device> make_or_skip(const NamedBackend& backend) {
  try {
    return std::make_unique<Device>(backend.make());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported || !backend.name.starts_with("cuda")) throw;
    [&] { GTEST_SKIP() << error.what(); }();
    return nullptr;
  }
}

// The same for rows of this head_dim; also skips if the device has no attention for it.
inline std::unique_ptr<Device> make_or_skip(const NamedBackend& backend, int head_dim) {
  std::unique_ptr<Device> device = make_or_skip(backend);
  if (device == nullptr) return nullptr;
  const std::vector<int>& dims = device->info().head_dims;
  if (dims.empty() || std::find(dims.begin(), dims.end(), head_dim) != dims.end()) return device;
  [&] { GTEST_SKIP() << "no attention for head_dim " << head_dim; }();
  return nullptr;
}

// The same for rows of this shape; also skips if the device has no rows of its format.
inline std::unique_ptr<Device> make_or_skip(const NamedBackend& backend, const KvShape& shape) {
  std::unique_ptr<Device> device = make_or_skip(backend, shape.head_dim);
  if (device == nullptr) return nullptr;
  if (device->info().takes(shape.rows)) return device;
  [&] { GTEST_SKIP() << "no rows of " << to_string(shape.rows); }();
  return nullptr;
}

// Whether a test of this one of devices() is skipped, having no GPU; it is told so, and returns.
inline bool skips(const std::string& device) {
  return device == "cuda" && make_or_skip(gpu_backends().front()) == nullptr;
}

}  // namespace sluice::testing
