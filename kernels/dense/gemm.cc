#include <cublas_v2.h>
#include <dlfcn.h>

#include <array>
#include <string>

#include "kernels/dense/dense.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

// The functions of cuBLAS that are used here.
struct Cublas {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  // Spelled out, for C++ has a second cublasGemmEx.
  cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                         const void*, const void*, cudaDataType, int, const void*, cudaDataType,
                         int, const void*, void*, cudaDataType, int, cublasComputeType_t,
                         cublasGemmAlgo_t) = nullptr;
};

void* open_library() {
  const std::string name = "libcublas.so." + std::to_string(CUBLAS_VER_MAJOR);
  for (const std::string& path : {name, std::string(SLUICE_CUDA_LIBRARIES) + "/" + name}) {
    if (void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  throw Error(ErrorCode::unsupported, "`device` cuda needs cuBLAS, and " + name +
                                          " cannot be loaded; install it or name its folder in "
                                          "LD_LIBRARY_PATH");
}

Cublas load() {
  void* const library = open_library();
  const auto find = [&](const char* name, auto& function) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr) {
      throw Error(ErrorCode::unsupported, std::string("this cuBLAS has no ") + name);
    }
  };
  Cublas cublas;
  find("cublasCreate_v2", cublas.create);
  find("cublasDestroy_v2", cublas.destroy);
  find("cublasSetStream_v2", cublas.set_stream);
  find("cublasSetWorkspace_v2", cublas.set_workspace);
  find("cublasGemmEx", cublas.gemm);
  return cublas;
}

void require(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const ErrorCode code =
      status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorCode::memory : ErrorCode::internal;
  throw Error(code, std::string("cuBLAS: ") + what + " failed with status " +
                        std::to_string(static_cast<int>(status)));
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::f16:
      return CUDA_R_16F;
    case DType::bf16:
      break;
  }
  return CUDA_R_16BF;
}

}  // namespace

struct Gemm::Impl {
  Cublas cublas = load();
  cublasHandle_t handle = nullptr;
  Launch launch;

  explicit Impl(const Launch& of) : launch(of) {
    require(cublas.create(&handle), "starting");
    require(cublas.set_stream(handle, launch.stream), "a stream");
    set_workspace(launch.scratch, launch.scratch_bytes);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() { static_cast<void>(cublas.destroy(handle)); }

  void set_workspace(std::byte* data, std::size_t bytes) const {
    require(cublas.set_workspace(handle, data, bytes), "a workspace");
  }
};

Gemm::Gemm(const Launch& launch) : impl_(std::make_unique<Impl>(launch)) {}
Gemm::~Gemm() = default;

void Gemm::set_workspace(std::byte* data, std::size_t bytes) { impl_->set_workspace(data, bytes); }

void Gemm::run(const LinearParams& p, const void* weight) {
  bool accumulate = p.accumulate;
  if (p.bias != nullptr) {
    add_bias(p.bias, p.y, accumulate, impl_->launch);
    accumulate = true;
  }
  // Row-major y = x W^T is column-major y^T = W x^T.
  const float alpha = 1.0f;
  const float beta = accumulate ? 1.0f : 0.0f;
  const auto outputs = static_cast<int>(p.y.columns);
  const auto inputs = static_cast<int>(p.x.columns);
  const cudaDataType_t type = type_of(p.x.dtype);
  require(
      impl_->cublas.gemm(impl_->handle, CUBLAS_OP_T, CUBLAS_OP_N, outputs,
                         static_cast<int>(p.x.rows), inputs, &alpha, weight, type, inputs, p.x.data,
                         type, static_cast<int>(p.x.stride), &beta, p.y.data, CUDA_R_32F,
                         static_cast<int>(p.y.stride), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      "a matrix product");
}

}  // namespace sluice::cuda
