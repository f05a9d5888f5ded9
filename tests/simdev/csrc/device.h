// Generators and storages of the simulated devices.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <optional>

#include "graphs.h"

namespace simdev {

const at::Generator& default_generator(c10::DeviceIndex device);

// Draws the seed of one random kernel, from the given generator or from that of the device.
KernelSeed draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

// Returns a generator with the same state, which follows that state and not the generator.
at::Generator state_of(const at::Generator& generator);
// What is drawn from the generator's state between the two calls is recorded and drawn at each replay.
std::shared_ptr<Draws> begin_draws(const at::Generator& generator);
void end_draws(const at::Generator& generator);

// Gives a storage new memory of so many bytes, and launches a copy of the bytes that both have.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

}  // namespace simdev
