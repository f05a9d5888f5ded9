"""Answers which accelerator this process has, and asks it for devices, memory, names and random states.

torch calls a device by its type and number, `cuda:0`. The type comes from torch itself
(`torch.accelerator.current_accelerator`), so the plug-in of another vendor, registered as torch's
documentation describes, needs no line here. `KNOWN` only says what torch's interfaces do not tell: how users
call such devices, and what they lack.

    type   devices                             collectives   lacks
    cuda   NVIDIA, and AMD by ROCm             nccl, rccl
    xpu    Intel                               xccl          some of them float64
    npu    Huawei Ascend, by torch_npu         hccl
    hpu    Intel Gaudi, by habana_frameworks   hccl          streams
    mps    Apple                               none          streams, several devices, float64

Every function takes or returns plain torch devices. On a machine without an accelerator all of them work, and
answer for the CPU. Source: https://docs.pytorch.org/docs/stable/accelerator.html
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from outsize.errors import BadOption

CPU: Final = "cpu"
USUAL: Final = "cuda"
REPEATABLE: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The environment, set before the first kernel, in which matrix products have one order of sums."""
CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment's name for how many launch queues a CUDA device has; with one, a kernel behind a message
that has not come waits for it, whatever stream it is on.
"""
_SHARING_NCCL: Final = (2, 30)
Lack = Literal["streams", "several devices", "float64"]


@final
@dataclass(frozen=True, slots=True)
class AcceleratorType:
    """Describes a type of devices: what users call it, and what it lacks that others have."""

    name: str
    devices: str
    lacks: frozenset[Lack] = frozenset()


KNOWN: Final = {
    row.name: row
    for row in (
        AcceleratorType("cuda", "CUDA"),
        AcceleratorType("xpu", "Intel XPU"),
        AcceleratorType("npu", "Ascend"),
        AcceleratorType("hpu", "Gaudi", frozenset({"streams"})),
        AcceleratorType("mps", "Apple", frozenset({"streams", "several devices", "float64"})),
    )
}
"""The rows of the table by torch's name of the type; a type without a row is assumed to lack nothing."""


@final
@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Holds the driver's name of a device (`NVIDIA H200`) and all of its memory."""

    name: str
    memory_bytes: int


def accelerator_type() -> str | None:
    """Returns torch's name of the type of this process's accelerator (`cuda`); None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def built_type() -> str | None:
    """Returns the type that this torch is built or extended for, whether or not such a device is here; None
    for CPUs alone. It costs next to nothing.
    """
    found = torch.accelerator.current_accelerator(check_available=False)
    return None if found is None else found.type


def device_type() -> str:
    """Returns the type of the accelerator, and `cpu` where there is none."""
    return accelerator_type() or CPU


def type_of(place: str | torch.device) -> str:
    """Returns the type in a device's name: `cuda` of `cuda:0`."""
    return place.type if isinstance(place, torch.device) else place.partition(":")[0]


def is_accelerator(place: str | torch.device) -> bool:
    """Tells whether the device computes on its own while Python goes on; the CPU and `meta` do not."""
    return type_of(place) not in (CPU, "meta")


def lacks(place: str | torch.device, what: Lack) -> bool:
    """Tells whether devices of this type are known to lack something, or this one says that it does."""
    row = KNOWN.get(type_of(place))
    if row is not None and what in row.lacks:
        return True
    return what == "float64" and is_accelerator(place) and not _has_float64(torch.device(place))


@cache
def _has_float64(device: torch.device) -> bool:
    """Returns what the device's module says; Intel's does, since some of its devices have no float64."""
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return ask is None or bool(getattr(ask(device), "has_fp64", True))


def widest_float(device: torch.device) -> torch.dtype:
    """Returns the dtype for sums of numbers of any dtype: float64, or float32 where the device has none."""
    return torch.float32 if lacks(device, "float64") else torch.float64


def spoken(kind: str | None = None) -> str:
    """Returns what users call devices of this type: `CUDA`; of this torch's own by default."""
    kind = kind or built_type() or USUAL
    return KNOWN[kind].devices if kind in KNOWN else kind


def device_count() -> int:
    """Returns the number of devices of the accelerator that this process sees; 0 where there is none."""
    return torch.accelerator.device_count() if accelerator_type() else 0


def current_device() -> torch.device:
    """Returns the device that new work goes to: the accelerator's current one, else the CPU."""
    kind = accelerator_type()
    return torch.device(CPU) if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def all_devices() -> list[torch.device]:
    """Returns the devices of the accelerator that this process sees, in order."""
    kind = accelerator_type()
    return [] if kind is None else [torch.device(kind, index) for index in range(device_count())]


def has_float16_sums(place: str | torch.device) -> bool:
    """Tells whether products of float16 can be added up in float16 on devices of this type: by NVIDIA's
    library, from torch 2.7 on.
    """
    is_nvidia = type_of(place) == USUAL and torch.version.hip is None
    return is_nvidia and hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation")


