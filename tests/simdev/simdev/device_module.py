"""`torch.sim`: what torch looks for under the name of a device type, with the names of `torch.cuda`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _index(device: Any = None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _default_generators() -> list[torch.Generator]:
    return [torch.ops.simdev.default_generator(i) for i in range(device_count())]


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Does nothing: the devices are there when the library is loaded."""


def device_count() -> int:
    return torch.ops.simdev.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


class device(AbstractContextManager[None]):
    """Makes a device the current one within a `with` statement."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = torch.accelerator.current_device_index()
        if self.idx >= 0:
            torch.accelerator.set_device_index(self.idx)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.prev_idx)


def get_device_name(device: Any = None) -> str:
    return "Simulated device"


def get_device_properties(device: Any = None) -> Any:
    return SimpleNamespace(name=get_device_name(), total_memory=torch.ops.simdev.capacity(_index(device)))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """Returns the stream, which is a context manager that makes itself the current one."""
    return stream


class Stream(torch.Stream):
    """A stream of a simulated device."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Any:
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


class Event(torch.Event):
    """An event of a simulated device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Any:
        return super().__new__(cls, device="sim", enable_timing=enable_timing, blocking=blocking)


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def manual_seed(seed: int) -> None:
    _default_generators()[_index()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in _default_generators():
        generator.manual_seed(seed)


def seed_all() -> None:
    manual_seed_all(torch.initial_seed())


def initial_seed() -> int:
    return _default_generators()[_index()].initial_seed()


def get_rng_state(device: Any = "sim") -> Tensor:
    return _default_generators()[_index(device)].get_state()


def set_rng_state(state: Tensor, device: Any = "sim") -> None:
    _default_generators()[_index(device)].set_state(state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(states: Iterable[Tensor]) -> None:
    for i, state in enumerate(states):
        set_rng_state(state, i)


class SIMGraph:
    """A graph of what is launched on a stream, with the methods of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._number, self._pool = torch.ops.simdev.graph_new(), (0, 0)

    def __del__(self) -> None:
        torch.ops.simdev.graph_drop(self._number)

    def register_generator_state(self, generator: torch.Generator) -> None:
        torch.ops.simdev.graph_register(self._number, generator)

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        self._pool = pool or graph_pool_handle()
        torch.ops.simdev.graph_begin(self._number, self._pool[1])

    def capture_end(self) -> None:
        torch.ops.simdev.graph_end(self._number)

    def replay(self) -> None:
        torch.ops.simdev.graph_replay(self._number)

    def pool(self) -> tuple[int, int]:
        return self._pool


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_pools)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


_pools = count(1)
_watch: dict[str, Any] = {"mode": "default", "before": {}}


def get_sync_debug_mode() -> str:
    """Returns whether waits of the host are told."""
    return _watch["mode"]


def set_sync_debug_mode(debug_mode: str) -> None:
    """Tells of waits within operators as torch.cuda does: with "warn" each is a warning, here at the end of
    the watch; waits that a program asks for by name are not told.
    """
    now = _waits()
    if _watch["mode"] == "warn":
        for name, count in now.items():
            for _ in range(count - _watch["before"].get(name, 0)):
                warnings.warn(f"called a synchronizing operation: {name}", stacklevel=2)
    _watch.update(mode=debug_mode, before=now)


def _waits() -> dict[str, int]:
    lines = (line.rpartition(" ") for line in torch.ops.simdev.waits_by_name())
    return {name: int(count) for name, _, count in lines if "synchronize" not in name}


def make() -> ModuleType:
    """Returns a module of these functions for `torch._register_device_module`."""
    module = ModuleType("torch.sim")
    public = {name: value for name, value in globals().items() if name not in {"make", "annotations"}}
    vars(module).update({name: value for name, value in public.items() if not name.startswith("__")})
    vars(module)["default_generators"] = tuple(_default_generators())
    return module
