// Lays out the work of a step on the device, once for all layers of a shape.
#pragma once

#include "backends/cuda/attention_work.cuh"
#include "backends/cuda/device_step.h"
#include "backends/cuda/queue.h"

namespace maga::cuda {

// Sequences below `sequences` go to `few` where their packed rows fill no more than one of its tiles, else to `many`.
struct PlanArgs {
  WorkShape shape;
  WorkList few, many;
  int sequences = 0;
};
void attention_plan(const Queue& queue, const DeviceStep& step, const PlanArgs& args);

}  // namespace maga::cuda
