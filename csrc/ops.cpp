// The row operators of grpo_kernels/ops/schema.py for CPU tensors. Stable ABI of torch alone.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "tensors.h"
#include "tokens.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace grpo_kernels {
namespace {

using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Statistics of every row by `function(row, target, transform)`; zeros at dead rows, whose logits it never sees.
template <class Function>
SixTensors collect(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, bool entropy, const Function& function) {
  const Type type = type_of(logits);
  const Rows rows = matrix_rows(logits, type);
  const int64_t columns = logits.size(logits.dim() - 1), count = targets.numel();
  STD_TORCH_CHECK(targets.dim() == logits.dim() - 1, "grpo_kernels: targets must have the leading shape of logits.");
  const PerRow ids = integers(targets), heat = numbers(temperature, targets);
  const RowOutputs<6> outputs(targets, type, entropy);
  for_each_row(count, columns, [&](int64_t n) {
    const int64_t target = ids.integer(n);
    Statistics s{};
    if (target >= 0) s = function(rows.at(n), target, transform_of(type, heat.number(n), logit_scale, softcap));
    outputs.write(n, {s.logp, s.entropy, s.lse, s.row_max, s.sum_exp, s.sum_others});
  });
  const auto& t = outputs.tensors;
  return {t[0], t[1], t[2], t[3], t[4], t[5]};
}

SixTensors row_stats(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, bool entropy) {
  const auto function = kernels().stats[type_of(logits)];
  const int64_t columns = logits.size(logits.dim() - 1);
  return collect(
      logits, targets, temperature, logit_scale, softcap, entropy,
      [=](const char* row, int64_t target, const Transform& transform) {
        return function(row, columns, target, transform, entropy);
      });
}

SixTensors row_weights_(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale, bool entropy) {
  const auto function = kernels().weigh[type_of(logits)];
  STD_TORCH_CHECK(function != nullptr, "row_weights_cpp_: logits must be float32 or float64. Convert them.");
  const int64_t columns = logits.size(logits.dim() - 1);
  return collect(
      logits, targets, temperature, logit_scale, std::nullopt, entropy,
      [=](char* row, int64_t target, const Transform& transform) {
        return function(row, columns, target, transform, entropy);
      });
}

// What a gradient needs of every row.
struct Kept {
  PerRow temperature, entropy, row_max, sum_exp, sum_others, grad_logps, grad_entropy;
  bool with_entropy;
};

Kept kept_of(
    const Tensor& targets, const Tensor& temperature, const Tensor& entropy, const Tensor& row_max,
    const Tensor& sum_exp, const Tensor& sum_others, const Tensor& grad_logps, const Maybe& grad_entropy) {
  return {numbers(temperature, targets), grad_entropy ? numbers(entropy, targets) : PerRow(), numbers(row_max, targets),
          numbers(sum_exp, targets), numbers(sum_others, targets), numbers(grad_logps, targets),
          maybe_numbers(grad_entropy, targets), grad_entropy.has_value()};
}

void write_gradient(
    const Tensor& logits, const Tensor& out, const Tensor& targets, double logit_scale, std::optional<double> softcap,
    const Kept& kept, int64_t work_of_run = kThread) {
  const Type type = type_of(logits), out_type = type_of(out);
  const Rows rows = matrix_rows(logits, type), out_rows = matrix_rows(out, out_type);
  const int64_t columns = logits.size(logits.dim() - 1);
  const bool with_entropy = kept.with_entropy;
  const PerRow ids = integers(targets);
  const auto function = kernels().grad[type];
  for_each_row(targets.numel(), columns, [&](int64_t n) {
    const int64_t target = ids.integer(n);
    const Upstream upstream{
        kept.grad_logps.number(n), with_entropy ? kept.grad_entropy.number(n) : 0.0, with_entropy};
    char* to = out_rows.at(n);
    if (target == kDead || (upstream.grad_logp == 0 && upstream.grad_entropy == 0)) {
      std::memset(to, 0, columns * kSize[out_type]);
      return;
    }
    const Statistics stats{0, with_entropy ? kept.entropy.number(n) : 0.0, 0, kept.row_max.number(n),
                           kept.sum_exp.number(n), kept.sum_others.number(n)};
    const Transform transform = transform_of(type, kept.temperature.number(n), logit_scale, softcap);
    function(rows.at(n), to, out_type, columns, target, transform, stats, upstream, nullptr);
  }, work_of_run);
}

void row_grad_into(
    const Tensor& logits, const Tensor& out, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const Maybe& grad_entropy) {
  write_gradient(
      logits, out, targets, logit_scale, softcap,
      kept_of(targets, temperature, entropy, row_max, sum_exp, sum_others, grad_logps, grad_entropy));
}

// Pages of 2 MiB for a buffer that is about to be written for the first time: a fault for each 4 KiB would take longer
// than the gradient itself. A hint, whose refusal changes nothing.
void prefer_huge_pages(const Tensor& fresh) {
#ifdef MADV_HUGEPAGE
  const auto begin = reinterpret_cast<uintptr_t>(fresh.mutable_data_ptr());
  const uintptr_t end = begin + fresh.numel() * fresh.element_size();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

Tensor fresh_gradient(
    const Tensor& logits, const Tensor& targets, double logit_scale, std::optional<double> softcap, const Kept& kept) {
  const Tensor grad = fresh(logits.sizes(), logits.scalar_type());
  prefer_huge_pages(grad);
  // Up to four pages to a thread, as the balance allows: where two threads meet in one, one of them waits until the
  // other has cleared it.
  const int64_t page = kHugePage / grad.element_size(), balanced = grad.numel() / (4 * torch::stable::get_num_threads());
  write_gradient(
      logits, grad, targets, logit_scale, softcap, kept, std::max(kThread, std::min(4 * page, balanced)));
  return grad;
}

Tensor row_grad(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const Maybe& grad_entropy) {
  return fresh_gradient(
      logits, targets, logit_scale, softcap,
      kept_of(targets, temperature, entropy, row_max, sum_exp, sum_others, grad_logps, grad_entropy));
}

void row_grad_(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const std::optional<Tensor>& grad_entropy) {
  row_grad_into(
      logits, logits, targets, temperature, logit_scale, softcap, entropy, row_max, sum_exp, sum_others, grad_logps,
      grad_entropy);
}

// A temperature as the other operators get it, in a tensor: the same rows have the same bits whatever the way.
double rounded_like(Type type, double temperature) {
  return type == kDouble ? temperature : static_cast<double>(static_cast<float>(temperature));
}

// Whether the environment names another implementation. Python would look at it ten times as long.
bool another_is_asked_for() {
  const char* asked = std::getenv("GRPO_KERNELS_BACKEND");
  return asked != nullptr && *asked != 0 && std::strcmp(asked, "auto") != 0 && std::strcmp(asked, "cpp") != 0;
}

// live_targets and row_stats in one, for calls on few rows, where every tensor costs. What a gradient needs of the rows
// comes as one: `[3 or 4, rows]` of row_max, sum_exp, sum_others and, if asked for, entropy.
// The last is whether all of it could be used; if not, nothing else counts.
std::tuple<Tensor, Maybe, Tensor, Tensor, Tensor, bool> logps(
    const Tensor& logits, const Tensor& ids, const Maybe& mask, double temperature, double logit_scale,
    std::optional<double> softcap, bool entropy) {
  if (another_is_asked_for() || !fit(logits, ids, mask)) {
    const int64_t size[1] = {0};
    const Tensor nothing = fresh({size, 1}, ScalarType::Float);
    return {nothing, std::nullopt, nothing, nothing, nothing, false};
  }
  const Type type = type_of(logits);
  const Rows rows = matrix_rows(logits, type);
  const int64_t columns = logits.size(logits.dim() - 1), count = ids.numel(), shape[2] = {entropy ? 4 : 3, count};
  const auto [targets, fine] = live_targets(ids, mask, columns, count, std::nullopt, std::nullopt, std::nullopt);
  const PerRow kept = integers(targets);
  const auto dtype = type == kDouble ? ScalarType::Double : ScalarType::Float;
  const Tensor logps = fresh(ids.sizes(), dtype), lse = fresh(ids.sizes(), dtype), state = fresh({shape, 2}, dtype);
  const Maybe entropies = entropy ? Maybe(fresh(ids.sizes(), dtype)) : std::nullopt;
  const Column to_logps(logps), to_lse(lse), to(state), to_entropy = entropy ? Column(*entropies) : Column();
  const auto function = kernels().stats[type];
  const Transform transform = transform_of(type, rounded_like(type, temperature), logit_scale, softcap);
  for_each_row(fine ? count : 0, columns, [&](int64_t n) {
    const int64_t target = kept.integer(n);
    Statistics s{};
    if (target >= 0) s = function(rows.at(n), columns, target, transform, entropy);
    to_logps.write(n, s.logp);
    to_lse.write(n, s.lse);
    to.write(n, s.row_max);
    to.write(count + n, s.sum_exp);
    to.write(2 * count + n, s.sum_others);
    if (!entropy) return;
    to.write(3 * count + n, s.entropy);
    to_entropy.write(n, s.entropy);
  });
  return {logps, entropies, lse, targets, state, fine};
}

// The gradient of logps from what it has kept.
Kept kept_of(
    const Tensor& targets, const double& temperature, const Tensor& state, const Tensor& grad_logps,
    const Maybe& grad_entropy) {
  const auto row = [&](int64_t i) { return PerRow::run(state, i * targets.numel(), targets.numel()); };
  return {PerRow::constant(temperature), grad_entropy ? row(3) : PerRow(), row(0), row(1), row(2),
          numbers(grad_logps, targets), maybe_numbers(grad_entropy, targets), grad_entropy.has_value()};
}

Tensor logps_grad(
    const Tensor& logits, const Tensor& targets, double temperature, double logit_scale, std::optional<double> softcap,
    const Tensor& state, const Tensor& grad_logps, const Maybe& grad_entropy) {
  const double heat = rounded_like(type_of(logits), temperature);
  return fresh_gradient(logits, targets, logit_scale, softcap, kept_of(targets, heat, state, grad_logps, grad_entropy));
}

}  // namespace
}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels, CPU, library) {
  library.impl("live_targets_cpp", TORCH_BOX(&grpo_kernels::live_targets));
  library.impl("logps_cpp", TORCH_BOX(&grpo_kernels::logps));
  library.impl("logps_grad_cpp", TORCH_BOX(&grpo_kernels::logps_grad));
  library.impl("row_stats_cpp", TORCH_BOX(&grpo_kernels::row_stats));
  library.impl("row_weights_cpp_", TORCH_BOX(&grpo_kernels::row_weights_));
  library.impl("row_grad_cpp", TORCH_BOX(&grpo_kernels::row_grad));
  library.impl("row_grad_cpp_", TORCH_BOX(&grpo_kernels::row_grad_));
  library.impl("row_grad_into_cpp", TORCH_BOX(&grpo_kernels::row_grad_into));
}
