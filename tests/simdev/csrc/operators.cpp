// Operators that are no kernels: memory, copies, views, and those whose kernel has another name on the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device.h"
#include "images.h"
#include "launch.h"
#include "memory.h"
#include "queues.h"

namespace simdev {

namespace {

// ---- memory

c10::Device full_device(std::optional<c10::Device> device) {
  if (device && device->index() >= 0) return *device;
  return {c10::kPrivateUse1, current_device()};
}

std::vector<int64_t> contiguous(at::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!layout || *layout == at::kStrided, "simulated devices have strided tensors only");
  c10::DeviceGuard guard(full_device(device));
  return at::detail::empty_generic(
      sizes, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  return new_tensor(full_device(device), c10::dtype_or_default(type), sizes, strides);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const auto chosen = format.value_or(at::MemoryFormat::Contiguous);
  if (self.sizes() == sizes && !format) return self;
  std::vector<int64_t> strides = chosen == at::MemoryFormat::ChannelsLast
      ? c10::get_channels_last_strides_2d(sizes)
      : contiguous(sizes);
  resize_tensor(self, sizes, strides);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const std::vector<int64_t> chosen = strides.size() == sizes.size() ? strides.vec() : contiguous(sizes);
  impl->set_sizes_and_strides(sizes, chosen, offset);
  const size_t needed =
      at::detail::computeStorageNbytes(sizes, chosen, self.dtype().itemsize(), size_t(offset));
  auto* held = impl->unsafe_storage().unsafeGetStorageImpl();
  if (impl->numel() && needed > held->nbytes()) resize_storage(held, needed);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const int64_t size = int64_t(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {size}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto none = new_tensor(self.device(), self.scalar_type(), {0}, {1});
  return set_tensor(self, none);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// ---- copies

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_contiguous() && b.is_contiguous() &&
      a.sizes() == b.sizes() && !a.is_conj() && !b.is_conj() && !a.is_neg() && !b.is_neg();
}

Point launch_copy(c10::Stream stream, const at::Tensor& to, const at::Tensor& from) {
  return Machine::get().launch(stream, [to, from] { to.copy_(from); });
}

Point point_of(c10::Stream stream) { return Machine::get().end(stream); }

// As CUDA: the copy is on the source's stream, behind what the destination's stream holds, and the destination's
// stream goes on behind the copy.
void between_devices(const at::Tensor& to, const at::Tensor& from) {
  const auto reading = current_stream(from.device().index()), writing = current_stream(to.device().index());
  auto& machine = Machine::get();
  if (to.device() != from.device()) machine.wait(reading, point_of(writing));
  const Point done = launch_copy(reading, raw_image(to), raw_image(from));
  if (to.device() != from.device()) machine.wait(writing, done);
}

void to_device(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto stream = current_stream(to.device().index());
  const void* source = from.storage().data();
  if (non_blocking && is_pinned(source) && same_bytes(to, from)) {
    // The device reads the host's memory when the stream comes to it.
    const Point done = launch_copy(stream, raw_image(to), raw_image(from));
    pinned_in_use(source, done);
  } else if (non_blocking) {
    // Pageable memory is staged before the call returns.
    Machine::get().insist_on_no_recording("copy of pageable memory");
    launch_copy(stream, raw_image(to), from.clone());
  } else {
    const Point done = launch_copy(stream, raw_image(to), raw_image(from));
    Machine::get().finish(done, "copy to the device");
  }
}

void to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto stream = current_stream(from.device().index());
  const Point done = launch_copy(stream, raw_image(to), raw_image(from));
  const void* target = to.storage().data();
  if (non_blocking && is_pinned(target) && same_bytes(to, from)) {
    pinned_in_use(target, done);
  } else {
    Machine::get().finish(done, "copy to the host");
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  const auto from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (self.numel() == 0) return self;
  TORCH_CHECK(
      (self.is_cpu() || on_sim(self)) && (from.is_cpu() || on_sim(from)), "simdev copies between cpu and sim, not ",
      from.device(), " and ", self.device());
  if (on_sim(self) && on_sim(from)) {
    between_devices(self, from);
  } else if (on_sim(self)) {
    to_device(self, from, non_blocking);
  } else {
    to_host(self, from, non_blocking);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  auto target = destination;
  copy_(target, source, non_blocking);
  return destination;
}

at::Scalar local_scalar(const at::Tensor& self) {
  at::Scalar value;
  const auto image = raw_image(self);
  Machine::get().run_now(
      current_stream(self.device().index()), [&] { value = at::_local_scalar_dense(image); }, "item");
  return value;
}

// Says that `tensor.data = other` may go from the CPU to a device and back, so that `module.to(device)` keeps its
// parameters the same objects.
bool compatible(const at::Tensor& self, const at::Tensor& other) {
  const auto dense = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && (t.is_cpu() || t.is_privateuseone());
  };
  return dense(self) && dense(other);
}

// ---- operators under another name

// Other devices are to override a convolution under these names; the CPU computes `convolution` itself.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  launch_operator(op, stack);
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto backward = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const size_t count = op.schema().arguments().size();
  auto first = stack->end() - ptrdiff_t(count);
  const auto weight = (first + 2)->toTensor();
  const bool transposed = (first + 6)->toBool();
  const int64_t groups = (first + 8)->toInt();
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{channels}));
  launch_operator(backward, stack);
}

// CUDA counts whole numbers, too, which the CPU's kernel refuses.
void histc(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto first = stack->end() - ptrdiff_t(op.schema().arguments().size());
  const auto type = first->toTensor().scalar_type();
  const bool whole = c10::isIntegralType(type, false);
  if (whole) *first = first->toTensor().to(at::kDouble);
  launch_operator(op, stack);
  if (whole) stack->back() = stack->back().toTensor().to(type);
}

// Fused attention gives other bits than its formula, and the formula runs everywhere.
int64_t attention_by_formula(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

at::Tensor sum_of_gates(
    const at::Tensor& input, const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  auto gates = input_bias && input_bias->defined() ? input + *input_bias : input;
  auto other = hidden_bias && hidden_bias->defined() ? hidden + *hidden_bias : hidden;
  return gates + other;
}

// The cell of an LSTM: only CUDA has it as one kernel. The workspace holds the gates.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto parts = sum_of_gates(input, hidden, input_bias, hidden_bias).chunk(4, 1);
  auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  auto cy = forget * cx + in * cell;
  auto hy = out * cy.tanh();
  return {hy, cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  if (!(grad_hy && grad_hy->defined()) && !(grad_cy && grad_cy->defined())) return {};
  auto parts = workspace.chunk(4, 1);
  auto in = parts[0], forget = parts[1], cell = parts[2], out = parts[3];
  auto tanh_cy = cy.tanh();
  auto grad_h = grad_hy && grad_hy->defined() ? *grad_hy : (cy * 0);
  auto grad_c = grad_h * out * (1 - tanh_cy * tanh_cy);
  if (grad_cy && grad_cy->defined()) grad_c = grad_c + *grad_cy;
  auto gates = at::cat(
      {grad_c * cell * in * (1 - in), grad_c * cx * forget * (1 - forget), grad_c * in * (1 - cell * cell),
       grad_h * tanh_cy * out * (1 - out)},
      1);
  return {gates, grad_c * forget, has_bias ? gates.sum(0) : at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_has_compatible_shallow_copy_type", &compatible);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("_fused_sdp_choice", &attention_by_formula);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  library.impl(
      "convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace simdev
