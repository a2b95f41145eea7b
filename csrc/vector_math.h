// The exponential and the cap, on the vectors of one instruction set.
#pragma once

#include <cmath>
#include <iterator>

#include "simd_baseline.h"

namespace grpo_kernels {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// 2^y = 2^n * 2^r, n the nearest integer: the sum of y and `kMagic` holds n, biased, in its last bits. Exponents that
// end under the smallest normal number give exactly 0.
template <class Number>
struct Exponents;

template <>
struct Exponents<float> {
  static constexpr float kMagic = 0x1.8p23f + 127.0f;
  static constexpr double kLowest = -126.9;
  // 2^r on [-1/2, 1/2], made to have its largest relative error, 2e-9, least, with p(0) = 1; 0.94 ulp with its rounding
  static constexpr float kPolynomial[] = {0x1.41fbbcp-13f, 0x1.5f3e52p-10f, 0x1.3b2d4cp-7f,
                                          0x1.c6aee8p-5f,  0x1.ebfbdcp-3f,  0x1.62e43p-1f};
};

template <>
struct Exponents<double> {
  static constexpr double kMagic = 0x1.8p52 + 1023.0;
  static constexpr double kLowest = -1022.9;
  // the Taylor series: what it leaves out is under 5e-18
  static constexpr double kPolynomial[] = {
      0x1.816193166d0f9p-40, 0x1.c3bd650fc2986p-36, 0x1.e8cac7351bb25p-32, 0x1.e4cf5158b8ecap-28, 0x1.b5253d395e7c4p-24,
      0x1.62c0223a5c824p-20, 0x1.ffcbfc588b0c7p-17, 0x1.430912f86c787p-13, 0x1.5d87fe78a6731p-10, 0x1.3b2ab6fba4e77p-7,
      0x1.c6b08d704a0c0p-5,  0x1.ebfbdff82c58fp-3,  0x1.62e42fefa39efp-1};
};

// Lower end of what times `scale` is an exponent of 2; anything under it counts as it, so that 0 * -inf cannot happen.
template <class Number>
inline Number floor_of(double scale, double exponent = Exponents<Number>::kLowest) {
  const double lowest = exponent / scale;
  constexpr double kFinite = sizeof(Number) == sizeof(float) ? 0x1p127 : 0x1p1023;
  return static_cast<Number>(lowest < -kFinite ? -kFinite : lowest);
}

// A factor, and for float64 what its rounding left: nothing wider would hide an error of |y| * 2^-53 in every term.
template <class Simd>
struct Scale {
  typename Simd::Vector value, rest;

  // factor * log2(e)
  explicit Scale(double factor) {
    using Number = typename Simd::Number;
    constexpr double kLog2ERest = 2.0355273740931033e-17;
    const double product = factor * kLog2E;
    value = Simd::all(static_cast<Number>(product));
    rest = Simd::all(static_cast<Number>(std::fma(factor, kLog2E, -product) + factor * kLog2ERest));
  }
};

// What x * scale rounds to, in the last bits of `shifted`, and the rest, in [-1/2, 1/2].
template <class Simd>
struct Split {
  typename Simd::Vector shifted, rest;

  inline Split(typename Simd::Vector x, const Scale<Simd>& scale, typename Simd::Vector magic)
      : shifted(Simd::multiply_add(x, scale.value, magic)),
        rest(Simd::multiply_subtract(x, scale.value, Simd::subtract(shifted, magic))) {
    if constexpr (sizeof(typename Simd::Number) == sizeof(double)) rest = Simd::multiply_add(x, scale.rest, rest);
  }
};

// 2^(x * scale) as `near_one * power`, the product not rounded where there is a fused multiply-add; x >= floor_of(scale).
// NaN stays NaN. `beyond_one` is near_one minus 1 with all its digits.
template <class Simd>
struct Power {
  typename Simd::Vector beyond_one, near_one, power;

