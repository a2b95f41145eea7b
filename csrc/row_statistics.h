// The statistics of a row, and its weights, which overwrite it. Included once per instruction set, with its vectors.
//
// A row is read in blocks of kBlock columns, each relative to the largest logit so far. Terms are float32 (float64 for
// float64 logits), sums of more than a few of them wider. The target's column stays out of every sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

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

constexpr size_t kCacheLine = 64, kPage = 4096;

// Asks for some columns that are read soon; where there are none, nothing happens.
template <int64_t kCount, class In>
inline void fetch(const In* from) {
  for (size_t byte = 0; byte < kCount * sizeof(In); byte += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, 0, 2);
  }
}

// The last columns of a row, and -inf up to the width of the vectors.
template <int64_t kStep, class In>
inline void pad(const In* from, int64_t columns, In (&tail)[kStep]) {
  std::fill(tail, tail + kStep, minus_infinity<In>());
  std::memcpy(tail, from, columns * sizeof(In));
}

// What the loops over a row need, in the vectors' own numbers.
template <class Simd>
struct Constants {
  using Number = typename Simd::Number;
  using Vector = typename Simd::Vector;
  double factor;
  Scale<Simd> scale;
  Vector lowest;
  Cap<Simd> cap;

  explicit Constants(const Transform& transform)
      : factor(transform.slope),
        scale(factor),
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
    // The processor itself looks ahead no further than a page. Of 16-bit logits it brings enough while this computes.
    if constexpr (sizeof(In) >= sizeof(float) && !kStore) fetch<kStep>(at + kPage / sizeof(In));
    Simd::load(at, a, b);
    if constexpr (kCap) {
      a = constants.cap(a, unused);
      b = constants.cap(b, unused);
    }
    top_a = Simd::larger(a, top_a);
    top_b = Simd::larger(b, top_b);
    a = Simd::larger(constants.lowest, Simd::subtract(a, offset));
    b = Simd::larger(constants.lowest, Simd::subtract(b, offset));
    const Power<Simd> p_a(a, constants.scale), p_b(b, constants.scale);
    sum_a = Simd::multiply_add(p_a.near_one, p_a.power, sum_a);
    sum_b = Simd::multiply_add(p_b.near_one, p_b.power, sum_b);
    if constexpr (kEntropy) {
      energy_a = Simd::multiply_add(p_a.value(), a, energy_a);
      energy_b = Simd::multiply_add(p_b.value(), b, energy_b);
    }
    if constexpr (kStore) Simd::store(at, p_a.value(), p_b.value());
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
    pad(row + i, columns - i, tail);
    steps(tail, 1);
    if constexpr (kStore) std::memcpy(row + i, tail, (columns - i) * sizeof(In));
  }
  return {Simd::largest(Simd::larger(top_a, top_b)), sum.all(), energy.all()};
}

// c(x) of one column, by the arithmetic of all: of equal logits none may be the largest.
template <class Simd>
inline double capped(typename Simd::Number x, const Constants<Simd>& constants) {
  typename Simd::Vector unused;
  typename Simd::Number lanes[2 * Simd::kLanes];
  const auto c = constants.cap(Simd::all(x), unused);
  Simd::store(lanes, c, c);
  return lanes[0];
}

template <class Number>
using Wider = std::conditional_t<std::is_same_v<Number, float>, double, long double>;

// The sums so far, relative to the largest logit so far: its own term is exactly 1, so that of a row with little beside
// it that little keeps its digits.
struct Running {
  double top;
  long double sum = 0, energy = 0;

  explicit Running(double largest) : top(largest) {}

  inline void add(const Sums& others) {
    sum += others.sum;
    energy += others.energy;
  }
  inline void raise(double new_top, double slope) {
    if (sum != 0) {
      const long double change = static_cast<long double>(top) - new_top, factor = std::exp(change * slope);
      energy = factor == 0 ? 0 * energy : factor * (energy + change * sum);
      sum *= factor;
    }
    top = new_top;
  }
};

