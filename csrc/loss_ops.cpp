// The loss operators of grpo_kernels/ops/schema.py for CPU tensors: statistics, the formulas and, over the logits, the
// gradient of a row while it is in the cache; then the loss and its metrics. Stable ABI of torch alone.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <string_view>
#include <tuple>
#include <vector>

#include "formulas.h"
#include "measures.h"
#include "simd_baseline.h"
#include "tensors.h"

namespace grpo_kernels {
namespace {

using ElevenTensors =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

double only_number(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.numel() == 1, "grpo_kernels: a scale must be one number.");
  const auto type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "grpo_kernels: a scale must be floating.");
  const void* data = tensor.const_data_ptr();
  return type == ScalarType::Double ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
}

// With kOver the gradient is left over the logits.
template <bool kOver>
ElevenTensors loss(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, bool entropy, const Tensor& advantages, const Maybe& old, const Maybe& ref,
    const Maybe& weight, const Maybe& rollout, const std::vector<double>& limits, const std::string& surrogate,
    const std::string& kl, bool corrected, bool kl_weighted, const std::string& bounds, const Tensor& share,
    const Tensor& scale, const Maybe& entropy_scale) {
  STD_TORCH_CHECK(targets.dim() == logits.dim() - 1, "grpo_kernels: targets must have the leading shape of logits.");
  const Type type = type_of(logits);
  const Rows rows = matrix_rows(logits, type);
  const int64_t columns = logits.size(logits.dim() - 1);
  const PerRow ids = integers(targets), heat = numbers(temperature, targets), gains = numbers(advantages, targets);
  const PerRow before = maybe_numbers(old, targets), anchors = maybe_numbers(ref, targets);
  const PerRow weights = maybe_numbers(weight, targets), shares = numbers(share, targets);
  const double by = only_number(scale), of_entropy = entropy_scale ? only_number(*entropy_scale) : 0.0;
  const bool wide = type == kDouble, with_entropy = entropy && entropy_scale.has_value();
  const RowOutputs<kLossRows> outputs(targets, type, entropy);
  STD_TORCH_CHECK(limits.size() == 10, "grpo_kernels: limits must be those of objective.term_options.");
  const double* limit = limits.data();
  const bool straight = !kl.empty() && kl.back() == '+', ratio_bounded = std::isfinite(limit[6]);
  const bool kl_bounded = std::isfinite(limit[8]) || std::isfinite(limit[9]);
  const std::string_view estimator(kl.data(), kl.size() - (straight ? 1 : 0));
  const auto terms = [&](double gap, double advantage, double logp, double weight_of, double anchor) {
    return formulas::token_terms(
        gap, advantage, logp, weight_of, anchor, limit[0], limit[1], limit[2], limit[3], limit[4], limit[5], limit[6],
        limit[7], limit[8], limit[9], surrogate, ratio_bounded, weight.has_value(), estimator, straight, kl_bounded,
        corrected, kl_weighted && weight.has_value());
  };
  const auto statistics_of = kernels().stats[type];
  const auto gradient_of = kernels().grad[type];

  for_each_row(targets.numel(), columns, [&](int64_t n, const auto& row_ahead) {
    const int64_t target = ids.integer(n);
    char* row = rows.at(n);
    if (target < 0) {
      outputs.write(n, {});
      if (kOver) std::memset(row, 0, columns * kSize[type]);
      return;
    }
    const Transform transform = transform_of(type, heat.number(n), logit_scale, softcap);
    // Numbers are rounded where they are handed out: a log-prob given back as `old` makes the ratio exactly 1, and the
    // gradient over the logits has the bits of the operators that run one after the other.
    const auto rounded = [wide](double x) { return wide ? x : static_cast<double>(static_cast<float>(x)); };
    const Statistics found = statistics_of(row, columns, target, transform, entropy);
    const Statistics stats{rounded(found.logp),    rounded(found.entropy), rounded(found.lse),
                           rounded(found.row_max), rounded(found.sum_exp), rounded(found.sum_others)};
    const double logp = stats.logp, gap = gap_of(logp, old.has_value(), before, n);
    const auto [ratio, loss, slope, own_slope, divergence] = terms(
        gap, gains.number(n), logp, weight ? weights.number(n) : 1, ref ? anchors.number(n) : logp);
    const double coef = rounded(shares.number(n) * rounded(rounded(slope) + rounded(own_slope)));
    outputs.write(n, {logp, stats.entropy, stats.row_max, stats.sum_exp, stats.sum_others, ratio, loss, divergence, coef});
    if (!kOver) return;
    const Upstream upstream{coef == 0 ? 0 : rounded(coef * by), with_entropy ? of_entropy : 0.0, with_entropy};
    if (upstream.grad_logp == 0 && upstream.grad_entropy == 0) {
      std::memset(row, 0, columns * kSize[type]);
    } else {
      const int64_t ahead = row_ahead();
      gradient_of(row, row, type, columns, target, transform, stats, upstream, ahead < 0 ? nullptr : rows.at(ahead));
    }
  });
  const auto& t = outputs.tensors;
  const Measures measured = measure(
      t, targets, entropy, gains, before, weights, maybe_numbers(rollout, targets), shares,
      {old.has_value(), weight.has_value(), rollout.has_value(), kl != "none"},
      {bounds, surrogate, limit[0], limit[1], limit[2]}, by, of_entropy);
  return {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], measured.metrics, measured.loss};
}

// What is 0 stays so, whatever the factor.
template <class Number>
void scale_row(void* row, int64_t columns, double factor) {
  Number* x = static_cast<Number*>(row);
  using Wide = decltype(widened(Number()));
  const Wide by = static_cast<Wide>(factor);
  for (int64_t i = 0; i < columns; ++i) {
    const Wide value = widened(x[i]);
    narrow(value == 0 ? 0 : value * by, x[i]);
  }
}

void row_scale_(const Tensor& logits, const Tensor& factor) {
  constexpr void (*kByType[kTypes])(void*, int64_t, double) = {
      scale_row<float>, scale_row<BFloat16>, scale_row<Half>, scale_row<double>};
  const double by = only_number(factor);
  if (by == 1) return;
  const Type type = type_of(logits);
  const Rows rows = matrix_rows(logits, type);
  const int64_t columns = logits.size(logits.dim() - 1);
  for_each_row(columns == 0 ? 0 : logits.numel() / columns, columns, [&](int64_t n) {
    kByType[type](rows.at(n), columns, by);
  });
}

}  // namespace
}  // namespace grpo_kernels

// Read by grpo_kernels/backends/cpp.py: a library of other formulas is refused.
extern "C" __attribute__((visibility("default"))) const char* grpo_kernels_formulas() {
  return grpo_kernels::formulas::kDigest;
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels, CPU, library) {
  library.impl("loss_cpp", TORCH_BOX(&grpo_kernels::loss<false>));
  library.impl("loss_cpp_", TORCH_BOX(&grpo_kernels::loss<true>));
  library.impl("row_scale_cpp_", TORCH_BOX(&grpo_kernels::row_scale_));
}
