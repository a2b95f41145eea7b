// Vectors in plain C++, which any compiler turns into what its target has, and the conversions of single numbers.
#pragma once

#include <cstdint>
#include <cstring>

namespace grpo_kernels {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class To, class From>
inline To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(BFloat16 x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float widened(Half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_of<float>(sign | 0x7f800000u | (rest << 13));
  // an exponent of 112 more, exactly, also for subnormal numbers
  return bits_of<float>(sign | bits_of<uint32_t>(bits_of<float>(rest << 13) * 0x1p112f));
}

// To nearest, ties to even.
inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, double& out) { out = x; }
inline void narrow(double x, double& out) { out = x; }
inline void narrow(double x, float& out) { out = static_cast<float>(x); }
inline void narrow(float x, BFloat16& out) {
  const uint32_t bits = bits_of<uint32_t>(x);
  out.bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void narrow(float x, Half& out) {
  const uint32_t bits = bits_of<uint32_t>(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t result;
  if (rest > 0x7f800000u) {
    result = 0x7e00u;
  } else if (rest >= 0x47800000u) {  // 65536
    result = 0x7c00u;
  } else if (rest < 0x38800000u) {  // 2^-14: adding 1/2 leaves the subnormal half in the last bits, rounded
    result = bits_of<uint32_t>(bits_of<float>(rest) + 0.5f) - 0x3f000000u;
  } else {
    result = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | result);
}
// through float32, but rounded once: what the first rounding lost is kept in its last bit
inline float rounded_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  uint32_t bits = bits_of<uint32_t>(nearest);
  if (x != x || static_cast<double>(nearest) == x || (bits & 0x7fffffffu) == 0x7f800000u) return nearest;
  const bool away = (nearest < 0 ? -static_cast<double>(nearest) : nearest) > (x < 0 ? -x : x);
  bits -= away ? 1u : 0u;
  return bits_of<float>(bits | 1u);
}
inline void narrow(double x, BFloat16& out) { narrow(rounded_to_odd(x), out); }
inline void narrow(double x, Half& out) { narrow(rounded_to_odd(x), out); }

// Lanes of one register, and the operations that kernels.h is written in. `larger(a, b)` is b where a or b is NaN.
template <class Real, class Wider, class Bits, int kMantissa>
struct Plain {
  static constexpr int kLanes = 16 / sizeof(Real) * 2;
  using Number = Real;
  struct Vector {
    Real lane[kLanes];
  };

  template <class Operation>
  static inline Vector each(Operation operation) {
    Vector result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = operation(i);
    return result;
  }
  static inline Vector all(Real x) {
    return each([=](int) { return x; });
  }
  static inline Vector add(Vector a, Vector b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static inline Vector subtract(Vector a, Vector b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static inline Vector multiply(Vector a, Vector b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static inline Vector divide(Vector a, Vector b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  // the product is not rounded, as in a fused operation: with exponents near 30 that would cost the last five bits
  static inline Vector multiply_subtract(Vector a, Vector b, Vector c) {
    return each([&](int i) { return static_cast<Real>(static_cast<Wider>(a.lane[i]) * b.lane[i] - c.lane[i]); });
  }
  static inline Vector larger(Vector a, Vector b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  // 2^n where the last bits of x hold the biased exponent
  static inline Vector power(Vector x) {
    return each([&](int i) { return bits_of<Real>(static_cast<Bits>(bits_of<Bits>(x.lane[i]) << kMantissa)); });
  }
  static inline Vector minus_absolute(Vector x) {
    return each([&](int i) { return x.lane[i] > 0 ? -x.lane[i] : x.lane[i]; });
  }
  static inline Vector with_sign(Vector x, Vector sign) {
    return each([&](int i) { return sign.lane[i] < 0 ? -x.lane[i] : x.lane[i]; });
  }
  // x where key > limit or key is NaN, else `otherwise`
  static inline Vector unless_below(Vector x, Vector key, Vector limit, Vector otherwise) {
    return each([&](int i) { return key.lane[i] <= limit.lane[i] ? otherwise.lane[i] : x.lane[i]; });
  }
  // sums of vectors, with what each addition loses (Knuth); float32 is added as float64, where that is next to nothing
  struct Total {
    double value[kLanes] = {}, lost[kLanes] = {};

    inline void add(Vector x) {
      for (int i = 0; i < kLanes; ++i) {
        const double total = value[i] + x.lane[i];
        if constexpr (sizeof(Real) == sizeof(double)) {
          const double rest = total - value[i];
          lost[i] += (value[i] - (total - rest)) + (x.lane[i] - rest);
        }
        value[i] = total;
      }
    }
    inline long double all() const {
      long double sum = 0, rest = 0;
      for (int i = 0; i < kLanes; ++i) sum += value[i], rest += lost[i];
      return sum + rest;
    }
  };
  static inline Real largest(Vector x) {
    Real top = x.lane[0];
    for (int i = 1; i < kLanes; ++i) top = x.lane[i] > top ? x.lane[i] : top;
    return top;
  }
  // Two vectors of neighbouring numbers; in which lane a number comes is its own affair.
  template <class In>
  static inline void load(const In* from, Vector& a, Vector& b) {
    a = each([&](int i) { return widened(from[i]); });
    b = each([&](int i) { return widened(from[kLanes + i]); });
  }
  template <class Out>
  static inline void store(Out* to, Vector a, Vector b) {
    for (int i = 0; i < kLanes; ++i) narrow(a.lane[i], to[i]);
    for (int i = 0; i < kLanes; ++i) narrow(b.lane[i], to[kLanes + i]);
  }
};

}  // namespace
}  // namespace grpo_kernels
