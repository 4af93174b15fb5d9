#include "kernels/cuda_module.h"

extern "C" void sluice_make_cuda_backend(const sluice::cuda::CudaOptions& options,
                                         std::unique_ptr<sluice::Backend>& backend) {
  backend = sluice::cuda::make_cuda_backend(options);
}
