"""Records what is launched on a device and launches it again as one: CUDA graphs, and those of other types.

    recorder = GraphRecorder(device)
    memory = recorder.memory()
    with recorder.recording(memory, states) as graph:     nothing runs; addresses and sizes are recorded
        y = f(x)
    x.copy_(new); graph.replay()                          one launch; y has the new values

While a stream records, the host may wait for nothing, no generator may be seeded, and what is allocated comes
from the graph's own memory, which stays with it. torch calls the class of a type of devices by its name
(`CUDAGraph`, `XPUGraph`); a type without one has no graphs.

A draw of random numbers in a graph reads its seed from the device, where a replay puts the one that its
generator has then. There is one for each state of a generator that the graph knows, and the device's
generator may be pointed at another state in between: so each random instruction has a state of its own
(`DrawStates`). Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs and
https://docs.pytorch.org/docs/stable/generated/torch.Generator.html (graphsafe_set_state).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch

from outsize.device.accelerators import is_accelerator, lacks, synchronize

_MODE: Final = "thread_local"  # Other threads may go on, such as the watchdog of a process group.
Memory = tuple[int, int]


class DeviceGraph(Protocol):
    """Launches again what was recorded."""

    def replay(self) -> None:
        """Launches all of it on the current stream."""
        ...


def has_graphs(device: torch.device) -> bool:
    """Returns whether launches on the device can be recorded."""
    return is_accelerator(device) and not lacks(device, "streams") and _graph_class(device) is not None


def _graph_class(device: torch.device) -> Callable[[], Any] | None:
    return getattr(torch.get_device_module(device), f"{device.type.upper()}Graph", None)


def _generator(device: torch.device) -> torch.Generator:
    return torch.get_device_module(device).default_generators[device.index or 0]


@final
class DrawStates:
    """Holds a state of the device's generator for each of some random instructions."""

    def __init__(self, device: torch.device, instructions: Iterable[int]) -> None:
        self._generator = _generator(device)
        self._states = {number: self._generator.clone_state() for number in instructions}

    @property
    def states(self) -> list[torch.Generator]:
        """Returns the states, which a graph has to know before it records."""
        return list(self._states.values())

    def draw_from(self, instruction: int) -> None:
        """Lets the device's generator draw from the state of an instruction."""
        self._generator.graphsafe_set_state(self._states[instruction])

    def seed(self, number_of: Callable[[int], int]) -> None:
        """Seeds each state by the number of its instruction; a replay draws from there."""
        for instruction, state in self._states.items():
            state.manual_seed(number_of(instruction))


@final
@dataclass(slots=True)
class GraphRecorder:
    """Records graphs on one device, on a stream of its own; `held_bytes` is the memory of all of them."""

    device: torch.device
    held_bytes: int = 0
    _stream: torch.Stream | None = None

    def memory(self) -> Memory:
        """Returns new memory for graphs that are replayed one after the other, in the order of recording."""
        return torch.get_device_module(self.device).graph_pool_handle()

    @contextmanager
    def recording(self, memory: Memory, states: Iterable[torch.Generator] = ()) -> Iterator[DeviceGraph]:
        """Records what is launched within the context, which must not run anything that waits.

        Raises what the device raises where something cannot be recorded; the device can go on then.
        """
        made = _graph_class(self.device)
        assert made is not None
        stream = self._stream = self._stream or self._warm_stream()
        graph = made()
        for state in states:
            graph.register_generator_state(state)
        generator, collects = _generator(self.device), gc.isenabled()
        before, held = generator.graphsafe_get_state(), self._reserved_bytes()
        # What a collection ends may be another graph.
        gc.disable()
        # Not simulated: as in torch's own context of a graph, a recording begins on an idle device.
        synchronize(self.device)
        try:
            # The device's own state is not usable again where a recording fails.
            generator.graphsafe_set_state(generator.clone_state())
            with stream:
                graph.capture_begin(pool=memory, capture_error_mode=_MODE)
                try:
                    yield graph
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph, memory)
                    raise
        finally:
            generator.graphsafe_set_state(before)
            self.held_bytes += self._reserved_bytes() - held
            if collects:
                gc.enable()

    def _abandon(self, graph: Any, memory: Memory) -> None:
        """Ends a recording that has failed, so that the allocator serves others again."""
        with suppress(Exception):
            graph.capture_end()
        end = getattr(torch._C, f"_{self.device.type}_endAllocateToPool", None)
        if end is not None:
            with suppress(Exception):
                end(self.device.index or 0, memory)

    def _reserved_bytes(self) -> int:
        return torch.accelerator.memory_reserved(self.device)

    def _warm_stream(self) -> torch.Stream:
        """Makes the stream, with the workspaces that libraries have for each stream and thread: they would
        be in the memory of the first graph.
        """
        stream = torch.Stream(self.device)
        with stream, torch.enable_grad():
            weight = torch.ones(16, 16, device=self.device, requires_grad=True)
            bias = torch.ones(16, device=self.device)
            torch.autograd.grad(torch.nn.functional.linear(weight, weight, bias).sum(), weight)
        # Not simulated: libraries load kernels, which a recording forbids.
        synchronize(self.device)
        return stream
