"""Several processes on the devices of this machine, for tests: forks of a server.

    ranks = DeviceRanks("sim")          starts the server: an interpreter with torch, outsize and the device
    ranks.run("sent", 2, kept=True)     calls rank_scenarios.sent(world, kept=True) on two ranks, each with
                                        its device, and returns what each rank returned

Ranks are forks because a new interpreter spends five seconds of CPU on its imports. They are forks of a
server because torch's autograd engine counts the devices of a process at its first backward and cannot be
forked after it, and other tests of this process have had theirs. `python device_ranks.py TYPE MODULE` is
the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final, final

from patience import free_port

TESTS: Final = Path(__file__).parents[1]
_FOLDERS: Final = ("unit", "parity", "simdev", "device", "device/mutations", "dist")
_IMPORTED: Final = [str(TESTS / name) for name in _FOLDERS]


class RanksFailed(AssertionError):
    """A rank has raised, or has ended in another way; the text has the tracebacks."""


@final
class DeviceRanks:
    """The server for one type of devices, whose ranks run the functions of one module."""

    def __init__(self, device_type: str, module: str = "rank_scenarios") -> None:
        paths = [str(TESTS.parent / "src"), *_IMPORTED]
        self._server = subprocess.Popen(
            [sys.executable, __file__, device_type, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        scenario: str,
        count: int,
        *,
        order: str = "lazy",
        limit_s: int = 800,
        per_device: int = 1,
        **given: Any,
    ) -> list[Any]:
        """Returns what the scenario returned on each of `count` ranks. Raises RanksFailed.

        `order` says how streams of the simulated device run; `per_device` ranks have one device between them.
        """
        import torch

        with TemporaryDirectory() as folder:
            request = {"scenario": scenario, "count": count, "order": order, "given": given}
            request |= {"per_device": per_device}
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(json.dumps({**request, "folder": folder, "limit_s": limit_s}) + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
            if not answer or (error := json.loads(answer)) is not None:
                raise RanksFailed(error if answer else "the server has ended")
            return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(count)]

    def end(self) -> None:
        """Ends the server."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


def _serve(device_type: str, module: str, answers: IO[str]) -> None:
    from forked import in_forks

    if device_type == "sim":
        import simdev

        simdev.load()
    import_module(module)
    for line in sys.stdin:
        request, error = json.loads(line), None
        request |= {"device_type": device_type, "module": module, "port": free_port()}
        try:
            folder = Path(request["folder"])
            in_forks(folder, request["count"], lambda rank, of=request: _rank(rank, of), request["limit_s"])
        except AssertionError as failed:
            error = str(failed) or "a rank has ended early"
        answers.write(json.dumps(error) + "\n")
        answers.flush()


def _rank(rank: int, request: dict[str, Any]) -> None:
    import torch

    from outsize.ops.launch.spec import SHARED_DEVICE
    from outsize.train.world.join import join, take_place
    from outsize.train.world.variables import PER_DEVICE
    from outsize.train.world.world import World, leave

    if request["device_type"] == "sim":
        choose_order(request["order"])
    world = World(0, 1, 0, None, device_type=request["device_type"])
    if request["per_device"] > 1:
        os.environ |= {**SHARED_DEVICE, PER_DEVICE: str(request["per_device"])}
    if request["count"] > 1:
        take_place(rank, request["count"], Path(request["folder"]) / f"store{request['port']}")
        world = join(request["device_type"], timeout_s=request["limit_s"])
    found = getattr(import_module(request["module"]), request["scenario"])(world, **request["given"])
    torch.save(found, Path(request["folder"]) / f"rank{rank}.pt")
    leave(world)


def choose_order(order: str) -> None:
    """Sets the order of streams by its name: `lazy`, `eager`, or `seed7`."""
    import simdev

    simdev.mode(seed=int(order[4:])) if order.startswith("seed") else simdev.mode(order)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    _serve(sys.argv[1], sys.argv[2], answers)
