// Compiled for AVX2, FMA and F16C; all but the table is local to this file, so that nothing of it runs elsewhere.
#ifdef GRPO_KERNELS_X86
#include "kernels.h"
#include "simd_avx2.h"

namespace grpo_kernels {

const Kernels avx2_kernels = kernels_of<Avx2Float, Avx2Double>();

}  // namespace grpo_kernels
#endif
