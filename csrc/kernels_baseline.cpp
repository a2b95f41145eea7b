#include "kernels.h"

namespace grpo_kernels {

const Kernels baseline_kernels = kernels_of<Plain<float, double, uint32_t, 23>, Plain<double, long double, uint64_t, 52>>();

}  // namespace grpo_kernels
