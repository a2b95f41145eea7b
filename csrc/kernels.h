// One row: statistics, gradient, weights. Included once per instruction set, with its vectors.
//
// A row is read in blocks of kBlock columns, each relative to the largest logit so far. Terms are float32 (float64 for
// float64 logits), sums of more than a few of them wider. The target's column stays out of every sum.
#pragma once

#include <cmath>
#include <limits>

#include "rows.h"
#include "vector_math.h"

namespace grpo_kernels {
namespace {

constexpr int64_t kBlock = 2048;
constexpr int kChain = 8;  // additions of a lane before its sum goes to a wider one: 1 + 1e-8 + 1e-8 + ... loses all
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <class In>
inline In minus_infinity() {
  In result;
  narrow(static_cast<decltype(widened(In()))>(-kInfinity), result);
  return result;
}

// What the loops over a row need, in the vectors' own numbers.
template <class Simd>
struct Constants {
  using Number = typename Simd::Number;
  using Vector = typename Simd::Vector;
  Scale<Simd> scale;
  Vector lowest;
  Cap<Simd> cap;

  explicit Constants(const Transform& transform)
      : scale(transform.slope),
        lowest(Simd::all(floor_of<Number>(transform.slope * kLog2E))),
        cap(transform.softcap, transform.logit_scale, transform.masked_below) {}
};

// Sums over lanes and blocks are wider than any term: in float64 the few roundings of a row's last numbers would show.
struct Sums {
  double top;
  long double sum, energy;  // energy: sum of exp(y) * (c(x) - shift), times slope that of exp(y) * y
};

// Largest c(x) of some columns, and their sums relative to `shift`. With kStore they are overwritten by exp(y).
template <class Simd, class In, bool kCap, bool kEntropy, bool kStore>
inline Sums sweep(In* row, int64_t columns, double shift, const Constants<Simd>& constants) {
  using Vector = typename Simd::Vector;
  constexpr int64_t kStep = 2 * Simd::kLanes;
  const Vector offset = Simd::all(static_cast<typename Simd::Number>(shift));
  Vector top_a = Simd::all(static_cast<typename Simd::Number>(-kInfinity)), top_b = top_a;
  Vector sum_a, sum_b, energy_a, energy_b;
  typename Simd::Total sum, energy;

  const auto step = [&](In* at) {
    Vector a, b, unused;
    Simd::load(at, a, b);
    if constexpr (kCap) {
      a = constants.cap(a, unused);
      b = constants.cap(b, unused);
    }
    top_a = Simd::larger(a, top_a);
    top_b = Simd::larger(b, top_b);
    a = Simd::larger(constants.lowest, Simd::subtract(a, offset));
    b = Simd::larger(constants.lowest, Simd::subtract(b, offset));
    const Vector p_a = exponential<Simd>(a, constants.scale), p_b = exponential<Simd>(b, constants.scale);
    sum_a = Simd::add(sum_a, p_a);
    sum_b = Simd::add(sum_b, p_b);
    if constexpr (kEntropy) {
      energy_a = Simd::multiply_add(p_a, a, energy_a);
      energy_b = Simd::multiply_add(p_b, b, energy_b);
    }
    if constexpr (kStore) Simd::store(at, p_a, p_b);
  };
  const auto steps = [&](In* at, int count) {
    sum_a = sum_b = energy_a = energy_b = Simd::all(0);
    for (int i = 0; i < count; ++i) step(at + i * kStep);
    sum.add(Simd::add(sum_a, sum_b));
    if constexpr (kEntropy) energy.add(Simd::add(energy_a, energy_b));
  };
  int64_t i = 0;
  for (; i + kChain * kStep <= columns; i += kChain * kStep) steps(row + i, kChain);
  const int left = static_cast<int>((columns - i) / kStep);
  if (left > 0) steps(row + i, left);
  i += left * kStep;
  if (i < columns) {
    In tail[kStep];
    for (int64_t j = 0; j < kStep; ++j) tail[j] = i + j < columns ? row[i + j] : minus_infinity<In>();
    steps(tail, 1);
    if constexpr (kStore) std::memcpy(row + i, tail, (columns - i) * sizeof(In));
  }
  return {Simd::largest(Simd::larger(top_a, top_b)), sum.all(), energy.all()};
}

// c(x) of one column, rounded as in the vectors.
template <class Number>
inline double capped(Number x, const Transform& transform) {
  if (x <= transform.masked_below) return -kInfinity;
  if (x == kInfinity) return kNaN;
  return static_cast<Number>(transform.softcap * std::tanh(transform.logit_scale * x / transform.softcap));
}

struct Running {
  double top;
  long double sum, energy;

