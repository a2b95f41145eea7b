// The vectors of simd_baseline.h as AVX-512 registers.
#pragma once

#include <immintrin.h>

#include "simd_baseline.h"

namespace grpo_kernels {
namespace {

inline long double sum_of(__m512d x) {
  double lane[8];
  _mm512_storeu_pd(lane, x);
  long double sum = 0;
  for (const double one : lane) sum += one;
  return sum;
}

struct Avx512Float {
  static constexpr int kLanes = 16;
  using Number = float;
  using Vector = __m512;

  static inline Vector all(float x) { return _mm512_set1_ps(x); }
  static inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static inline Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static inline Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static inline Vector divide(Vector a, Vector b) { return _mm512_div_ps(a, b); }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static inline Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }
  static inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  static inline Vector power(Vector x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23)); }
  static inline Vector minus_absolute(Vector x) { return _mm512_or_ps(all(-0.0f), x); }
  static inline Vector with_sign(Vector x, Vector sign) { return _mm512_or_ps(x, _mm512_and_ps(all(-0.0f), sign)); }
  static inline Vector unless_below(Vector x, Vector key, Vector limit, Vector otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(key, limit, _CMP_LE_OQ), x, otherwise);
  }
  // sums of vectors, in float64
  struct Total {
    __m512d low = _mm512_setzero_pd(), high = low;

    inline void add(Vector x) {
      low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
      high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
    }
    inline long double all() const { return sum_of(low) + sum_of(high); }
  };
  static inline float largest(Vector x) { return _mm512_reduce_max_ps(x); }

  static inline void load(const float* from, Vector& a, Vector& b) {
    a = _mm512_loadu_ps(from);
    b = _mm512_loadu_ps(from + 16);
  }
  // even columns in one vector, odd in the other: a shift and a mask, cheaper than two conversions
  static inline void load(const BFloat16* from, Vector& a, Vector& b) {
    const __m512i words = _mm512_loadu_si512(from);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)));
  }
  static inline void load(const Half* from, Vector& a, Vector& b) {
    a = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    b = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1));
  }
  static inline void store(float* to, Vector a, Vector b) {
    _mm512_storeu_ps(to, a);
    _mm512_storeu_ps(to + 16, b);
  }
  static inline void store(BFloat16* to, Vector a, Vector b) {
    // the upper half of one and, where the mask is set, of the other
    _mm512_storeu_si512(to, _mm512_mask_mov_epi16(_mm512_srli_epi32(rounded(a), 16), 0xaaaaaaaau, rounded(b)));
  }
  static inline void store(Half* to, Vector a, Vector b) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(a, nearest));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, _mm512_cvtps_ph(b, nearest));
  }

 private:
  // nearest bfloat16, ties to even, in the upper half; a NaN has no bits in the lower half that could carry
  static inline __m512i rounded(Vector x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_add_epi32(up, odd, bits, _mm512_set1_epi32(0x8000));
  }
};

struct Avx512Double {
  static constexpr int kLanes = 8;
  using Number = double;
  using Vector = __m512d;

  static inline Vector all(double x) { return _mm512_set1_pd(x); }
  static inline Vector add(Vector a, Vector b) { return _mm512_add_pd(a, b); }
  static inline Vector subtract(Vector a, Vector b) { return _mm512_sub_pd(a, b); }
  static inline Vector multiply(Vector a, Vector b) { return _mm512_mul_pd(a, b); }
  static inline Vector divide(Vector a, Vector b) { return _mm512_div_pd(a, b); }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }
  static inline Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm512_fmsub_pd(a, b, c); }
  static inline Vector larger(Vector a, Vector b) { return _mm512_max_pd(a, b); }
  static inline Vector power(Vector x) { return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(x), 52)); }
  static inline Vector minus_absolute(Vector x) { return _mm512_or_pd(all(-0.0), x); }
  static inline Vector with_sign(Vector x, Vector sign) { return _mm512_or_pd(x, _mm512_and_pd(all(-0.0), sign)); }
  static inline Vector unless_below(Vector x, Vector key, Vector limit, Vector otherwise) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(key, limit, _CMP_LE_OQ), x, otherwise);
  }
  // sums of vectors, with what each addition loses (Knuth)
  struct Total {
    __m512d value = _mm512_setzero_pd(), lost = value;

    inline void add(Vector x) {
      const __m512d total = _mm512_add_pd(value, x), rest = _mm512_sub_pd(total, value);
      lost = _mm512_add_pd(lost, _mm512_add_pd(_mm512_sub_pd(value, _mm512_sub_pd(total, rest)), _mm512_sub_pd(x, rest)));
      value = total;
    }
    inline long double all() const { return sum_of(value) + sum_of(lost); }
  };
  static inline double largest(Vector x) { return _mm512_reduce_max_pd(x); }
  static inline void load(const double* from, Vector& a, Vector& b) {
    a = _mm512_loadu_pd(from);
    b = _mm512_loadu_pd(from + 8);
  }
  static inline void store(double* to, Vector a, Vector b) {
    _mm512_storeu_pd(to, a);
    _mm512_storeu_pd(to + 8, b);
  }
};

}  // namespace
}  // namespace grpo_kernels
