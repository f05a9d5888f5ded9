#include "launch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

#include "device.h"
#include "images.h"
#include "memory.h"
#include "queues.h"

extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Clear();
}

namespace simdev {

namespace {

using torch::jit::Stack;

// Within this scope no function mode of Python sees what a shape function calls.
class WithoutFunctionModes {
 public:
  WithoutFunctionModes() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~WithoutFunctionModes() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }

 private:
  at::impl::TorchFunctionDisabledState before_;
};

// Calls an operator that draws from the CPU's own generator as if that had been seeded. The host goes on meanwhile
// and may seed that generator, too: what was drawn then is drawn again.
void call_seeded(const c10::OperatorHandle& op, uint64_t seed, Stack& stack) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> alone(one_at_a_time);
  auto generator = at::detail::getDefaultCPUGenerator();
  const Stack arguments = stack;
  for (;;) {
    at::Tensor before;
    {
      std::lock_guard<std::mutex> lock(generator.mutex());
      before = generator.get_state();
      generator.set_current_seed(seed);
    }
    stack = arguments;
    op.callBoxed(&stack);
    std::lock_guard<std::mutex> lock(generator.mutex());
    if (generator.current_seed() != seed) continue;
    generator.set_state(before);
    return;
  }
}

// One call of an operator on a simulated device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), arguments_(std::move(arguments)), cpu_(Images::Kind::kCpu), meta_(Images::Kind::kMeta) {
    find_device();
    move_indices();
    check_devices();
    draw();
  }

  Stack run() {
    if (!infer()) return run_and_wait();
    resize_outputs();
    Stack outputs = place_results();
    if (launches_) launch(outputs);
    return outputs;
  }

 private:
  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const c10::Argument& argument(size_t i) const { return schema().arguments()[i]; }
  bool written(size_t i) const { return argument(i).alias_info() && argument(i).alias_info()->isWrite(); }
  c10::Stream stream() const { return current_stream(device_->index()); }

  void find_device() {
    for (auto& value : arguments_) {
      each_tensor(value, [&](const at::Tensor& t) {
        if (!device_ && on_sim(t)) device_ = t.device();
      });
      if (!device_ && value.isDevice() && value.toDevice().is_privateuseone()) device_ = value.toDevice();
    }
    if (!device_) device_ = c10::Device(c10::kPrivateUse1, current_device());
    if (device_->index() < 0) device_ = c10::Device(c10::kPrivateUse1, current_device());
  }

  // CUDA takes indices that are on the CPU, and so does this.
  void move_indices() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!arguments_[i].isOptionalTensorList() || argument(i).name() != "indices") continue;
      arguments_[i] = map_tensors(arguments_[i], [&](const at::Tensor& t) {
        return t.defined() && t.is_cpu() ? t.to(*device_) : t;
      });
    }
  }

  void check_devices() const {
    for (auto& value : arguments_) {
      each_tensor(value, [&](const at::Tensor& t) {
        const bool number = t.is_cpu() && t.dim() == 0;
        TORCH_CHECK(
            t.device() == *device_ || number,
            "Expected all tensors to be on the same device, but found at least two devices, sim:",
            int(device_->index()), " and ", t.is_privateuseone() ? "sim:" : "cpu",
            t.is_privateuseone() ? std::to_string(t.device().index()) : "", "! (when calling ",
            schema().name(), ")");
      });
    }
  }

  // A random operator draws its seed now, so that its numbers do not depend on when the stream runs.
  void draw() {
    std::optional<at::Generator> given;
    bool takes_one = false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (argument(i).name() != "generator") continue;
      takes_one = true;
      if (arguments_[i].isGenerator()) given = arguments_[i].toGenerator();
    }
    if (takes_one || op_.hasTag(at::Tag::nondeterministic_seeded)) seed_ = draw_seed(given, device_->index());
  }

  // Finds the shapes of the results by the meta kernel. Returns false where that needs values.
  bool infer() {
    for (auto& result : schema().returns()) {
      const auto kind = result.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
    }
    Stack stack;
    for (auto& value : arguments_) {
      if (value.isDevice()) {
        stack.emplace_back(c10::Device(c10::kMeta));
      } else if (value.isGenerator()) {
        stack.emplace_back();
      } else {
        stack.push_back(map_tensors(value, [&](const at::Tensor& t) { return on_sim(t) ? meta_.of(t) : t; }));
      }
    }
    try {
      WithoutFunctionModes no_modes;
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      op_.callBoxed(&stack);
    } catch (...) {
      // The operator has no meta kernel, needs the values, or was called wrongly, which the CPU kernel will say.
      const int state = PyGILState_Ensure();
      PyErr_Clear();
      PyGILState_Release(state);
      return only_writes();
    }
    inferred_ = std::move(stack);
    return true;
  }

  // An operator that only changes its arguments in place needs no shapes.
  bool only_writes() const {
    for (auto& result : schema().returns()) {
      if (!result.alias_info() || !result.alias_info()->isWrite()) return false;
    }
    bool writes = false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!written(i)) continue;
      if (argument(i).kwarg_only()) return false;
      writes = true;
    }
    return writes;
  }

  // Gives `out=` tensors the sizes that the meta kernel gave their images.
  void resize_outputs() {
    if (inferred_.empty()) return;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!written(i)) continue;
      each_tensor(arguments_[i], [&](const at::Tensor& t) {
        if (!on_sim(t)) return;
        const auto image = meta_.of(t);
        if (image.sizes() != t.sizes() || image.strides() != t.strides()) {
          resize_tensor(t, image.sizes(), image.strides());
        }
      });
    }
  }

  c10::IValue written_argument(const c10::Argument& result) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (written(i) && argument(i).alias_info()->beforeSets() == result.alias_info()->beforeSets()) {
        return arguments_[i];
      }
    }
    TORCH_CHECK(false, schema().name(), " writes an argument that simdev does not find");
  }

  // Makes the results: arguments that are written, views of arguments, or new tensors.
  Stack place_results() {
    Stack outputs;
    launches_ = schema().is_mutable();
    for (size_t i = 0; i < schema().returns().size(); ++i) {
      const auto& result = schema().returns()[i];
      if (result.alias_info() && result.alias_info()->isWrite()) {
        outputs.push_back(written_argument(result));
      } else {
        outputs.push_back(map_tensors(inferred_.at(i), [&](const at::Tensor& image) { return place(image); }));
      }
    }
    return outputs;
  }

  at::Tensor place(const at::Tensor& image) {
    if (!image.defined()) return image;
    if (auto same = meta_.original(image); same.defined()) return same;
    if (auto base = meta_.sharing(image); base.defined()) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.unsafeGetTensorImpl()->unsafe_storage()),
          base.key_set(), image.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(image.sizes(), image.strides(), image.storage_offset());
      return view;
    }
    launches_ = true;
    auto fresh = new_tensor(*device_, image.scalar_type(), image.sizes(), image.strides());
    fresh_.insert(fresh.unsafeGetTensorImpl());
    return fresh;
  }

  // The arguments as the CPU kernel gets them. CPU scalars are copied, as a launch on CUDA copies them.
  Stack cpu_arguments() {
    Stack stack;
    for (auto& value : arguments_) {
      if (value.isDevice()) {
        stack.emplace_back(c10::Device(c10::kCPU));
      } else if (value.isGenerator()) {
        stack.emplace_back();
      } else {
        stack.push_back(map_tensors(value, [&](const at::Tensor& t) {
          if (on_sim(t)) return cpu_.of(t);
          if (!t.defined()) return t;
          auto copy = t.clone();
          if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
          return copy;
        }));
      }
    }
    return stack;
  }

  // Returns the function that runs the CPU kernel on a stack.
  std::function<void(Stack&)> kernel() const {
    auto op = op_;
    const auto seed = seed_;
    std::optional<size_t> generator;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (argument(i).name() == "generator") generator = i;
    }
    return [op, seed, generator](Stack& stack) {
      if (!seed) {
        op.callBoxed(&stack);
      } else if (generator) {
        stack[*generator] = at::detail::createCPUGenerator(seed->now());
        op.callBoxed(&stack);
      } else {
        call_seeded(op, seed->now(), stack);
      }
    };
  }

  void launch(const Stack& outputs) {
    Stack targets;  // CPU images of the new tensors, where the kernel's results go.
    for (auto& output : outputs) {
      targets.push_back(map_tensors(output, [&](const at::Tensor& t) {
        return t.defined() && fresh_.count(t.unsafeGetTensorImpl()) ? cpu_.of(t) : at::Tensor();
      }));
    }
    auto run = [kernel = kernel(), stack = cpu_arguments(), targets = std::move(targets)]() mutable {
      kernel(stack);
      for (size_t i = 0; i < targets.size(); ++i) store(stack[i], targets[i]);
    };
    Machine::get().launch(stream(), std::move(run));
  }

  static void store(const c10::IValue& result, const c10::IValue& target) {
    if (target.isTensor()) {
      if (target.toTensor().defined()) copy_into(target.toTensor(), result.toTensor());
    } else if (target.isTensorList()) {
      const auto targets = target.toTensorVector(), results = result.toTensorVector();
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].defined()) copy_into(targets[i], results[i]);
      }
    }
  }

  static void copy_into(const at::Tensor& target, const at::Tensor& result) {
    // Some CPU kernels leave a result empty that nobody reads, such as the mean of a batch norm in evaluation.
    if (result.numel() == 0) return;
    TORCH_CHECK(
        target.sizes() == result.sizes() && target.scalar_type() == result.scalar_type(),
        "the meta kernel gives ", target.sizes(), " ", target.scalar_type(), ", the CPU kernel ", result.sizes(),
        " ", result.scalar_type());
    target.copy_(result);
  }

  // Runs the kernel now, for operators whose shapes or results depend on values.
  Stack run_and_wait() {
    auto stack = cpu_arguments();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      // The kernel resizes `out=` tensors as it likes; they get their memory afterwards.
      if (written(i) && argument(i).kwarg_only()) {
        stack[i] = map_tensors(arguments_[i], [](const at::Tensor& t) {
          return at::empty({0}, at::TensorOptions().dtype(t.dtype()));
        });
      }
    }
    const auto outs = stack;
    const auto run = kernel();
    Machine::get().run_now(stream(), [&] { run(stack); }, schema().name());
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (written(i) && argument(i).kwarg_only()) fill_out(arguments_[i], outs[i]);
    }
    Stack results;
    for (size_t i = 0; i < schema().returns().size(); ++i) {
      const auto& result = schema().returns()[i];
      if (result.alias_info() && result.alias_info()->isWrite()) {
        results.push_back(written_argument(result));
      } else {
        results.push_back(map_tensors(stack.at(i), [&](const at::Tensor& t) { return moved(t); }));
      }
    }
    return results;
  }

  void fill_out(const c10::IValue& out, const c10::IValue& result) const {
    std::vector<at::Tensor> results;
    each_tensor(result, [&](const at::Tensor& t) { results.push_back(t); });
    size_t next = 0;
    each_tensor(out, [&](const at::Tensor& t) {
      const auto& value = results.at(next++);
      if (t.sizes() != value.sizes()) resize_tensor(t, value.sizes(), value.strides());
      Machine::get().launch(stream(), [to = raw_image(t), value] { to.copy_(value); });
    });
  }

  // Returns the device's tensor for a result of the CPU kernel.
  at::Tensor moved(const at::Tensor& result) {
    if (!result.defined()) return result;
    if (auto same = cpu_.original(result); same.defined()) return same;
    auto target = new_tensor(*device_, result.scalar_type(), result.sizes(), result.strides());
    Machine::get().launch(stream(), [to = raw_image(target), result] { to.copy_(result); });
    return target;
  }

  const c10::OperatorHandle op_;
  Stack arguments_;
  Images cpu_, meta_;
  std::optional<c10::Device> device_;
  std::optional<KernelSeed> seed_;
  Stack inferred_;
  std::unordered_set<c10::TensorImpl*> fresh_;
  bool launches_ = false;
};

}  // namespace

void launch_operator(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - ptrdiff_t(count), stack->end());
  Stack results = Call(op, std::move(arguments)).run();
  stack->resize(stack->size() - count);
  for (auto& result : results) stack->push_back(std::move(result));
}

namespace {

// Operators that the CPU computes by a kernel of its own, and other devices by a formula of several operators,
// are launched as the CPU's kernel: its bits are what the device is to give.
void take_over(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const bool formula = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (!formula) continue;
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&launch_operator>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&launch_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { take_over(library); }

}  // namespace simdev
