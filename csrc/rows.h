// What the operators ask of one row, and the tables of functions that answer, one for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace grpo_kernels {

// The order of the tables below.
enum Type : int { kFloat, kBFloat16, kHalf, kDouble, kTypes };

// Logits at or under it stand for -inf.
constexpr double masked_below(Type type) { return type == kHalf ? -65504.0 : -0x1.FEp127; }

constexpr int64_t kDead = -1;  // targets below 0, as in grpo_kernels/ops/schema.py

// z = c(x) * slope, where c is the identity, or softcap * tanh(logit_scale * x / softcap) if softcap > 0.
struct Transform {
  double slope;
  double logit_scale;
  double softcap;
  double masked_below;  // logits at or under it stand for -inf
};

struct Statistics {
  double logp, entropy, lse, row_max, sum_exp, sum_others;
};

struct Upstream {
  double grad_logp, grad_entropy;
  bool with_entropy;
};

struct Kernels {
  using Stats = Statistics (*)(const void* row, int64_t columns, int64_t target, const Transform&, bool entropy);
  // `ahead`: the row that this thread reads next, or null.
  using Grad = void (*)(
      const void* row, void* out, Type out_type, int64_t columns, int64_t target, const Transform&, const Statistics&,
      const Upstream&, const void* ahead);
  // Statistics of a row that is overwritten by exp(y), its target by 0.
  using Weigh = Statistics (*)(void* row, int64_t columns, int64_t target, const Transform&, bool entropy);

  Stats stats[kTypes];
  Grad grad[kTypes];
  Weigh weigh[kTypes];  // null for the 16-bit types
};

extern const Kernels baseline_kernels;
#ifdef GRPO_KERNELS_X86
extern const Kernels avx2_kernels, avx512_kernels;
#endif

}  // namespace grpo_kernels
