"""One pinned rank of two: a step of outsize and one of the peer, as torch.profiler saw them.

    timeline_worker.py AXIS MODEL POINT OUT

POINT is the number of samples of the batch, or for pipelines and one process the number of microbatches. Each
rank writes OUT.RANK.json: for each system the spans of the step of median length, in microseconds from its
begin.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from models import CASES
from torch.profiler import ProfilerActivity, profile, record_function
from worker import SAMPLES_OF_MICROBATCH, Step, alone, ours, peer, pipelines

from outsize.run.transport.shared_memory_group import SharedMemoryGroup
from outsize.train.world.join import join
from outsize.train.world.world import leave

WARM: Final = 5
ROUNDS: Final = 5
COLLECTIVES: Final = "collective: "
"""Ranges around what outsize's ranks do in the memory that they share, which no thread does beside them."""
WHOLE: Final = "the whole step"
COMMUNICATES: Final = (COLLECTIVES, "FSDP::", "fsdp::", "c10d::", "_c10d_functional::")
GAP_US: Final = 20  # What is shorter between two operators is Python and dispatch.


def name_collectives() -> None:
    """Makes ranges of the profiler of the collectives in shared memory."""
    for name in [each for each in vars(SharedMemoryGroup) if each.startswith(("begin_", "end", "terms"))]:
        setattr(SharedMemoryGroup, name, ranged(name, getattr(SharedMemoryGroup, name)))


def ranged(name: str, called: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function within a range."""

    @wraps(called)
    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(COLLECTIVES + name):
            return called(*args, **kwargs)

    return within


@contextmanager
def events_of(into: list[dict[str, Any]]) -> Iterator[None]:
    """Puts what the profiler saw into a list, as the trace format has it."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        yield
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        found = json.loads(path.read_text())["traceEvents"]
    into += [each for each in found if each.get("ph") == "X" and each["cat"] in ("cpu_op", "user_annotation")]


def spans(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the spans of a step: what the thread of the step does, and what others have under way."""
    whole = next(each for each in events if each["name"] == WHOLE)
    thread, start = whole["tid"], whole["ts"]
    own = sorted(
        (each for each in events if each["tid"] == thread and each is not whole and is_within(each, whole)),
        key=lambda each: (each["ts"], -each["dur"]),
    )
    sent = [each for each in events if each["name"].startswith("gloo:") and is_within(each, whole)]
    return {
        "step_us": whole["dur"],
        "thread": merged([(kind, begin - start, length) for kind, begin, length in kinds(own)]),
        "under_way": merged([("gloo", each["ts"] - start, each["dur"]) for each in sent]),
    }


def is_within(each: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Tells whether an event began in the step."""
    return whole["ts"] <= each["ts"] < whole["ts"] + whole["dur"]


def kinds(events: list[dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Each operator that lies in no other one, with what it belongs to: its kind, begin and length.

    Collectives are cut out of the operators in which they lie.
    """
    ends: dict[str, float] = dict.fromkeys(("optimizer", "backward"), 0.0)
    sent = list(collectives(events))
    yield from (("communicates", begin, end - begin) for begin, end in sent)
    done = 0.0
    for each in events:
        name, begin, end = each["name"], each["ts"], each["ts"] + each["dur"]
        if name.startswith("Optimizer.step"):
            ends["optimizer"] = max(ends["optimizer"], end)
        elif name.startswith("autograd::engine::evaluate_function"):
            ends["backward"] = max(ends["backward"], end)
        elif each["cat"] == "cpu_op" and begin >= done and not name.startswith(("autograd::", "gloo:")):
            done = end
            kind = next((kind for kind, until in ends.items() if begin < until), "forward")
            for first, last in sent:
                if begin < first < end:
                    yield kind, begin, first - begin
                if first < end and last > begin:
                    begin = last
            if begin < end:
                yield kind, begin, end - begin


def collectives(events: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Begin and end of what the thread does for collectives, one after the other."""
    done = 0.0
    for each in events:
        if each["name"].startswith(COMMUNICATES) and each["ts"] >= done:
            done = each["ts"] + each["dur"]
            yield each["ts"], done


def merged(found: list[tuple[str, float, float]]) -> list[list[Any]]:
    """Spans of one kind that follow each other closely as one, with their begin and length."""
    result: list[list[Any]] = []
    for kind, start, length in sorted(found, key=lambda each: each[1]):
        if result and result[-1][0] == kind and start - sum(result[-1][1:]) < GAP_US:
            result[-1][2] = round(max(result[-1][2], start + length - result[-1][1]), 1)
        else:
            result.append([kind, round(start, 1), round(length, 1)])
    return result


def steps_of(axis: str, name: str, point: int, rank: int) -> dict[str, Step]:
    """The systems, as the table compares them."""
    case = CASES[name]
    by_count = {"pipeline": pipelines, "one process": alone}
    if axis in by_count:
        steps = by_count[axis](case, case.batch(SAMPLES_OF_MICROBATCH * point), point, rank)
        return {system: step for system, step in steps.items() if system != "computing"}
    batch = case.batch(point)
    return {"outsize": ours(axis, case, batch), "peer": peer(axis, case, batch, rank)}


def main() -> None:
    axis, name, point, out = sys.argv[1:5]
    world = join()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
    torch.set_num_threads(1)
    name_collectives()
    steps = steps_of(axis, name, int(point), world.rank)
    seen: dict[str, list[dict[str, Any]]] = {system: [] for system in steps}
    for turn in range(WARM + ROUNDS):
        for system, step in steps.items():
            events: list[dict[str, Any]] = []
            with events_of(events):
                dist.barrier()
                with record_function(WHOLE):
                    step()
                dist.barrier()
            if turn >= WARM:
                seen[system].append(spans(events))
    # The step of median length on rank 0, and the same one on the others.
    chosen = [{system: middle(rounds) for system, rounds in seen.items()}]
    dist.broadcast_object_list(chosen)
    found = {system: rounds[chosen[0][system]] for system, rounds in seen.items()}
    Path(f"{out}.{world.rank}.json").write_text(json.dumps(found))
    leave(world)


def middle(rounds: list[dict[str, Any]]) -> int:
    """Returns which one has the median length."""
    return sorted(range(len(rounds)), key=lambda at: rounds[at]["step_us"])[len(rounds) // 2]


if __name__ == "__main__":
    main()