@contextmanager
def float16_sums() -> Iterator[None]:
    """Adds products of float16 up in float16, on all threads of this process, until the context ends.

    Source: https://docs.pytorch.org/docs/stable/backends.html
    """
    products = torch.backends.cuda.matmul
    before = products.allow_fp16_accumulation
    products.allow_fp16_accumulation = True
    try:
        yield
    finally:
        products.allow_fp16_accumulation = before


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything that was launched on it; the CPU has always."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def count_host_waits(device: torch.device, work: Callable[[], object]) -> int | None:
    """Returns how often the host waited while `work` ran; None where the device's module has no watch.

    torch sees waits within its operators (`.item()`, `.cpu()`, a copy to pageable memory), and not those that
    a program asks for by name (`synchronize`).
    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
    """
    module = torch.get_device_module(device)
    watch = getattr(module, "set_sync_debug_mode", None)
    if watch is None:
        return None
    before = module.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        watch("warn")
        try:
            work()
        finally:
            watch(before)
    return sum("synchronizing" in str(each.message) for each in said)


def properties(device: torch.device) -> DeviceProperties:
    """Returns name and memory of an accelerator's device."""
    module = torch.get_device_module(device)
    ask = getattr(module, "get_device_properties", None)
    known: Any = ask(device) if ask is not None else None
    name = getattr(known, "name", None) or spoken(device.type)
    memory = getattr(known, "total_memory", None)
    if memory is None:
        memory = torch.accelerator.get_memory_info(device)[1]
    return DeviceProperties(str(name), int(memory))


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes that tensors of this process hold on an accelerator's device."""
    return torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Returns the most bytes that tensors of this process have held on an accelerator's device, since
    `reset_peak`.
    """
    return torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Begins to look for a new peak, from what is held now."""
    torch.accelerator.reset_peak_memory_stats(device)


def collective_backend(kind: str) -> str | None:
    """Returns torch's backend for tensors on devices of this type; None where this torch has none."""
    if not dist.is_available():
        return None
    try:
        backend = dist.get_default_backend_for_device(kind)
    except (RuntimeError, ValueError):  # torch does not know the type, or no backend for it
        return None
    return backend if dist.is_backend_available(backend) else None


def library_versions() -> dict[str, str]:
    """Returns the versions of accelerators' libraries and drivers, by name, as far as they are here."""
    found = {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
        "nccl": ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None,
    }
    drivers = {f"{name} driver": Path(f"/sys/module/{name}/version") for name in ("nvidia", "amdgpu")}
    found |= {name: path.read_text().strip() for name, path in drivers.items() if path.exists()}
    return {name: version for name, version in found.items() if version}


def insist_on_shared_devices(kind: str) -> None:
    """Raises BadOption where the collectives of a type of devices want a device for each rank.

    NCCL's older versions do; the version is that of the library which this process has loaded.
    """
    version = nccl.version() if dist.get_default_backend_for_device(kind) == "nccl" else _SHARING_NCCL
    if version < _SHARING_NCCL:
        raise BadOption(
            "several ranks on one device need a newer NCCL",
            numbers=f"loaded {'.'.join(map(str, version))}, needed {'.'.join(map(str, _SHARING_NCCL))}",
            next_step="pip install 'nvidia-nccl-cu13>=2.30', or leave out --ranks per_device",
        )


def moving_methods() -> frozenset[Callable[..., Tensor]]:
    """Returns the methods of tensors that are named after a type of devices and move there: `Tensor.cuda`."""
    names = (CPU, *KNOWN, built_type())
    return frozenset(getattr(Tensor, name) for name in names if name is not None and hasattr(Tensor, name))


# -- random numbers ------------------------------------------------------------------------------------------


def is_used(kind: str) -> bool:
    """Tells whether this process has begun to work with the accelerator, which creates its generators."""
    module = torch.get_device_module(kind)
    known = getattr(module, "is_initialized", None)
    return known is None or bool(known())


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seeds the generators of all devices of the accelerator, once it is in use, or that of one device."""
    kind = built_type()
    if kind is None or not is_used(kind):
        return
    if device is None:
        torch.get_device_module(kind).manual_seed_all(seed)
    elif device == current_device():
        torch.get_device_module(kind).manual_seed(seed)
    else:
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(kind).manual_seed(seed)


def forked_generators() -> AbstractContextManager[None]:
    """Returns a context that restores torch's generators: the CPU's, and all devices' in use."""
    kind = built_type()
    if kind is None or not is_used(kind):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=range(device_count()), device_type=kind)


def generator_state(device: torch.device) -> Tensor:
    """Returns the state of the generator of an accelerator's device: a tensor of bytes on the CPU."""
    return torch.get_device_module(device).get_rng_state(device).cpu()


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Sets the generator of an accelerator's device to a state that `generator_state` returned."""
    torch.get_device_module(device).set_rng_state(state.cpu(), device)
