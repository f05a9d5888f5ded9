// Generators and storages of the simulated devices.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/StorageImpl.h>

#include <optional>

namespace simdev {

const at::Generator& default_generator(c10::DeviceIndex device);

// Draws the seed of one random kernel, from the given generator or from that of the device.
uint64_t draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

// Gives a storage new memory of so many bytes, and launches a copy of the bytes that both have.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

}  // namespace simdev
