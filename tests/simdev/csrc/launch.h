// Runs any operator of torch on a simulated device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace simdev {

// Launches the operator: the results on the stack have their shapes at once, from the operator's meta kernel, and
// their values when the stream runs, from the CPU kernel on the same memory. Where no shape is known without the
// values, the host waits, and the wait is counted under the operator's name.
void launch_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace simdev
