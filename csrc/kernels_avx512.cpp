// Compiled for AVX-512 F, BW, DQ and VL; all but the table is local to this file, so that nothing of it runs elsewhere.
#ifdef GRPO_KERNELS_X86
#include "kernels.h"
#include "simd_avx512.h"

namespace grpo_kernels {

const Kernels avx512_kernels = kernels_of<Avx512Float, Avx512Double>();

}  // namespace grpo_kernels
#endif
