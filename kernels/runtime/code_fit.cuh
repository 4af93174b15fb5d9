// CodeFit of lib/code_fit.h for kernels, rounded at every step as it is there.
#pragma once

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/whole_pages.cuh"

namespace sluice::cuda {

struct DeviceFit {
  double values = 0.0;
  double products = 0.0;
  int codes = 0;
  int squares = 0;

  __device__ __forceinline__ void add(float value, std::uint32_t code) {
    const auto own = static_cast<int>(code);
    values = __dadd_rn(values, value);
    products = __dadd_rn(products, __dmul_rn(value, own));
    codes += own;
    squares += own * own;
  }
  __device__ __forceinline__ void add(const DeviceFit& other) {
    values = __dadd_rn(values, other.values);
    products = __dadd_rn(products, other.products);
    codes += other.codes;
    squares += other.squares;
  }
  // Scale and zero of a page of kPageTokens tokens, as they are stored.
  __device__ __forceinline__ void solve(__half& scale, __half& zero) const {
    const int spread = kPageTokens * squares - codes * codes;
    const double slope = __dsub_rn(__dmul_rn(kPageTokens, products), __dmul_rn(values, codes));
    const double best = spread == 0 ? 0.0 : __ddiv_rn(slope, spread);
    scale = __float2half_rn(clamp_to_half(__double2float_rn(best)));
    const double rest = __dsub_rn(values, __dmul_rn(__half2float(scale), codes));
    zero = __float2half_rn(clamp_to_half(__double2float_rn(__ddiv_rn(rest, kPageTokens))));
  }
};

}  // namespace sluice::cuda
