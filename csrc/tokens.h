// The look at the tokens of a call that its checks take (grpo_kernels/screening.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <tuple>

#include "simd_baseline.h"
#include "tensors.h"

namespace grpo_kernels {
namespace {

// A tensor of any real dtype, like the rows.
struct Values {
  bool given = false;
  PerRow place;

  Values(const Maybe& tensor, const Tensor& like) : given(tensor.has_value()) {
    if (given) place = PerRow(*tensor, like);
  }

  static bool knows(ScalarType type) {
    constexpr ScalarType kKnown[] = {
        ScalarType::Bool, ScalarType::Byte, ScalarType::Char,     ScalarType::Short, ScalarType::Int,
        ScalarType::Long, ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double};
    return std::find(std::begin(kKnown), std::end(kKnown), type) != std::end(kKnown);
  }

  double at(int64_t n) const {
    const char* data = place.rows.at(n);
    switch (place.type) {
      case ScalarType::Bool:
      case ScalarType::Byte: return read<uint8_t>(data);
      case ScalarType::Char: return read<int8_t>(data);
      case ScalarType::Short: return read<int16_t>(data);
      case ScalarType::Int: return read<int32_t>(data);
      case ScalarType::Long: return static_cast<double>(read<int64_t>(data));
      case ScalarType::Half: return widened(read<Half>(data));
      case ScalarType::BFloat16: return widened(read<BFloat16>(data));
      case ScalarType::Float: return read<float>(data);
      case ScalarType::Double: return read<double>(data);
      default: STD_TORCH_CHECK(false, "grpo_kernels: token tensors hold bools, integers or floats. Convert them.");
    }
  }

 private:
  template <class Number>
  static Number read(const char* data) {
    return *reinterpret_cast<const Number*>(data);
  }
};

bool same_shape(const Tensor& tensor, const Tensor& like, int64_t axes) {
  if (tensor.dim() != axes) return false;
  for (int64_t axis = 0; axis < axes; ++axis) {
    if (tensor.size(axis) != like.size(axis)) return false;
  }
  return true;
}

// Whether these are logits, ids of their rows and a mask like the ids, of types and strides that can be read.
bool fit(const Tensor& logits, const Tensor& ids, const Maybe& mask) {
  const auto type = logits.scalar_type(), of_ids = ids.scalar_type();
  const bool floats = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half ||
                      type == ScalarType::Double;
  const int64_t last = logits.dim() - 1;
  return floats && (of_ids == ScalarType::Long || of_ids == ScalarType::Int) && (last == 1 || last == 2) &&
         logits.size(last) > 0 && (logits.size(last) == 1 || logits.stride(last) == 1) && same_shape(ids, logits, last) &&
         (!mask || (Values::knows(mask->scalar_type()) && same_shape(*mask, ids, last)));
}

// The targets, DEAD where a row does not count: masked out, an id outside the vocabulary, beyond the first `inside`.
// And whether everything can be used: mask values finite and >= 0, ids of the vocabulary where the mask keeps them,
// log-probs finite where a row counts (the rollout's may be NaN: missing).
inline std::tuple<Tensor, bool> live_targets(
    const Tensor& ids, const Maybe& mask, int64_t vocabulary, int64_t inside, const Maybe& old, const Maybe& ref,
    const Maybe& rollout) {
  const PerRow given = integers(ids);
  const Values keep(mask, ids), before(old, ids), anchor(ref, ids), sampled(rollout, ids);
  const Tensor targets = fresh(ids.sizes(), ids.scalar_type());
  void* out = targets.mutable_data_ptr();
  const bool wide = ids.scalar_type() == ScalarType::Long;
  bool fine = true;
  for (int64_t n = 0, count = ids.numel(); n < count; ++n) {
    const int64_t id = given.integer(n);
    bool kept = n < inside;
    if (keep.given) {
      const double m = keep.at(n);
      fine = fine && m >= 0 && std::isfinite(m);
      kept = kept && m != 0;
    }
    fine = fine && !(kept && id >= vocabulary);
    const bool live = kept && id >= 0 && id < vocabulary;
    if (live) {
      if (before.given) fine = fine && std::isfinite(before.at(n));
      if (anchor.given) fine = fine && std::isfinite(anchor.at(n));
      if (sampled.given) fine = fine && !std::isinf(sampled.at(n));
    }
    const int64_t target = live ? id : kDead;
    if (wide) {
      static_cast<int64_t*>(out)[n] = target;
    } else {
      static_cast<int32_t*>(out)[n] = static_cast<int32_t>(target);
    }
  }
  return {targets, fine};
}

}  // namespace
}  // namespace grpo_kernels
