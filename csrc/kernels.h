// The table of the kernels of one instruction set.
#pragma once

#include "row_gradient.h"
#include "row_statistics.h"

namespace grpo_kernels {
namespace {

template <class Float, class Double>
constexpr Kernels kernels_of() {
  return {
      {any_statistics<Float, float>, any_statistics<Float, BFloat16>, any_statistics<Float, Half>,
       any_statistics<Double, double>},
      {any_gradient<Float, float, kFloat>, any_gradient<Float, BFloat16, kBFloat16>, any_gradient<Float, Half, kHalf>,
       any_gradient<Double, double, kDouble>},
      {weigh<Float>, nullptr, nullptr, weigh<Double>},
  };
}

}  // namespace
}  // namespace grpo_kernels
