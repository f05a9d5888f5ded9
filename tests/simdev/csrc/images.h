// Images of a simulated device's tensors: the same sizes, strides and storages as CPU tensors over the kernels'
// mapping, and as meta tensors without memory.
//
// Two tensors that share a storage, or are one tensor, do so in their images, too: kernels and shape functions
// look for that. CPU images own nothing, so a job that holds them keeps no block of the device alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <unordered_map>

namespace simdev {

inline bool on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

class Images {
 public:
  enum class Kind { kCpu, kMeta };
  explicit Images(Kind kind) : kind_(kind) {}

  // Returns the image of a tensor, always the same one for one tensor.
  at::Tensor of(const at::Tensor& tensor);
  // Returns the tensor whose image this is, or an undefined one.
  at::Tensor original(const at::Tensor& image) const;
  // Returns a tensor whose image shares its storage with `image`, or an undefined one.
  at::Tensor sharing(const at::Tensor& image) const;

 private:
  Kind kind_;
  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> tensors_;  // Original, image.
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// Returns a CPU tensor over the memory of a tensor, for jobs: also of a CPU tensor, whose owner it is not.
at::Tensor raw_image(const at::Tensor& tensor);

// Returns the value with each tensor in it, also in lists, exchanged.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& exchange);
// Calls `look` with each tensor in the value.
void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look);

// Returns a tensor on the device's current stream, with memory that nobody has written.
at::Tensor new_tensor(c10::Device device, at::ScalarType type, at::IntArrayRef sizes, at::IntArrayRef strides);
// Gives a tensor new sizes and strides, and a larger storage where the old one is too small.
void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace simdev
