#include "kernels/dense/coded_batch.cuh"
#include "kernels/dense/coded_gemv.cuh"

namespace sluice::cuda {

template void launch_row_kernel<WeightCode::int4>(const CodedProductParams&, DType, bool,
                                                  const CodedLaunch&, const Launch&);
template void launch_batch_kernel<WeightCode::int4>(const CodedProductParams&, DType,
                                                    const CodedLaunch&, const Launch&);

}  // namespace sluice::cuda