  // `others` are relative to `shift`, the top as it was.
  inline void add(const Sums& others) {
    sum += others.sum;
    energy += others.energy;
  }
  inline void raise(double new_top, double slope) {
    if (top != -kInfinity) {
      const long double change = static_cast<long double>(top) - new_top, factor = std::exp(change * slope);
      energy = factor == 0 ? 0 * energy : factor * (energy + change * sum);
      sum *= factor;
    }
    top = new_top;
  }
};

inline Statistics finish(const Running& others, double target, const Transform& transform) {
  const double top = others.top;
  if (top <= transform.masked_below) return {kNaN, kNaN, kNaN, top, kNaN, kNaN};  // no distribution
  const long double slope = transform.slope, rest = others.sum;
  const long double y = (static_cast<long double>(target) - top) * slope, weight = std::exp(y), total = rest + weight;
  const bool likely = weight >= rest;
  const long double log_ratio = likely ? std::log1p(rest / weight) : 0;
  const long double log_total = likely ? log_ratio + y : std::log(total);
  const long double energy = others.energy * slope;
  // log S + sum p (-y): nothing cancels. A likely target's own y stands in both and is taken out of both.
  const long double entropy = likely ? log_ratio + (y * rest - energy) / total
                                     : log_total - (energy + (weight == 0 ? 0 : weight * y)) / total;
  const auto number = [](long double x) { return static_cast<double>(x); };
  return {number(likely ? 0 - log_ratio : y - log_total),
          number(entropy < 0 ? 0 : entropy),
          number(top * slope + log_total),
          top,
          number(total),
          number(rest)};
}

template <class Simd, class In, bool kCap, bool kEntropy>
Statistics statistics(const In* row, int64_t columns, int64_t target, const Transform& transform) {
  const Constants<Simd> constants(transform);
  const auto x = widened(row[target]);
  const double of_target = kCap ? capped(x, transform) : static_cast<double>(x);
  Running running{of_target == of_target ? of_target : -kInfinity, 0, 0};
  const auto part = [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kBlock) {
      In* block = const_cast<In*>(row) + begin;
      const int64_t width = end - begin < kBlock ? end - begin : kBlock;
      const auto sums = [&] {
        const double shift = running.top == -kInfinity ? 0 : running.top;
        return sweep<Simd, In, kCap, kEntropy, false>(block, width, shift, constants);
      };
      Sums found = sums();
      if (found.top > running.top) {
        running.raise(found.top, transform.slope);
        found = sums();
      }
      running.add(found);
    }
  };
  part(0, target);
  part(target + 1, columns);
  return finish(running, of_target, transform);
}

template <class Simd, class In>
Statistics any_statistics(
    const void* row, int64_t columns, int64_t target, const Transform& transform, bool entropy) {
  const In* x = static_cast<const In*>(row);
  if (transform.softcap > 0) {
    return entropy ? statistics<Simd, In, true, true>(x, columns, target, transform)
                   : statistics<Simd, In, true, false>(x, columns, target, transform);
  }
  return entropy ? statistics<Simd, In, false, true>(x, columns, target, transform)
                 : statistics<Simd, In, false, false>(x, columns, target, transform);
}

template <class Simd>
typename Simd::Number largest(const typename Simd::Number* row, int64_t columns) {
  constexpr int64_t kStep = 2 * Simd::kLanes;
  auto top_a = Simd::all(static_cast<typename Simd::Number>(-kInfinity)), top_b = top_a;
  int64_t i = 0;
  for (; i + kStep <= columns; i += kStep) {
    typename Simd::Vector a, b;
    Simd::load(row + i, a, b);
    top_a = Simd::larger(a, top_a);
    top_b = Simd::larger(b, top_b);
  }
  auto top = Simd::largest(Simd::larger(top_a, top_b));
  for (; i < columns; ++i) top = row[i] > top ? row[i] : top;
  return top;
}

template <class Simd>
Statistics weigh(void* row, int64_t columns, int64_t target, const Transform& transform, bool entropy) {
  using Number = typename Simd::Number;
  Number* x = static_cast<Number*>(row);
  const Constants<Simd> constants(transform);
  const double of_target = x[target] <= transform.masked_below ? -kInfinity : static_cast<double>(x[target]);
  Running running{largest<Simd>(x, columns), 0, 0};
  const double shift = running.top == -kInfinity ? 0 : running.top;
  const auto part = [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kBlock) {
      const int64_t width = end - begin < kBlock ? end - begin : kBlock;
      running.add(
          entropy ? sweep<Simd, Number, false, true, true>(x + begin, width, shift, constants)
                  : sweep<Simd, Number, false, false, true>(x + begin, width, shift, constants));
    }
  };
  part(0, target);
  part(target + 1, columns);
  x[target] = 0;
  return finish(running, of_target, transform);
}

