"""Records grad, inference and autocast state, and restores it around runs of instructions at replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from outsize.device.accelerators import CPU, built_type
from outsize.program.tape import Modes


def _devices() -> tuple[str, ...]:
    """Returns the types of devices that autocast may be on for."""
    built = built_type()
    return (CPU,) if built is None else (CPU, built)


def current_modes() -> Modes:
    """Returns the state that the caller runs under."""
    autocast = tuple((d, torch.get_autocast_dtype(d)) for d in _devices() if torch.is_autocast_enabled(d))
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


def entering(modes: Modes, ambient: Modes) -> list[str]:
    """Returns Python context expressions that lead from the ambient state to `modes`."""
    contexts: list[str] = []
    if modes.inference != ambient.inference:
        contexts.append(f"torch.inference_mode({modes.inference})")
    if modes.grad != ambient.grad:
        contexts.append(f"torch.set_grad_enabled({modes.grad})")
    on, base = dict(modes.autocast), dict(ambient.autocast)
    for device in _devices():
        if on.get(device) == base.get(device):
            continue
        dtype = on.get(device)
        how = "enabled=False" if dtype is None else f"dtype={dtype}"
        contexts.append(f"torch.autocast({device!r}, {how})")
    return contexts


def under(modes: Modes, *, caches: bool = False) -> list[torch.autocast]:
    """Returns contexts that set autocast as it is in `modes`, whatever is around; `caches` switches its cache
    of weights on.
    """
    on = dict(modes.autocast)
    return [
        torch.autocast(device, dtype=on.get(device), enabled=device in on, cache_enabled=caches)
        for device in _devices()
    ]


def casting_devices() -> list[str]:
    """Returns the device types on which autocast is on."""
    return [device for device in _devices() if torch.is_autocast_enabled(device)]


def forget_casts() -> None:
    """Clears the autocast cache if autocast is on, as `with torch.autocast` does around each plain
    forward.
    """
    if casting_devices():
        torch.clear_autocast_cache()


@contextmanager
def outside_autocast(*, forgets: bool = True) -> Iterator[None]:
    """Turns autocast off within the context; if it `forgets`, it clears autocast's cache afterwards.

    A plain loop does the same behind its `with torch.autocast`: a backward does not cast by itself, and
    weights are cast again next time, since an optimizer may have changed them.
    """
    enabled = casting_devices()
    with ExitStack() as stack:
        for device in enabled:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
    if enabled and forgets:
        torch.clear_autocast_cache()
