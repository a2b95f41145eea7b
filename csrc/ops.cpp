// The row operators of grpo_kernels/ops/schema.py for CPU tensors. Stable ABI of torch alone.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "tensors.h"

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

void write_gradient(
    const Tensor& logits, const Tensor& out, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const std::optional<Tensor>& grad_entropy, int64_t work_of_run) {
  const Type type = type_of(logits), out_type = type_of(out);
  const Rows rows = matrix_rows(logits, type), out_rows = matrix_rows(out, out_type);
  const int64_t columns = logits.size(logits.dim() - 1);
  const bool with_entropy = grad_entropy.has_value();
  const PerRow ids = integers(targets), heat = numbers(temperature, targets), top = numbers(row_max, targets);
  const PerRow total = numbers(sum_exp, targets), others = numbers(sum_others, targets);
  const PerRow g = numbers(grad_logps, targets);
  const PerRow g_entropy = with_entropy ? numbers(*grad_entropy, targets) : PerRow();
  const PerRow spread = with_entropy ? numbers(entropy, targets) : PerRow();
  const auto function = kernels().grad[type];
  for_each_row(targets.numel(), columns, [&](int64_t n) {
    const int64_t target = ids.integer(n);
    const Upstream upstream{g.number(n), with_entropy ? g_entropy.number(n) : 0.0, with_entropy};
    char* to = out_rows.at(n);
    if (target == kDead || (upstream.grad_logp == 0 && upstream.grad_entropy == 0)) {
      std::memset(to, 0, columns * kSize[out_type]);
      return;
    }
    const Statistics stats{
        0, with_entropy ? spread.number(n) : 0.0, 0, top.number(n), total.number(n), others.number(n)};
    const Transform transform = transform_of(type, heat.number(n), logit_scale, softcap);
    function(rows.at(n), to, out_type, columns, target, transform, stats, upstream);
  }, work_of_run);
}

void row_grad_into(
    const Tensor& logits, const Tensor& out, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const std::optional<Tensor>& grad_entropy) {
  write_gradient(
      logits, out, targets, temperature, logit_scale, softcap, entropy, row_max, sum_exp, sum_others, grad_logps,
      grad_entropy, kThread);
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

Tensor row_grad(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const std::optional<Tensor>& grad_entropy) {
  Tensor grad = fresh(logits.sizes(), logits.scalar_type());
  prefer_huge_pages(grad);
  // Up to four pages to a thread, as the balance allows: where two threads meet in one, one of them waits until the
  // other has cleared it.
  const int64_t page = kHugePage / grad.element_size(), balanced = grad.numel() / (4 * torch::stable::get_num_threads());
  write_gradient(
      logits, grad, targets, temperature, logit_scale, softcap, entropy, row_max, sum_exp, sum_others, grad_logps,
      grad_entropy, std::max(kThread, std::min(4 * page, balanced)));
  return grad;
}

void row_grad_(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const std::optional<Tensor>& grad_entropy) {
  row_grad_into(
      logits, logits, targets, temperature, logit_scale, softcap, entropy, row_max, sum_exp, sum_others, grad_logps,
      grad_entropy);
}

}  // namespace
}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels, CPU, library) {
  library.impl("row_stats_cpp", TORCH_BOX(&grpo_kernels::row_stats));
  library.impl("row_weights_cpp_", TORCH_BOX(&grpo_kernels::row_weights_));
  library.impl("row_grad_cpp", TORCH_BOX(&grpo_kernels::row_grad));
  library.impl("row_grad_cpp_", TORCH_BOX(&grpo_kernels::row_grad_));
  library.impl("row_grad_into_cpp", TORCH_BOX(&grpo_kernels::row_grad_into));
}
