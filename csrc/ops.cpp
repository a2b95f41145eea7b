// The operators of grpo_kernels/ops/schema.py for CPU tensors: checks, strides, threads. Stable ABI of torch alone.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "rows.h"

#ifdef GRPO_KERNELS_AVX2
#include <xmmintrin.h>
#endif

namespace grpo_kernels {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// GRPO_KERNELS_CPU is read at each call, so that a test can compare.
const Kernels& kernels() {
  const char* asked = std::getenv("GRPO_KERNELS_CPU");
  const std::string name = asked == nullptr ? "" : asked;
  STD_TORCH_CHECK(
      name.empty() || name == "avx2" || name == "baseline", "GRPO_KERNELS_CPU must be avx2 or baseline, got ", name,
      ". Leave it unset for the best that this machine has.");
#ifdef GRPO_KERNELS_AVX2
  static const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  STD_TORCH_CHECK(has_avx2 || name != "avx2", "GRPO_KERNELS_CPU: this machine has no AVX2, FMA and F16C. Unset it.");
  if (has_avx2 && name != "baseline") return avx2_kernels;
#else
  STD_TORCH_CHECK(name != "avx2", "GRPO_KERNELS_CPU: built without AVX2 for this architecture. Unset it.");
#endif
  return baseline_kernels;
}

// Results under the smallest normal number become 0: as subnormal numbers each would cost a hundred clocks.
class FlushToZero {
#ifdef GRPO_KERNELS_AVX2
 public:
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8000u); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
 public:
  FlushToZero() {}
#endif
};

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return kFloat;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Half: return kHalf;
    case ScalarType::Double: return kDouble;
    default: STD_TORCH_CHECK(false, "grpo_kernels: logits must be float32, bfloat16, float16 or float64. Convert them.");
  }
}

constexpr int64_t kSize[kTypes] = {4, 2, 2, 8};

double masked_below(Type type) { return type == kHalf ? -65504.0 : -0x1.FEp127; }

// Where row n of a tensor with rows [B, T] or [N] lies, in bytes.
struct Rows {
  char* data;
  int64_t length, outer, inner;

  char* at(int64_t n) const { return data + (n / length) * outer + (n % length) * inner; }
};

Rows matrix_rows(const Tensor& tensor, Type type) {
  STD_TORCH_CHECK(tensor.dim() == 2 || tensor.dim() == 3, "grpo_kernels: logits must be [B, T, V] or [N, V].");
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t last = tensor.dim() - 1;
  STD_TORCH_CHECK(sizes[last] <= 1 || strides[last] == 1, "grpo_kernels: the last axis of logits must have stride 1.");
  char* data = static_cast<char*>(tensor.mutable_data_ptr());
  if (last == 1) return {data, std::max<int64_t>(1, sizes[0]), 0, strides[0] * kSize[type]};
  return {data, std::max<int64_t>(1, sizes[1]), strides[0] * kSize[type], strides[1] * kSize[type]};
}

// A tensor with one number per row, in the shape of the rows or broadcast to it.
struct PerRow {
  Rows rows{nullptr, 1, 0, 0};
  ScalarType type = ScalarType::Float;

  PerRow() = default;
  PerRow(const Tensor& tensor, const Tensor& like) : type(tensor.scalar_type()) {
    const auto sizes = tensor.sizes(), strides = tensor.strides(), shape = like.sizes();
    const int64_t rank = like.dim(), own = tensor.dim(), size = tensor.element_size();
    STD_TORCH_CHECK(own <= rank, "grpo_kernels: a tensor of one number per row has more axes than the rows.");
    int64_t bytes[2] = {0, 0};
    for (int64_t axis = 0; axis < own; ++axis) {
      const int64_t place = rank - own + axis;
      STD_TORCH_CHECK(
          sizes[axis] == shape[place] || sizes[axis] == 1, "grpo_kernels: a tensor of one number per row must fit them.");
      bytes[2 - rank + place] = sizes[axis] == 1 ? 0 : strides[axis] * size;
    }
    rows = {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), std::max<int64_t>(1, shape[rank - 1]),
            bytes[0], bytes[1]};
  }

  double number(int64_t n) const {
    const char* at = rows.at(n);
    return type == ScalarType::Double ? *reinterpret_cast<const double*>(at) : *reinterpret_cast<const float*>(at);
  }
  int64_t integer(int64_t n) const {
    const char* at = rows.at(n);
    return type == ScalarType::Long ? *reinterpret_cast<const int64_t*>(at) : *reinterpret_cast<const int32_t*>(at);
  }
};

