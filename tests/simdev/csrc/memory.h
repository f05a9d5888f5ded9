// The memory of the simulated devices, and page-locked memory of the host.
//
// A device address has no page behind it that the host may touch: reading it from the host is a segmentation
// fault. The kernels' thread reaches the same bytes through a second mapping, at a fixed distance.
//
// The allocator caches freed blocks per stream and gives them out again at once, without waiting for anything,
// as CUDA's caching allocator does. A freed block is filled with 0xFF bytes (NaN in every float type) by a job
// on its own stream, so whoever reads it later on another stream without a wait or `record_stream` reads NaN.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

#include "queues.h"

namespace simdev {

c10::DeviceAllocator& device_allocator();

// Returns where the kernels' thread finds the byte; addresses of the host stay as they are.
void* kernel_address(const void* address);
bool is_device_address(const void* address);
c10::DeviceIndex device_of_address(const void* address);

// Memory of a graph comes from the pool of this number, and stays there as long as a graph holds the pool.
void hold_pool(int64_t pool);
void release_pool(int64_t pool);

void set_capacity(c10::DeviceIndex device, int64_t bytes);
int64_t capacity(c10::DeviceIndex device);

// Page-locked memory of the host.
bool is_pinned(const void* address);
// A copy at `point` uses the piece: it is not given out again before the point is passed.
void pinned_in_use(const void* address, Point point);

}  // namespace simdev
