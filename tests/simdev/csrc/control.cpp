// What Python calls to steer and to look at the simulated devices: torch.ops.simdev.*
#include <torch/library.h>

#include "device.h"
#include "memory.h"
#include "queues.h"

namespace simdev {

TORCH_LIBRARY(simdev, library) {
  library.def("set_mode(str kind, int seed) -> ()", [](const std::string& kind, int64_t seed) {
    Machine::get().set_mode(kind, uint64_t(seed));
  });
  library.def("host_waits() -> int", [] { return Machine::get().host_waits(); });
  library.def("launches() -> int", [] { return Machine::get().launches(); });
  library.def("waits_by_name() -> str[]", [] { return Machine::get().waits_by_name(); });
  library.def("reset_counters() -> ()", [] { Machine::get().reset_counters(); });
  library.def("pending(int device) -> int", [](int64_t device) {
    return Machine::get().pending(c10::DeviceIndex(device));
  });
  library.def("set_capacity(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    set_capacity(c10::DeviceIndex(device), bytes);
  });
  library.def("capacity(int device) -> int", [](int64_t device) {
    return capacity(c10::DeviceIndex(device));
  });
  library.def("device_count() -> int", [] { return int64_t(device_count()); });
  library.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(c10::DeviceIndex(device));
  });
}

}  // namespace simdev