// In numbers wider than those that are handed out.
template <class Wide>
inline Statistics finish(const Running& others, double target, const Transform& transform) {
  const double top = others.top;
  if (top <= transform.masked_below) return {kNaN, kNaN, kNaN, top, kNaN, kNaN};  // no distribution
  const Wide slope = static_cast<Wide>(transform.slope), rest = static_cast<Wide>(others.sum);
  const Wide y = (static_cast<Wide>(target) - top) * slope, weight = std::exp(y), total = rest + weight;
  const bool likely = weight >= rest;
  const Wide log_ratio = likely ? std::log1p(rest / weight) : 0;
  const Wide log_total = likely ? log_ratio + y : std::log(total);
  const Wide energy = static_cast<Wide>(others.energy) * slope;
  // log S + sum p (-y): nothing cancels. A likely target's own y stands in both and is taken out of both.
  const Wide entropy = likely ? log_ratio + (y * rest - energy) / total
                              : log_total - (energy + (weight == 0 ? 0 : weight * y)) / total;
  const auto number = [](Wide x) { return static_cast<double>(x); };
  return {number(likely ? 0 - log_ratio : y - log_total),
          number(entropy < 0 ? 0 : entropy),
          number(top * slope + log_total),
          top,
          number(total),
          number(rest)};
}

template <class Simd, class In>
double largest(const In* row, int64_t columns) {
  constexpr int64_t kStep = 2 * Simd::kLanes;
  auto top_a = Simd::all(static_cast<typename Simd::Number>(-kInfinity)), top_b = top_a;
  const auto step = [&](const In* at) {
    typename Simd::Vector a, b;
    Simd::load(at, a, b);
    top_a = Simd::larger(a, top_a);
    top_b = Simd::larger(b, top_b);
  };
  int64_t i = 0;
  for (; i + kStep <= columns; i += kStep) step(row + i);
  if (i < columns) {
    In tail[kStep];
    pad(row + i, columns - i, tail);
    step(tail);
  }
  return Simd::largest(Simd::larger(top_a, top_b));
}

template <class Simd, class In, bool kCap, bool kEntropy>
Statistics statistics(const In* row, int64_t columns, int64_t target, const Transform& transform) {
  const Constants<Simd> constants(transform);
  const auto x = widened(row[target]);
  const double of_target = kCap ? capped<Simd>(x, constants) : static_cast<double>(x);
  double first = of_target == of_target ? of_target : -kInfinity;
  // the first block mostly holds a new largest: to look for it is cheaper than to sweep again
  if constexpr (!kCap) first = std::max(first, largest<Simd, In>(row, std::min(columns, kBlock)));
  Running running(first);
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
  return finish<Wider<typename Simd::Number>>(running, of_target, transform);
}

// float16's lowest number, which stands for -inf, is no number of others: under so small a slope it would have a share.
inline bool counts_lowest(const Transform& transform) { return transform.softcap == 0 && transform.slope < 0.05; }

template <class Number, class In>
std::vector<Number> without_lowest(const In* row, int64_t columns, const Transform& transform) {
  std::vector<Number> wide(columns);
  for (int64_t i = 0; i < columns; ++i) {
    const Number x = widened(row[i]);
    wide[i] = x <= transform.masked_below ? static_cast<Number>(-kInfinity) : x;
  }
  return wide;
}

inline Transform widened_from(Transform transform) {
  transform.masked_below = masked_below(kFloat);
  return transform;
}

template <class Simd, class In>
Statistics any_statistics(
    const void* row, int64_t columns, int64_t target, const Transform& transform, bool entropy) {
  const In* x = static_cast<const In*>(row);
  if constexpr (std::is_same_v<In, Half>) {
    if (counts_lowest(transform)) {
      const auto wide = without_lowest<typename Simd::Number>(x, columns, transform);
      return any_statistics<Simd, typename Simd::Number>(wide.data(), columns, target, widened_from(transform), entropy);
    }
  }
  if (transform.softcap > 0) {
    return entropy ? statistics<Simd, In, true, true>(x, columns, target, transform)
                   : statistics<Simd, In, true, false>(x, columns, target, transform);
  }
  return entropy ? statistics<Simd, In, false, true>(x, columns, target, transform)
                 : statistics<Simd, In, false, false>(x, columns, target, transform);
}

template <class Simd>
Statistics weigh(void* row, int64_t columns, int64_t target, const Transform& transform, bool entropy) {
  using Number = typename Simd::Number;
  Number* x = static_cast<Number*>(row);
  const Constants<Simd> constants(transform);
  const double of_target = x[target] <= transform.masked_below ? -kInfinity : static_cast<double>(x[target]);
  Running running(largest<Simd, Number>(x, columns));
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
  return finish<Wider<typename Simd::Number>>(running, of_target, transform);
}

}  // namespace
}  // namespace grpo_kernels
