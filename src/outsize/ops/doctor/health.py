"""Finds what this machine offers outsize and what is missing, without loading more than torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Final

import psutil
import torch
import torch.distributed as dist

from outsize.capture.models.imports import unfit_torchvision
from outsize.device import futex
from outsize.device.accelerators import (
    CONNECTIONS,
    accelerator_type,
    all_devices,
    built_type,
    collective_backend,
    library_versions,
    properties,
    spoken,
)
from outsize.device.cores import usable_cores
from outsize.ir.answers.health import FoundDevice, Health
from outsize.ir.formatting import bytes_text
from outsize.run.transport.shared_memory import SharedMemory
from outsize.train.variants.variant import KEPT

_PACKAGES: Final = ("outsize", "torch", "transformers", "torchvision", "matplotlib", "highspy")
# Each package with the extra that installs it, and what it is for.
_EXTRAS: Final = {
    "transformers": ("hf", "models named transformers:..."),
    "torchvision": ("vision", "models named torchvision:..."),
    "matplotlib": ("plot", "plots in reports"),
    "highspy": ("ilp", "branches placed by integer programming"),
}
_PAGE: Final = 4096


def doctor(environment: Mapping[str, str] = MappingProxyType({})) -> Health:
    """Returns what this machine offers, as this process sees it; `environment` may slow devices down."""
    versions = {**{name: _version(name) for name in _PACKAGES}, **library_versions()}
    cores = len(usable_cores())
    backends = {"gloo": dist.is_available() and dist.is_gloo_available(), **_collectives()}
    shared = _shares_memory()
    return Health(
        versions=versions,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=cores,
        threads=torch.get_num_threads(),
        devices=tuple(_devices()),
        backends=backends,
        shared_memory=shared,
        captures=KEPT,
        missing=(*_missing(versions, backends, shared, cores), *_slowed(environment)),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _collectives() -> dict[str, bool]:
    """Tells by its name whether the accelerator's own backend can be used; none where there is none."""
    kind = accelerator_type()
    if kind is None:
        return {}
    name = collective_backend(kind)
    return {name or f"collectives of {kind}": name is not None}


def _devices() -> Iterator[FoundDevice]:
    memory = psutil.virtual_memory().total
    yield FoundDevice(name="cpu", kind=platform.machine(), memory_bytes=memory)
    for device in all_devices():
        known = properties(device)
        yield FoundDevice(name=str(device), kind=known.name, memory_bytes=known.memory_bytes)


def _shares_memory() -> bool:
    """Tells whether processes of this machine can open each other's memory, tried with one page."""
    if not futex.AVAILABLE:
        return False
    try:
        made = SharedMemory.make(_PAGE)
        SharedMemory.open(os.getpid(), made.file)
        os.close(made.file)
    except OSError:
        return False
    return True


def _slowed(environment: Mapping[str, str]) -> Iterator[str]:
    if environment.get(CONNECTIONS) == "1":
        yield f"overlap: with {CONNECTIONS}=1 kernels wait for messages; unset {CONNECTIONS}"


def _missing(
    versions: Mapping[str, str | None], backends: Mapping[str, bool], shared: bool, cores: int
) -> Iterator[str]:
    for name, (extra, use) in _EXTRAS.items():
        if versions[name] is None:
            yield f"{name}, for {use}: pip install 'outsize[{extra}]'"
    unfit = unfit_torchvision()
    if unfit is not None:
        yield f"torchvision's operators: {unfit}; install torch and torchvision together, from one index"
    kind, built = accelerator_type(), built_type()
    if kind is None:
        why = f"the driver shows no {spoken(built)} device" if built else "this torch is built for CPUs"
        yield f"accelerators ({why}): stages run on the CPU"
    elif collective_backend(kind) is None:
        yield f"collectives for {spoken(kind)}: devices=[...] in one process works without them"
    if not backends["gloo"]:
        yield "gloo, for several processes: stages run in one process"
    if not shared:
        yield "memory between processes: values between stages of one machine go over gloo"
    free = psutil.virtual_memory().available
    if free < psutil.virtual_memory().total // 10:
        yield f"memory: {bytes_text(free)} are free, less than a tenth of all"
    if torch.get_num_threads() > cores:
        yield f"cores: {torch.get_num_threads()} threads share {cores} cores; set OMP_NUM_THREADS={cores}"
