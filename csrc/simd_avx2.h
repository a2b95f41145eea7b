// The vectors of simd_baseline.h as AVX2 registers.
#pragma once

#include <immintrin.h>

#include "simd_baseline.h"

namespace grpo_kernels {
namespace {

inline long double sum_of(__m256d x) {
  double lane[4];
  _mm256_storeu_pd(lane, x);
  long double sum = 0;
  for (const double one : lane) sum += one;
  return sum;
}

struct Avx2Float {
  static constexpr int kLanes = 8;
  using Number = float;
  using Vector = __m256;

  static inline Vector all(float x) { return _mm256_set1_ps(x); }
  static inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static inline Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static inline Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static inline Vector divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static inline Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm256_fmsub_ps(a, b, c); }
  static inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static inline Vector power(Vector x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23)); }
  static inline Vector minus_absolute(Vector x) { return _mm256_or_ps(all(-0.0f), x); }
  static inline Vector with_sign(Vector x, Vector sign) { return _mm256_or_ps(x, _mm256_and_ps(all(-0.0f), sign)); }
  static inline Vector unless_below(Vector x, Vector key, Vector limit, Vector otherwise) {
    return _mm256_blendv_ps(x, otherwise, _mm256_cmp_ps(key, limit, _CMP_LE_OQ));
  }
  // sums of vectors, in float64
  struct Total {
    __m256d low = _mm256_setzero_pd(), high = low;

    inline void add(Vector x) {
      low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
      high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
    }
    inline long double all() const { return sum_of(low) + sum_of(high); }
  };
  static inline float largest(Vector x) {
    __m128 top = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    return _mm_cvtss_f32(_mm_max_ss(top, _mm_shuffle_ps(top, top, 1)));
  }

  static inline void load(const float* from, Vector& a, Vector& b) {
    a = _mm256_loadu_ps(from);
    b = _mm256_loadu_ps(from + 8);
  }
  // even columns in one vector, odd in the other: a shift and a mask, cheaper than two conversions
  static inline void load(const BFloat16* from, Vector& a, Vector& b) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-65536)));
  }
  static inline void load(const Half* from, Vector& a, Vector& b) {
    a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + 1));
  }
  static inline void store(float* to, Vector a, Vector b) {
    _mm256_storeu_ps(to, a);
    _mm256_storeu_ps(to + 8, b);
  }
  static inline void store(BFloat16* to, Vector a, Vector b) {
    const __m256i low = _mm256_srli_epi32(rounded(a), 16);
    const __m256i high = _mm256_and_si256(rounded(b), _mm256_set1_epi32(-65536));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(low, high));
  }
  static inline void store(Half* to, Vector a, Vector b) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a, nearest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, _mm256_cvtps_ph(b, nearest));
  }

 private:
  // nearest bfloat16, ties to even, in the upper half; a NaN has no bits in the lower half that could carry
  static inline __m256i rounded(Vector x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  }
};

struct Avx2Double {
  static constexpr int kLanes = 4;
  using Number = double;
  using Vector = __m256d;

  static inline Vector all(double x) { return _mm256_set1_pd(x); }
  static inline Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  static inline Vector subtract(Vector a, Vector b) { return _mm256_sub_pd(a, b); }
  static inline Vector multiply(Vector a, Vector b) { return _mm256_mul_pd(a, b); }
  static inline Vector divide(Vector a, Vector b) { return _mm256_div_pd(a, b); }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }
  static inline Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm256_fmsub_pd(a, b, c); }
  static inline Vector larger(Vector a, Vector b) { return _mm256_max_pd(a, b); }
  static inline Vector power(Vector x) { return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(x), 52)); }
  static inline Vector minus_absolute(Vector x) { return _mm256_or_pd(all(-0.0), x); }
  static inline Vector with_sign(Vector x, Vector sign) { return _mm256_or_pd(x, _mm256_and_pd(all(-0.0), sign)); }
  static inline Vector unless_below(Vector x, Vector key, Vector limit, Vector otherwise) {
    return _mm256_blendv_pd(x, otherwise, _mm256_cmp_pd(key, limit, _CMP_LE_OQ));
  }
  // sums of vectors, with what each addition loses (Knuth)
  struct Total {
    __m256d value = _mm256_setzero_pd(), lost = value;

    inline void add(Vector x) {
      const __m256d total = _mm256_add_pd(value, x), rest = _mm256_sub_pd(total, value);
      lost = _mm256_add_pd(lost, _mm256_add_pd(_mm256_sub_pd(value, _mm256_sub_pd(total, rest)), _mm256_sub_pd(x, rest)));
      value = total;
    }
    inline long double all() const { return sum_of(value) + sum_of(lost); }
  };
  static inline double largest(Vector x) {
    const __m128d pair = _mm_max_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
    return _mm_cvtsd_f64(_mm_max_sd(pair, _mm_unpackhi_pd(pair, pair)));
  }
  static inline void load(const double* from, Vector& a, Vector& b) {
    a = _mm256_loadu_pd(from);
    b = _mm256_loadu_pd(from + 4);
  }
  static inline void store(double* to, Vector a, Vector b) {
    _mm256_storeu_pd(to, a);
    _mm256_storeu_pd(to + 4, b);
  }
};

}  // namespace
}  // namespace grpo_kernels