// exp(y) * (weight + (c(x) - top) * entropy_weight) of some columns, times the cap's derivative.
template <class Simd, class In, bool kCap, bool kEntropy>
inline void gradient(
    const In* row, In* out, int64_t columns, double top, double weight, double entropy_weight,
    const Constants<Simd>& constants) {
  using Number = typename Simd::Number;
  using Vector = typename Simd::Vector;
  constexpr int64_t kStep = 2 * Simd::kLanes;
  const Vector offset = Simd::all(static_cast<Number>(top)), factor = Simd::all(static_cast<Number>(weight));
  const Vector entropy_factor = Simd::all(static_cast<Number>(entropy_weight));
  const auto of = [&](Vector x) {
    Vector derivative;
    if constexpr (kCap) x = constants.cap(x, derivative);
    x = Simd::larger(constants.lowest, Simd::subtract(x, offset));
    const Vector p = exponential<Simd>(x, constants.scale);
    Vector result = Simd::multiply(p, kEntropy ? Simd::multiply_add(x, entropy_factor, factor) : factor);
    if constexpr (kCap) result = Simd::multiply(result, derivative);
    return result;
  };
  const auto step = [&](const In* from, In* to) {
    Vector a, b;
    Simd::load(from, a, b);
    Simd::store(to, of(a), of(b));
  };
  int64_t i = 0;
  for (; i + kStep <= columns; i += kStep) step(row + i, out + i);
  if (i < columns) {
    In tail[kStep];
    for (int64_t j = 0; j < kStep; ++j) tail[j] = i + j < columns ? row[i + j] : minus_infinity<In>();
    step(tail, tail);
    std::memcpy(out + i, tail, (columns - i) * sizeof(In));
  }
}

template <class Simd, class In>
void gradient_of(
    const In* row, In* out, int64_t columns, double top, double weight, double entropy_weight, bool with_entropy,
    const Transform& transform, const Constants<Simd>& constants) {
  if (transform.softcap > 0) {
    with_entropy ? gradient<Simd, In, true, true>(row, out, columns, top, weight, entropy_weight, constants)
                 : gradient<Simd, In, true, false>(row, out, columns, top, weight, entropy_weight, constants);
  } else {
    with_entropy ? gradient<Simd, In, false, true>(row, out, columns, top, weight, entropy_weight, constants)
                 : gradient<Simd, In, false, false>(row, out, columns, top, weight, entropy_weight, constants);
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
    const Statistics& stats, const Upstream& upstream) {
  using Number = typename Simd::Number;
  const In* row = static_cast<const In*>(from);
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
    const double c = transform.softcap > 0 ? capped(x, transform) : static_cast<double>(x);
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
        constants);
  } else {
    Number block[kBlock];
    for (int64_t begin = 0; begin < columns; begin += kBlock) {
      const int64_t width = columns - begin < kBlock ? columns - begin : kBlock;
      for (int64_t i = 0; i < width; ++i) block[i] = widened(row[begin + i]);
      gradient_of<Simd, Number>(
          block, block, width, stats.row_max, weight, entropy_weight, upstream.with_entropy, transform, constants);
      narrow_to(block, out, out_type, begin, width);
    }
  }
  if (target >= 0) narrow_to(&own, out, out_type, target, 1);
}

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