PerRow integers(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int, "grpo_kernels: targets must be int64 or int32.");
  return PerRow(tensor, tensor);
}

PerRow numbers(const Tensor& tensor, const Tensor& like) {
  const auto type = tensor.scalar_type();
  STD_TORCH_CHECK(
      type == ScalarType::Float || type == ScalarType::Double, "grpo_kernels: statistics are float32 or float64.");
  return PerRow(tensor, like);
}

Transform transform_of(Type type, double temperature, double logit_scale, std::optional<double> softcap) {
  return {(softcap ? 1.0 : logit_scale) / temperature, logit_scale, softcap.value_or(0.0), masked_below(type)};
}

// Rows one by one on torch's threads, each taking the next that is left; what a row gives depends on it alone.
template <class Function>
void for_each_row(int64_t rows, int64_t columns, const Function& function) {
  constexpr int64_t kWork = 1 << 15;  // columns worth a thread
  const int64_t run = std::max<int64_t>(1, kWork / std::max<int64_t>(1, columns));
  const int64_t runs = (rows + run - 1) / run;
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    const FlushToZero flush;
    for (int64_t i = next.fetch_add(1); i < runs; i = next.fetch_add(1)) {
      for (int64_t n = i * run, end = std::min(rows, n + run); n < end; ++n) function(n);
    }
  };
  const int64_t workers = std::min<int64_t>(runs, torch::stable::get_num_threads());
  if (workers <= 1) return work(0, 1);
  torch::stable::parallel_for(0, workers, 1, work);
}

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
  const auto dtype = type == kDouble ? ScalarType::Double : ScalarType::Float;
  const auto fresh = [&] { return torch::stable::new_empty(logits, targets.sizes(), dtype); };
  const int64_t nothing[1] = {0};
  Tensor outputs[6] = {
      fresh(), entropy ? fresh() : torch::stable::new_empty(logits, {nothing, 1}, dtype), fresh(), fresh(), fresh(),
      fresh()};
  void* places[6];
  for (int i = 0; i < 6; ++i) places[i] = outputs[i].mutable_data_ptr();
  for_each_row(count, columns, [&](int64_t n) {
    const int64_t target = ids.integer(n);
    Statistics s{};
    if (target >= 0) s = function(rows.at(n), target, transform_of(type, heat.number(n), logit_scale, softcap));
    const double values[6] = {s.logp, s.entropy, s.lse, s.row_max, s.sum_exp, s.sum_others};
    for (int i = 0; i < 6; ++i) {
      if (i == 1 && !entropy) continue;
      if (type == kDouble) {
        static_cast<double*>(places[i])[n] = values[i];
      } else {
        static_cast<float*>(places[i])[n] = static_cast<float>(values[i]);
      }
    }
  });
  return {outputs[0], outputs[1], outputs[2], outputs[3], outputs[4], outputs[5]};
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

void row_grad_into(
    const Tensor& logits, const Tensor& out, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const std::optional<Tensor>& grad_entropy) {
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
  });
}

Tensor row_grad(
    const Tensor& logits, const Tensor& targets, const Tensor& temperature, double logit_scale,
    std::optional<double> softcap, const Tensor& entropy, const Tensor& row_max, const Tensor& sum_exp,
    const Tensor& sum_others, const Tensor& grad_logps, const std::optional<Tensor>& grad_entropy) {
  Tensor grad = torch::stable::new_empty(logits, logits.sizes());
  row_grad_into(
      logits, grad, targets, temperature, logit_scale, softcap, entropy, row_max, sum_exp, sum_others, grad_logps,
      grad_entropy);
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
