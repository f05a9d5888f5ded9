"""Takes the steps of a run and records what its report shows of them.

A watched run measures two things that a step itself does not need: the norm of the gradients, and the memory
of the devices. A step whose optimizer works while gradients arrive (weights on the host) is left as it is, so
the norm stays unknown unless the run clips by it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, product
from typing import Any, Final, final

import torch
from pydantic import TypeAdapter
from torch import Tensor

from outsize.ir.answers.runs.recorded_run import MeasuredMemory, RecordedRun, RunStep, TimedStep
from outsize.ir.timeline import Timeline
from outsize.run.stage.to_device import device_of_model
from outsize.run.transport.control_messages import all_gather_json
from outsize.train.crew.optimizer_groups import learning_rate
from outsize.train.engine.engine import Engine
from outsize.train.measure.memory import MemoryWatch, tensor_bytes, with_memory

# The timelines of this many last steps are kept; the median one is reported.
WATCHED: Final = 5
_Readings = Sequence[Sequence[tuple[float, int]]]  # of each device of one process
_MEMORY: Final = TypeAdapter(list[MeasuredMemory])


@final
class RunRecorder:
    """Records the steps of one engine; all ranks do the same, and gather their figures in the end."""

    def __init__(self, engine: Engine, *, watched: bool) -> None:
        self._engine, self._watched = engine, watched
        self._splits = watched and not engine.plan.weight_policy.on_host and engine.clip_norm is None
        self._stages = _stages_by_place(engine)
        self._watches = {place: MemoryWatch(place) for place in self._stages} if watched else {}
        self._steps = list[RunStep]()
        self._timelines = deque[tuple[float, TimedStep]](maxlen=WATCHED)
        self._gradients: dict[torch.device, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Reads the memory of this process's devices while the block runs."""
        with ExitStack() as stack:
            for watch in self._watches.values():
                stack.enter_context(watch)
            self._settle()
            yield

    def _settle(self) -> None:
        """Counts weights and optimizer states, and what comes on top of them from now on."""
        for place, watch in self._watches.items():
            watch.settle(self._weights(place) + self._states(place))

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> RunStep:
        """Takes one step and returns what is recorded of it."""
        if len(self._steps) == 1:  # The first step has made states and buffers.
            self._settle()
        engine, start_s = self._engine, time.perf_counter()
        rate = learning_rate(engine.optimizer)
        result = engine.step(*args, target=target, update=not self._splits, **kwargs)
        norm = self._norm_and_update() if self._splits else result.grad_norm
        loss = float(result.loss)
        seconds = time.perf_counter() - start_s
        row = RunStep(
            step=engine.steps,
            loss=_finite(loss),
            step_s=seconds,
            learning_rate=rate,
            grad_norm=None if norm is None else _finite(float(norm)),
            expert_imbalance=result.expert_imbalance,
        )
        self._steps.append(row)
        origin_s = min((s[3] for s in engine.crew.own_spans()), default=start_s)
        self._timelines.append((origin_s, TimedStep(step=engine.steps, timeline=engine.timeline())))
        return row

    def _norm_and_update(self) -> Tensor:
        """Steps the optimizer; returns the norm of the gradients before."""
        norm = self._engine.clip_grad_norm(math.inf)
        for place in self._stages:
            gradients = tensor_bytes((p.grad for _, p in self._engine.weights.named_parameters()), place)
            self._gradients[place] = max(gradients, self._gradients.get(place, 0))
        self._engine.update()
        return norm

    def typical(self) -> tuple[Timeline, RecordedRun]:
        """Returns the median one of the last timelines, and all that was recorded; every rank calls this."""
        own = (
            [watch.own_readings for watch in self._watches.values()],
            _MEMORY.dump_python(self._memory(), mode="json"),
            [step.expert_imbalance for step in self._steps],
        )
        mesh = self._engine.crew.mesh
        every = [own] if mesh is None else all_gather_json(own, mesh.group.host, "memory of a run")
        readings: list[_Readings] = [one for one, *_ in every]
        timed = [
            step.model_copy(update={"timeline": self._sampled(step.timeline, origin_s, readings)})
            for origin_s, step in self._timelines
        ]
        middle = sorted(timed, key=lambda t: t.timeline.duration_s)[len(timed) // 2]
        memory = tuple(chain.from_iterable(_MEMORY.validate_python(rows) for _, rows, _ in every))
        history = RecordedRun(
            steps=self._balanced([rows for *_, rows in every]), timelines=tuple(timed), memory=memory
        )
        return middle.timeline, history

    def _balanced(self, imbalances: Sequence[Sequence[float | None]]) -> tuple[RunStep, ...]:
        """Returns the steps with the largest imbalance of any rank's experts."""
        most = [
            max((one for one in row if one is not None), default=None)
            for row in zip(*imbalances, strict=True)
        ]
        pairs = zip(self._steps, most, strict=True)
        return tuple(step.model_copy(update={"expert_imbalance": value}) for step, value in pairs)

    def _sampled(self, timeline: Timeline, origin_s: float, readings: Sequence[_Readings]) -> Timeline:
        """Returns the timeline with a counter for each process, or for each device of the only one."""
        if len(readings) > 1:
            rows = [devices[0] if devices else () for devices in readings]
        else:
            rows = list(readings[0])
        return with_memory(timeline, origin_s, rows)

    def _memory(self) -> list[MeasuredMemory]:
        return [
            self._memory_of(place, self._stages[place], watch.peak_bytes)
            for place, watch in self._watches.items()
        ]

    def _memory_of(self, place: torch.device, stages: tuple[int, ...], peak_bytes: int) -> MeasuredMemory:
        weights, gradients, states = self._weights(place), self._gradients.get(place), self._states(place)
        # A CPU's memory is read now and then: these are there together when the weights are updated.
        return MeasuredMemory(
            device=str(place),
            stages=stages,
            peak_bytes=max(peak_bytes, weights + (gradients or 0) + states),
            weights_bytes=weights,
            gradients_bytes=gradients,
            optimizer_bytes=states,
        )

    def _states(self, place: torch.device) -> int:
        optimizer = self._engine.optimizer
        held = () if optimizer is None else optimizer.state.values()
        # Some optimizers keep numbers of all weights there, under a name.
        states = (state.values() for state in held if isinstance(state, dict))
        return tensor_bytes(chain.from_iterable(states), place)

    def _weights(self, place: torch.device) -> int:
        own = self._engine.weights.module
        return tensor_bytes(chain(own.parameters(), own.buffers()), place)


def _stages_by_place(engine: Engine) -> dict[torch.device, tuple[int, ...]]:
    """Returns the stages that each device of this process computes."""
    crew, found = engine.crew, dict[torch.device, set[int]]()
    default = device_of_model(engine.model)
    for stage, replica in product(crew.stages, range(crew.local_replicas)):
        found.setdefault(crew.device_of(stage, replica) or default, set()).add(stage)
    return {place: tuple(sorted(stages)) for place, stages in found.items()}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
