// pool: a row for each row of logits, from the tokens that its sequence brings.
#include "backends/cuda/rows.cuh"

namespace maga::cuda {
namespace {

constexpr int kThreads = 128;

// (grid: rows, parts of the columns)
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads) pool_kernel(DeviceStep step, Rows<T> in, Rows<Out> out, int width, PoolKind kind) {
  allow_next();
  wait_for_previous();
  const int row = blockIdx.x, column = blockIdx.y * kThreads + threadIdx.x, token = step.logit_rows[row];
  if (column >= width) return;
  const int sequence = step.token_sequence[token];
  int begin = step.sequence_start[sequence], end = step.sequence_start[sequence + 1];
  if (kind == PoolKind::first) end = begin + 1;
  if (kind == PoolKind::last) begin = token, end = token + 1;
  float sum = 0;
  for (int t = begin; t < end; ++t) sum += static_cast<float>(*in.at(t, column));
  *out.at(row, column) = static_cast<Out>(end - begin > 1 ? sum / static_cast<float>(end - begin) : sum);
}

}  // namespace

void pool(const Queue& queue, DType type, const DeviceStep& step, const PoolArgs& args) {
  if (step.rows == 0) return;
  const dim3 grid(step.rows, (args.width + kThreads - 1) / kThreads);
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto out) {
      using Out = decltype(out);
      launch(queue, pool_kernel<T, Out>, grid, dim3(kThreads), 0, step, Rows<T>(args.in), Rows<Out>(args.out), args.width,
             args.kind);
    };
    args.out_f32 ? run(float()) : run(T());
  });
}

}  // namespace maga::cuda
