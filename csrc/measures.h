// What a batch of tokens reports: the loss and, in the order of grpo_kernels/metrics.py, its metrics. One thread, in the
// order of the tokens: a few additions for each beside the thousands of its row.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "formulas.h"
#include "tensors.h"

namespace grpo_kernels {
namespace {

// logps, entropy, row_max, sum_exp, sum_others, ratio, loss, kl, coef
constexpr int kLossRows = 9;

struct Given {
  bool old, weight, rollout, kl;
};

// What `formulas.held_back` needs.
struct Clip {
  const std::string& bounds;
  const std::string& surrogate;
  double lower, upper, delta;
};

struct Measures {
  Tensor metrics, loss;
};

// logp - old; on-policy nothing is subtracted, and a NaN still shows.
inline double gap_of(double logp, bool given, const PerRow& old, int64_t n) {
  if (given) return logp - old.number(n);
  return logp == logp ? 0 : logp;
}

// Mean and extremes over the live tokens; a NaN shows in each.
struct Spread {
  long double sum = 0;
  double low = std::numeric_limits<double>::infinity(), high = -low;

  void add(double x) {
    sum += x;
    if (x < low || x != x) low = x;
    if (x > high || x != x) high = x;
  }
};

Tensor vector_of(const std::vector<double>& values, bool wide, bool one) {
  const int64_t size[1] = {static_cast<int64_t>(values.size())};
  Tensor made = fresh({size, one ? 0u : 1u}, wide ? ScalarType::Double : ScalarType::Float);
  const Column to(made);
  for (size_t i = 0; i < values.size(); ++i) to.write(static_cast<int64_t>(i), values[i]);
  return made;
}

Measures measure(
    const Tensor (&rows)[kLossRows], const Tensor& targets, bool entropy, const PerRow& advantages, const PerRow& old,
    const PerRow& weight, const PerRow& rollout, const PerRow& share, const Given& given, const Clip& clip, double scale,
    double entropy_scale) {
  const PerRow ids = integers(targets), logps = numbers(rows[0], targets), ratios = numbers(rows[5], targets);
  const PerRow losses = numbers(rows[6], targets), kls = numbers(rows[7], targets);
  const PerRow entropies = entropy ? numbers(rows[1], targets) : PerRow();
  const bool clips = !clip.bounds.empty(), caps = clip.bounds == "cap";
  Spread ratio, weights, kl, spread, low, high, either, difference;
  long double policy = 0;
  int64_t live = 0, known = 0;
  for (int64_t n = 0; n < targets.numel(); ++n) {
    if (ids.integer(n) < 0) continue;
    ++live;
    const double logp = logps.number(n), r = ratios.number(n);
    policy += static_cast<long double>(share.number(n)) * losses.number(n);
    ratio.add(r);
    if (given.weight) weights.add(weight.number(n));
    if (given.kl) kl.add(kls.number(n));
    if (entropy) spread.add(entropies.number(n));
    if (clips) {
      const auto [below, above] = formulas::held_back(
          clip.bounds, clip.surrogate, r, gap_of(logp, given.old, old, n), advantages.number(n), logp, clip.lower,
          clip.upper, clip.delta, std::isfinite(clip.delta));
      low.add(below);
      high.add(above);
      either.add(below || above);
    }
    if (given.rollout && rollout.number(n) == rollout.number(n)) {
      ++known;
      difference.add(std::fabs((given.old ? old.number(n) : logp) - rollout.number(n)));
    }
  }
  std::vector<double> found;
  const auto mean = [&](const Spread& of, int64_t count) {
    found.push_back(static_cast<double>(of.sum / (count > 0 ? count : 1)));
  };
  const auto extreme = [&](double of, int64_t count) { found.push_back(count > 0 ? of : 0); };
  mean(ratio, live);
  if (given.weight) mean(weights, live);
  if (given.kl) mean(kl, live);
  if (entropy) mean(spread, live);
  if (clips && !caps) mean(low, live);
  if (clips) mean(high, live);
  if (clips && !caps) mean(either, live);
  extreme(ratio.low, live);
  if (given.weight) extreme(weights.low, live);
  extreme(ratio.high, live);
  if (given.weight) extreme(weights.high, live);
  if (given.rollout) {
    mean(difference, known);
    extreme(difference.high, known);
  }
  const bool wide = rows[0].scalar_type() == ScalarType::Double;
  policy *= scale;
  found.push_back(static_cast<double>(live));
  found.push_back(static_cast<double>(policy));
  const long double total = entropy_scale == 0 ? policy : policy + spread.sum * entropy_scale;
  return {vector_of(found, wide, false), vector_of({static_cast<double>(total)}, wide, true)};
}

}  // namespace
}  // namespace grpo_kernels