  inline Power(typename Simd::Vector x, const Scale<Simd>& scale) {
    using Constants = Exponents<typename Simd::Number>;
    const Split<Simd> split(x, scale, Simd::all(Constants::kMagic));
    auto p = Simd::all(Constants::kPolynomial[0]);
    for (size_t i = 1; i < std::size(Constants::kPolynomial); ++i) {
      p = Simd::multiply_add(p, split.rest, Simd::all(Constants::kPolynomial[i]));
    }
    beyond_one = Simd::multiply(p, split.rest);
    near_one = Simd::multiply_add(p, split.rest, Simd::all(1));
    power = Simd::power(split.shifted);
  }
  inline typename Simd::Vector value() const { return Simd::multiply(near_one, power); }
};

// weight * 2^(x * scale), for any x up to about 0: the weight's digits are in the coefficients and its exponent among the
// others', so that it costs nothing. A result under the smallest normal number is 0.
template <class Simd>
class WeightedPower {
 public:
  using Number = typename Simd::Number;
  using Vector = typename Simd::Vector;

  WeightedPower(double factor, double weight) : scale_(factor) {
    constexpr int kMost = 64;  // with more the largest power would be infinite
    int exponent = 0;
    Number digits = static_cast<Number>(weight);
    if (std::isfinite(digits) && digits != 0) digits = std::frexp(digits, &exponent);
    if (exponent > kMost) {
      digits = std::ldexp(digits, exponent - kMost);
      exponent = kMost;
    }
    for (size_t i = 0; i < kTerms; ++i) {
      const double coefficient = static_cast<double>(Exponents<Number>::kPolynomial[i]) * digits;
      // of an infinite weight the sign alone is left, which a negative rest would turn
      coefficients_[i] = Simd::all(std::isinf(coefficient) ? 0 : static_cast<Number>(coefficient));
    }
    at_zero_ = Simd::all(digits);
    magic_ = Simd::all(Exponents<Number>::kMagic + static_cast<Number>(exponent));
    lowest_ = Simd::all(floor_of<Number>(factor * kLog2E, Exponents<Number>::kLowest - exponent));
  }

  inline Vector operator()(Vector x) const {
    const Split<Simd> split(Simd::larger(lowest_, x), scale_, magic_);
    Vector p = coefficients_[0];
    for (size_t i = 1; i < kTerms; ++i) p = Simd::multiply_add(p, split.rest, coefficients_[i]);
    return Simd::multiply(Simd::multiply_add(p, split.rest, at_zero_), Simd::power(split.shifted));
  }

 private:
  static constexpr size_t kTerms = std::size(Exponents<Number>::kPolynomial);

  Scale<Simd> scale_;
  Vector coefficients_[kTerms], at_zero_, magic_, lowest_;
};

// c(x) = softcap * tanh(logit_scale * x / softcap), and its derivative: 1 - tanh^2 as 4 q / (1 + q)^2, q = e^(-2 |u|).
template <class Simd>
struct Cap {
  using Number = typename Simd::Number;
  using Vector = typename Simd::Vector;
  Vector inner, outer, masked_below, lowest, steepest;
  Scale<Simd> scale;

  Cap(double softcap, double logit_scale, double masked)
      : inner(Simd::all(static_cast<Number>(softcap > 0 ? logit_scale / softcap : 0))),
        outer(Simd::all(static_cast<Number>(softcap))),
        masked_below(Simd::all(static_cast<Number>(masked))),
        lowest(Simd::all(floor_of<Number>(2 * kLog2E))),
        steepest(Simd::all(static_cast<Number>(4 * logit_scale))),
        scale(2) {}

  inline Vector operator()(Vector x, Vector& derivative) const {
    const Vector one = Simd::all(1);
    const Vector size = Simd::minus_absolute(Simd::multiply(x, inner));
    const Power<Simd> of_size(Simd::larger(lowest, size), scale);
    const Vector q = of_size.value();
    // near 0 the difference of 1 and q has few digits left: with a cap far above the logits, none
    const Vector rest = Simd::unless_below(
        Simd::subtract(Simd::all(0), of_size.beyond_one), size, Simd::all(static_cast<Number>(-0.17)), Simd::subtract(one, q));
    const Vector r = Simd::divide(one, Simd::add(one, q));
    derivative = Simd::multiply(Simd::multiply(steepest, Simd::multiply(q, r)), r);
    Vector capped = Simd::multiply(outer, Simd::with_sign(Simd::multiply(rest, r), x));
    capped = Simd::add(capped, Simd::subtract(x, x));  // +inf would become an ordinary logit
    return Simd::unless_below(capped, x, masked_below, Simd::all(-__builtin_huge_val()));
  }
};

}  // namespace
}  // namespace grpo_kernels
