#include "kernels/runtime/error.h"

#include <string>

#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

ErrorCode code_of(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
    case cudaErrorHostMemoryAlreadyRegistered:
      return ErrorCode::memory;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorDevicesUnavailable:
      return ErrorCode::unsupported;
    default:
      return ErrorCode::internal;
  }
}

}  // namespace

bool is_sticky(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  ignore(status);
  std::string message = std::string("CUDA: ") + what + ": " + cudaGetErrorString(status);
  if (is_sticky(status)) {
    message += "; the device cannot be used any more by this process: start it again";
  }
  if (code_of(status) == ErrorCode::unsupported) {
    message += "; look at the device and its driver (nvidia-smi), or use `device` cpu";
  }
  throw Error(code_of(status), message);
}

void ignore(cudaError_t status) noexcept {
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
}

void require_launch(const char* kernel) { require(cudaGetLastError(), kernel); }

}  // namespace sluice::cuda
