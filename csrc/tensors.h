// What the operators share: tensors as rows of numbers, the kernels of this machine, torch's threads.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <type_traits>

#include "rows.h"

#ifdef GRPO_KERNELS_X86
#include <xmmintrin.h>
#endif

namespace grpo_kernels {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The table of an instruction set, if it is built and this machine has it.
const Kernels* table_of(const std::string& name) {
#ifdef GRPO_KERNELS_X86
  static const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (name == "avx512") return has_avx512 ? &avx512_kernels : nullptr;
  if (name == "avx2") return has_avx2 ? &avx2_kernels : nullptr;
#endif
  return name == "baseline" ? &baseline_kernels : nullptr;
}

// GRPO_KERNELS_CPU is read at each call, so that a test can compare.
const Kernels& kernels() {
  constexpr const char* kBestFirst[] = {"avx512", "avx2", "baseline"};
  const char* asked = std::getenv("GRPO_KERNELS_CPU");
  if (asked == nullptr || *asked == 0) {
    static const Kernels* best = [&] {
      const Kernels* found = nullptr;
      for (const char* name : kBestFirst) found = found == nullptr ? table_of(name) : found;
      return found;
    }();
    return *best;
  }
  const bool known = std::any_of(std::begin(kBestFirst), std::end(kBestFirst), [&](const char* name) {
    return std::strcmp(name, asked) == 0;
  });
  STD_TORCH_CHECK(
      known, "GRPO_KERNELS_CPU must be avx512, avx2 or baseline, got ", asked,
      ". Leave it unset for the best that this machine has.");
  const Kernels* table = table_of(asked);
  STD_TORCH_CHECK(table != nullptr, "GRPO_KERNELS_CPU: this machine has no ", asked, ". Unset it.");
  return *table;
}

// Results under the smallest normal number become 0: as subnormal numbers each would cost a hundred clocks.
class FlushToZero {
#ifdef GRPO_KERNELS_X86
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

// Uninitialised and contiguous. Through the C interface: torch::stable::new_empty takes the dispatcher's way, which is
// most of the time of a call on few rows.
Tensor fresh(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  constexpr int64_t kMostAxes = 3;
  const auto axes = static_cast<int64_t>(sizes.size());
  STD_TORCH_CHECK(axes <= kMostAxes, "grpo_kernels: logits must be [B, T, V] or [N, V].");
  int64_t strides[kMostAxes], stride = 1;
  for (int64_t axis = axes - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= std::max<int64_t>(1, sizes[axis]);
  }
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(axes, sizes.data(), strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// Where row n of a tensor with rows [B, T] or [N] lies, in bytes.
struct Rows {
  char* data = nullptr;
  int64_t length = kMany, outer = 0, inner = 0;

  Rows() = default;
  // Rows that follow each other at one distance are one run: no division for each.
  Rows(char* from, int64_t rows, int64_t outer_bytes, int64_t inner_bytes)
      : data(from), length(outer_bytes == rows * inner_bytes ? kMany : std::max<int64_t>(1, rows)),
        outer(outer_bytes), inner(inner_bytes) {}

  char* at(int64_t n) const {
    return n < length ? data + n * inner : data + (n / length) * outer + (n % length) * inner;
  }

 private:
  static constexpr int64_t kMany = INT64_MAX;
};

Rows matrix_rows(const Tensor& tensor, Type type) {
  STD_TORCH_CHECK(tensor.dim() == 2 || tensor.dim() == 3, "grpo_kernels: logits must be [B, T, V] or [N, V].");
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t last = tensor.dim() - 1;
  STD_TORCH_CHECK(sizes[last] <= 1 || strides[last] == 1, "grpo_kernels: the last axis of logits must have stride 1.");
  char* data = static_cast<char*>(tensor.mutable_data_ptr());
  if (last == 1) return {data, sizes[0], sizes[0] * strides[0] * kSize[type], strides[0] * kSize[type]};
  return {data, sizes[1], strides[0] * kSize[type], strides[1] * kSize[type]};
}

// A tensor with one number per row, in the shape of the rows or broadcast to it.
struct PerRow {
  Rows rows;
  ScalarType type = ScalarType::Float;

  PerRow() = default;
  PerRow(const Tensor& tensor, const Tensor& like) : type(tensor.scalar_type()) {
    const auto sizes = tensor.sizes(), strides = tensor.strides(), shape = like.sizes();
    const int64_t rank = like.dim(), own = tensor.dim(), size = tensor.element_size();
    STD_TORCH_CHECK(own <= rank, "grpo_kernels: a tensor of one number per row has more axes than the rows.");
    int64_t bytes[2] = {0, 0};  // of a step along each axis
    for (int64_t axis = 0; axis < own; ++axis) {
      const int64_t place = rank - own + axis;
      STD_TORCH_CHECK(
          sizes[axis] == shape[place] || sizes[axis] == 1, "grpo_kernels: a tensor of one number per row must fit them.");
      bytes[2 - rank + place] = sizes[axis] == 1 ? 0 : strides[axis] * size;
    }
    if (rank == 1) bytes[0] = shape[0] * bytes[1];
    rows = {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), shape[rank - 1], bytes[0], bytes[1]};
  }

  // `count` numbers of a contiguous tensor, from the one at `begin`.
  static PerRow run(const Tensor& tensor, int64_t begin, int64_t count) {
    const int64_t size = tensor.element_size();
    char* data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + begin * size;
    PerRow made;
    made.rows = {data, count, count * size, size};
    made.type = tensor.scalar_type();
    return made;
  }

  // The same number, which must outlive this, for every row.
  static PerRow constant(const double& number) {
    PerRow made;
    made.rows.data = reinterpret_cast<char*>(const_cast<double*>(&number));
    made.type = ScalarType::Double;
    return made;
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

using Maybe = std::optional<Tensor>;

PerRow maybe_numbers(const Maybe& tensor, const Tensor& like) { return tensor ? numbers(*tensor, like) : PerRow(); }

// A contiguous tensor of float32 or float64 to write.
class Column {
 public:
  Column() = default;
  explicit Column(const Tensor& tensor)
      : wide_(tensor.scalar_type() == ScalarType::Double), data_(tensor.mutable_data_ptr()) {}

  void write(int64_t n, double value) const {
    if (wide_) {
      static_cast<double*>(data_)[n] = value;
    } else {
      static_cast<float*>(data_)[n] = static_cast<float>(value);
    }
  }

 private:
  bool wide_ = false;
  void* data_ = nullptr;
};

// kCount numbers a row; the second, an entropy, is an empty tensor unless asked for.
template <int kCount>
struct RowOutputs {
  Tensor tensors[kCount];

  RowOutputs(const Tensor& targets, Type type, bool entropy) : entropy_(entropy) {
    const auto dtype = type == kDouble ? ScalarType::Double : ScalarType::Float;
    const int64_t nothing[1] = {0};
    for (int i = 0; i < kCount; ++i) {
      tensors[i] = i == 1 && !entropy ? fresh({nothing, 1}, dtype) : fresh(targets.sizes(), dtype);
      columns_[i] = Column(tensors[i]);
    }
  }

  void write(int64_t n, const double (&values)[kCount]) const {
    for (int i = 0; i < kCount; ++i) {
      if (i != 1 || entropy_) columns_[i].write(n, values[i]);
    }
  }

 private:
  bool entropy_;
  Column columns_[kCount];
};

Transform transform_of(Type type, double temperature, double logit_scale, std::optional<double> softcap) {
  return {(softcap ? 1.0 : logit_scale) / temperature, logit_scale, softcap.value_or(0.0), masked_below(type)};
}

constexpr int64_t kThread = 1 << 15;    // columns worth a thread
constexpr int64_t kHugePage = 1 << 21;  // bytes

// Rows on torch's threads, each taking the next run of about `work_of_run` columns; what a row gives depends on it alone.
// A function of two arguments can ask the second for the row that its thread takes next, -1 if there is none: late, so
// that no thread holds a row which an idle one could begin.
template <class Function>
void for_each_row(int64_t rows, int64_t columns, const Function& function, int64_t work_of_run = kThread) {
  const int64_t run = std::max<int64_t>(1, work_of_run / std::max<int64_t>(1, columns));
  const int64_t runs = (rows + run - 1) / run;
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    const FlushToZero flush;
    constexpr int64_t kUnknown = -1;
    for (int64_t i = next.fetch_add(1), then; i < runs; i = then) {
      then = kUnknown;
      const auto take = [&] { return then == kUnknown ? then = next.fetch_add(1) : then; };
      for (int64_t n = i * run, end = std::min(rows, n + run); n < end; ++n) {
        if constexpr (std::is_invocable_v<Function, int64_t>) {
          function(n);
        } else {
          function(n, [&] { return n + 1 < end ? n + 1 : take() < runs ? then * run : -1; });
        }
      }
      take();
    }
  };
  const int64_t workers = std::min<int64_t>(runs, torch::stable::get_num_threads());
  if (workers <= 1) return work(0, 1);
  torch::stable::parallel_for(0, workers, 1, work);
}

}  // namespace
}  // namespace grpo_kernels
