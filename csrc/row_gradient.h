// The gradient of a row from its statistics: one pass that reads and writes it.
#pragma once

#include "row_statistics.h"

namespace grpo_kernels {
namespace {

// exp(y) * (weight + (c(x) - top) * entropy_weight) of some columns, times the cap's derivative.
template <class Simd, class In, bool kCap, bool kEntropy>
inline void gradient(
    const In* row, In* out, int64_t columns, double top, double weight, double entropy_weight,
    const Constants<Simd>& constants, const In* ahead) {
  using Number = typename Simd::Number;
  using Vector = typename Simd::Vector;
  constexpr int64_t kStep = 2 * Simd::kLanes;
  const Vector offset = Simd::all(static_cast<Number>(top)), factor = Simd::all(static_cast<Number>(weight));
  const Vector entropy_factor = Simd::all(static_cast<Number>(entropy_weight));
  const WeightedPower<Simd> weighted(constants.factor, weight);
  const auto of = [&](Vector x) {
    Vector derivative, result;
    if constexpr (kCap) x = constants.cap(x, derivative);
    x = Simd::subtract(x, offset);
    if constexpr (kEntropy) {
      x = Simd::larger(constants.lowest, x);
      const Power<Simd> p(x, constants.scale);
      result = Simd::multiply(p.value(), Simd::multiply_add(x, entropy_factor, factor));
    } else {
      result = weighted(x);
    }
    if constexpr (kCap) result = Simd::multiply(result, derivative);
    return result;
  };
  const auto step = [&](const In* from, In* to) {
    Vector a, b;
    Simd::load(from, a, b);
    Simd::store(to, of(a), of(b));
  };
  int64_t i = 0;
  // This computes on what the cache holds, so the memory is free to bring the row that comes next. With half as much to
  // bring, and as much to compute, that costs more than it gains.
  if (sizeof(In) >= sizeof(float) && ahead != nullptr) {
    for (; i + kStep <= columns; i += kStep) {
      fetch<kStep>(ahead + i);
      step(row + i, out + i);
    }
  }
  for (; i + kStep <= columns; i += kStep) step(row + i, out + i);
  if (i < columns) {
    In tail[kStep];
    pad(row + i, columns - i, tail);
    step(tail, tail);
    std::memcpy(out + i, tail, (columns - i) * sizeof(In));
  }
}

template <class Simd, class In>
void gradient_of(
    const In* row, In* out, int64_t columns, double top, double weight, double entropy_weight, bool with_entropy,
    const Transform& transform, const Constants<Simd>& constants, const In* ahead) {
  if (transform.softcap > 0) {
    with_entropy ? gradient<Simd, In, true, true>(row, out, columns, top, weight, entropy_weight, constants, ahead)
                 : gradient<Simd, In, true, false>(row, out, columns, top, weight, entropy_weight, constants, ahead);
  } else {
    with_entropy ? gradient<Simd, In, false, true>(row, out, columns, top, weight, entropy_weight, constants, ahead)
                 : gradient<Simd, In, false, false>(row, out, columns, top, weight, entropy_weight, constants, ahead);
  }
}

template <class Number, class Out>
inline void narrow_all(const Number* from, Out* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}

template <class Number>
inline void narrow_to(const Number* from, void* to, Type type, int64_t begin, int64_t count) {
  switch (type) {
    case kFloat: return narrow_all(from, static_cast<float*>(to) + begin, count);
    case kBFloat16: return narrow_all(from, static_cast<BFloat16*>(to) + begin, count);
    case kHalf: return narrow_all(from, static_cast<Half*>(to) + begin, count);
    default: return narrow_all(from, static_cast<double*>(to) + begin, count);
  }
}

template <class Simd, class In, Type kType>
void any_gradient(
    const void* from, void* out, Type out_type, int64_t columns, int64_t target, const Transform& transform,
    const Statistics& stats, const Upstream& upstream, const void* ahead) {
  using Number = typename Simd::Number;
  const In* row = static_cast<const In*>(from);
  if constexpr (std::is_same_v<In, Half>) {
    if (counts_lowest(transform)) {
      const auto wide = without_lowest<Number>(row, columns, transform);
      return any_gradient<Simd, Number, kFloat>(
          wide.data(), out, out_type, columns, target, widened_from(transform), stats, upstream, nullptr);
    }
  }
  const Constants<Simd> constants(transform);
  const double g = upstream.grad_logp, g_entropy = upstream.grad_entropy;
  // R < 1 where the target is the largest: there 1 + R has lost the digits of R
  const double log_total = stats.sum_others < 1 ? std::log1p(stats.sum_others) : std::log(stats.sum_exp);
  const double mean_gap = upstream.with_entropy ? stats.entropy - log_total : 0;
  // what scales a whole row of float64 is rounded once
  const long double share = static_cast<long double>(transform.slope) / stats.sum_exp;
  const long double pull = upstream.with_entropy ? g + static_cast<long double>(g_entropy) * mean_gap : g;
  const double weight = static_cast<double>(-share * pull);
  const double entropy_weight =
      upstream.with_entropy ? static_cast<double>(-share * g_entropy * transform.slope) : 0;

  Number own = 0;  // read before a gradient in place overwrites it
  if (target >= 0) {
    const auto x = widened(row[target]);
    const double c = transform.softcap > 0 ? capped<Simd>(x, constants) : static_cast<double>(x);
    const double y = (c - stats.row_max) * transform.slope, p = std::exp(y);
    double grad = g * (stats.sum_others / stats.sum_exp);
    if (upstream.with_entropy && p != 0) grad -= g_entropy * (p / stats.sum_exp) * (y + mean_gap);
    grad *= transform.slope;
    if (p == 0 && x <= transform.masked_below) grad = 0;
    if (transform.softcap > 0) {
      const double q = std::exp(-2 * std::fabs(transform.logit_scale * x / transform.softcap));
      grad *= 4 * transform.logit_scale * q / ((1 + q) * (1 + q));
    }
    own = static_cast<Number>(grad);
  }
  if (out_type == kType) {
    gradient_of<Simd, In>(
        row, static_cast<In*>(out), columns, stats.row_max, weight, entropy_weight, upstream.with_entropy, transform,
        constants, static_cast<const In*>(ahead));
  } else {
    Number block[kBlock];
    for (int64_t begin = 0; begin < columns; begin += kBlock) {
      const int64_t width = columns - begin < kBlock ? columns - begin : kBlock;
      for (int64_t i = 0; i < width; ++i) block[i] = widened(row[begin + i]);
      gradient_of<Simd, Number>(
          block, block, width, stats.row_max, weight, entropy_weight, upstream.with_entropy, transform, constants,
          nullptr);
      narrow_to(block, out, out_type, begin, width);
    }
  }
  if (target >= 0) narrow_to(&own, out, out_type, target, 1);
}

}  // namespace
}  // namespace grpo_kernels
