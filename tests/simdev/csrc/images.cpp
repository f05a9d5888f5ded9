#include "images.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>

#include "device.h"
#include "memory.h"

namespace simdev {

namespace {

c10::Storage storage_image(const at::Tensor& tensor, Images::Kind kind) {
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const bool meta = kind == Images::Kind::kMeta;
  const c10::Device device(meta ? c10::kMeta : c10::kCPU);
  void* address = meta || !storage->data() ? nullptr : kernel_address(storage->data());
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage->nbytes(), c10::DataPtr(address, device),
      meta ? c10::GetAllocator(c10::kMeta) : nullptr, /*resizable=*/meta);
}

at::Tensor over(const at::Tensor& tensor, c10::Storage storage, Images::Kind kind) {
  const auto key = kind == Images::Kind::kMeta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
  auto image = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  image.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) image._set_conj(true);
  if (tensor.is_neg()) image._set_neg(true);
  return image;
}

}  // namespace

at::Tensor Images::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto& entry = tensors_[tensor.unsafeGetTensorImpl()];
  if (!entry.second.defined()) {
    auto& storage = storages_[tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()];
    if (!storage) storage = storage_image(tensor, kind_);
    entry = {tensor, over(tensor, storage, kind_)};
  }
  return entry.second;
}

at::Tensor Images::original(const at::Tensor& image) const {
  for (auto& [key, pair] : tensors_) {
    if (pair.second.is_same(image)) return pair.first;
  }
  return {};
}

at::Tensor Images::sharing(const at::Tensor& image) const {
  if (!image.has_storage()) return {};
  auto* storage = image.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  for (auto& [key, pair] : tensors_) {
    if (pair.second.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage) return pair.first;
  }
  return {};
}

at::Tensor raw_image(const at::Tensor& tensor) {
  return over(tensor, storage_image(tensor, Images::Kind::kCpu), Images::Kind::kCpu);
}

c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& exchange) {
  if (value.isTensor()) return exchange(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& item : value.toTensorVector()) list.push_back(exchange(item));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : value.toOptionalTensorVector()) {
      list.push_back(item ? std::optional<at::Tensor>(exchange(*item)) : std::nullopt);
    }
    return list;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) look(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& item : value.toTensorVector()) look(item);
  } else if (value.isOptionalTensorList()) {
    for (const auto& item : value.toOptionalTensorVector()) {
      if (item && item->defined()) look(*item);
    }
  }
}

at::Tensor new_tensor(c10::Device device, at::ScalarType type, at::IntArrayRef sizes, at::IntArrayRef strides) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const size_t needed = at::detail::computeStorageNbytes(
      sizes, strides, tensor.dtype().itemsize(), size_t(tensor.storage_offset()));
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  impl->set_sizes_and_strides(sizes, strides);
  if (impl->numel() && needed > storage->nbytes()) resize_storage(storage, needed);
}

}  // namespace simdev
