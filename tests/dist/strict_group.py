"""A process group with NCCL's rules over gloo: what would hang on GPUs hangs here, and says where.

    no tags         the k-th send of a pair goes into the k-th receive, whatever their tags
    queues          a communicator executes its operations one after the other, in the order of the calls
    rendezvous      a send ends when its receive is at the head of its queue on the other rank, not before
    communicators   bound group (init_process_group(device_id=...)): one, made with the group, for everything;
                    unbound: one for collectives and one per pair of ranks, each made at its first call, in
                    which its ranks wait for each other
    batches         the operations of one batch_isend_irecv begin together (ncclGroupStart, ncclGroupEnd)
    host tensors    those that are not `on_device` are refused

NCCL orders operations on streams and this on a thread of each communicator; a `wait` blocks the caller, who
is compute stream and host in one. What NCCL leaves to chance (small sends may end before their receive) is
decided against the program. A rank that waits for longer than `limit_s` raises `StrictHang`, which names the
heads of all queues on all ranks.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`pointToPoint`, `getNCCLComm`). Oracle of the rules:
tests/dist/test_strict_group.py.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, cast, final

import torch
import torch.distributed as dist
from forked import in_forks
from patience import PATIENCE_S
from torch import Tensor
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from outsize.train.world.rendezvous import loopback_interface

# The device to which a bound group of these tests claims to belong; no tensor lives there.
BOUND: Final = torch.device("cuda", 0)
_POLL_S: Final = 0.02
_ANSWER_S: Final = 20.0  # for ranks that are late; one that has ended does not answer
_END_S: Final = 4.0
_PEER: Final = {dist.isend: "group_dst", dist.irecv: "group_src"}
_COLLECTIVES: Final = (
    "allreduce", "broadcast", "allgather", "gather", "scatter", "reduce", "reduce_scatter", "alltoall",
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single",
    "all_to_all_single", "alltoall_base", "allreduce_coalesced",
)  # fmt: skip


class StrictHang(RuntimeError):
    """Ranks wait for each other: the operations at the heads of their queues."""


class HostTensor(TypeError):
    """A tensor that is not the device's was given to a group of the device."""


def any_tensor(_: Tensor) -> bool:
    """Takes every tensor for one of the device."""
    return True


@dataclass(frozen=True)
class Strict:
    """The rules that tests choose.

    `bound`: as with device_id. `limit_s`: who waits longer hangs. `on_device` tells tensors of the device.
    `device`: the type of device whose backend it is.
    """

    bound: bool = False
    limit_s: float = PATIENCE_S
    on_device: Callable[[Tensor], bool] = any_tensor
    device: str = "cpu"


@final
@dataclass(eq=False)
class _Operation:
    """What a queue executes: `begin` starts it and returns what is to be waited for."""

    text: str
    begin: Callable[[], list[Any]]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def execute(self) -> None:
        try:
            for work in self.begin():
                work.wait()
        except BaseException as error:
            self.error = error
        self.done.set()


@final
class _Communicator:
    """A queue of operations, which a thread executes in their order."""

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        self._group, self._key = group, key
        self.waiting: list[_Operation] = []  # the first one is at the head
        self._queue = queue.SimpleQueue[_Operation]()
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def name(self) -> str:
        """The group, which gets its name after its first communicator, and which ranks."""
        return f"group {self._group.group_name[:6]} [{self._key}]"

    def add(self, operation: _Operation) -> None:
        self.waiting.append(operation)
        self._queue.put(operation)

    def _work(self) -> None:
        while True:
            operation = self._queue.get()
            operation.execute()
            self.waiting.pop(0)

    def heads(self) -> str:
        """The operation at the head and those behind it; empty for an empty queue."""
        texts = [operation.text for operation in list(self.waiting)]
        return f"{self.name}: {texts[0]}" + (f", behind it {'; '.join(texts[1:])}" if texts[1:] else "")


@final
class _Rank:
    """All queues of this process, and its part in reports: each rank says what it waits for when one asks."""

    def __init__(self, rules: Strict, store: Any, rank: int, size: int) -> None:
        self.rules, self._store, self._rank, self._size = rules, store, rank, size
        self.communicators: list[_Communicator] = []
        self.meeting = ""  # the communicator that the host is making now
        self.executed: list[str] = []  # the names of all communicators, an entry for each operation
        threading.Thread(target=self._answer, daemon=True).start()

    @property
    def asked(self) -> bool:
        """Whether a rank has asked what the others wait for."""
        return self._store.check(["asked"])

    def _answer(self) -> None:
        while True:
            try:
                if self.asked:
                    self._store.set(f"rank {self._rank}", json.dumps(self._heads()))
                    return
            except (RuntimeError, ConnectionError):  # the run has ended
                return
            time.sleep(0.2)

    def _heads(self) -> list[str]:
        met = [f"waits for the other ranks of {self.meeting}"] if self.meeting else []
        return met + [c.heads() for c in self.communicators if c.waiting]

    def hang(self) -> StrictHang:
        """The report; it asks the other ranks first."""
        self._store.set("asked", "")
        keys, until = [f"rank {rank}" for rank in range(self._size)], time.monotonic() + _ANSWER_S
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(_POLL_S)
        lines = [f"ranks wait for each other for {self.rules.limit_s:.0f} s"]
        for rank, key in enumerate(keys):
            answers = json.loads(self._store.get(key)) if self._store.check([key]) else ["does not answer"]
            lines += [f"rank {rank} | {answer}" for answer in answers or ["waits for nothing here"]]
        return StrictHang("\n".join(lines))


@final
class _StrictWork(dist.Work):
    """An operation for which one can wait; `wait` raises StrictHang when that takes too long."""

    def __init__(self, rank: _Rank, operation: _Operation) -> None:
        super().__init__()
        self._of, self._operation = rank, operation

    def is_completed(self) -> bool:
        return self._operation.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        until = time.monotonic() + self._of.rules.limit_s
        while not self._operation.done.wait(_POLL_S):
            if time.monotonic() > until:
                raise self._of.hang()
        if self._operation.error is not None:
            raise self._operation.error
        return True


@final
class StrictGroup(dist.ProcessGroup):
    """A group that executes its operations as NCCL's would, by gloo."""

    def __init__(self, of: _Rank, store: Any, rank: int, size: int, *, bound: bool) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._of, self._store, self._rank, self._size, self._bound = of, store, rank, size, bound
        self._name = ""
        self._communicators: dict[str, _Communicator] = {}
        self._batch: list[tuple[str, Callable[[], Any]]] | None = None
        self._works: list[_StrictWork] = []  # C++ holds their C++ part only
        limit = timedelta(seconds=1800)
        self._messages = dist.ProcessGroupGloo(PrefixStore("messages", store), rank, size, limit)
        self._inner: Any = dist.ProcessGroupGloo(PrefixStore("collectives", store), rank, size, limit)
        if bound:
            self._communicator("all", range(size))

    # -- what torch asks for -------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "strict"

    @property
    def _device_types(self) -> list[torch.device]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [torch.device("cpu")]

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def group_name(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._name

    def _set_group_name(self, name: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._name = name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        """Does nothing: threads end with the process."""

    # -- operations ----------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._message("send", tensors[0], dstRank)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._message("recv", tensors[0], srcRank)

    def barrier(self, opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._add("all", "barrier", lambda: [self._inner.barrier()])

    def collective(self, name: str, *arguments: Any) -> Any:
        """A collective of gloo by its name, in the queue of this group."""
        tensors = list(_tensors(arguments))
        self._insist_on_device(name, tensors)

        def begin() -> list[Any]:
            return [getattr(self._inner, name)(*arguments)]

        return self._add("all", f"{name} {_size(tensors)}", begin)

    def _message(self, name: str, tensor: Tensor, peer: int) -> Any:
        self._insist_on_device(name, [tensor])
        text = f"{name} {_size([tensor])} {'to' if name == 'send' else 'from'} {peer}"
        begin = partial(getattr(self._messages, name), [tensor], peer, 0)
        if self._batch is not None:
            self._batch.append((text, begin))
            return None
        pair = f"{min(self._rank, peer)}:{max(self._rank, peer)}"
        return self._add("all" if self._bound else pair, text, lambda: [begin()])

    @contextmanager
    def batch(self) -> Iterator[list[Any]]:
        """Gathers messages (ncclGroupStart); at its end they are one operation of the group, in the list."""
        works, self._batch = list[Any](), []
        yield works
        texts, begins = zip(*self._batch, strict=True)
        self._batch = None
        works.append(self._add("all", f"batch of {', '.join(texts)}", lambda: [begin() for begin in begins]))

    def _add(self, key: str, text: str, begin: Callable[[], list[Any]]) -> Any:
        members = range(self._size) if key == "all" else map(int, key.split(":"))
        communicator, operation = self._communicator(key, members), _Operation(text, begin)
        self._of.executed.append(communicator.name)
        communicator.add(operation)
        self._works = [work for work in self._works if not work.is_completed()]
        self._works.append(_StrictWork(self._of, operation))
        return self._works[-1]

    def _communicator(self, key: str, members: Any) -> _Communicator:
        """Returns a communicator; makes it where there is none, for which its ranks wait for each other."""
        if key not in self._communicators:
            self._meet(key, list(members))
            self._communicators[key] = _Communicator(self, key)
            self._of.communicators.append(self._communicators[key])
        return self._communicators[key]

    def _meet(self, key: str, members: list[int]) -> None:
        self._store.set(f"{key}/{self._rank}", "")
        keys, until = [f"{key}/{rank}" for rank in members], time.monotonic() + self._of.rules.limit_s
        self._of.meeting = f"[{key}]"
        while not self._store.check(keys):
            if time.monotonic() > until:
                raise self._of.hang()
            time.sleep(_POLL_S / 10)
        self._of.meeting = ""

    def _insist_on_device(self, name: str, tensors: list[Tensor]) -> None:
        refused = [t for t in tensors if not self._of.rules.on_device(t)]
        if refused:
            raise HostTensor(
                f"{name}: no backend for host tensors ({_size(refused)}) in a group of the device"
            )


def _collective(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self.collective(name, *arguments)


for _name in _COLLECTIVES:
    setattr(StrictGroup, _name, _collective(_name))


@final
class Joined:
    """The strict world of this process: its group, and what its communicators have executed."""

    current: ClassVar[_Rank | None] = None

    def __init__(self, group: dist.ProcessGroup, rank: _Rank) -> None:
        self.group, self._rank = group, rank

    @property
    def hangs(self) -> bool:
        """Whether a rank has asked who waits."""
        return self._rank.asked

    @property
    def executed(self) -> list[str]:
        """The name of a communicator for each operation so far."""
        return self._rank.executed


def join_strictly(rank: int, size: int, store: Any, rules: Strict = Strict()) -> Joined:
    """Makes the default process group of this process a strict one, for CPU tensors."""
    of = _Rank(rules, PrefixStore("strict", store.clone()), rank, size)

    def make(own: Any, number: int, count: int, _: timedelta) -> Any:
        is_world = not dist.is_initialized()
        world = dist.group.WORLD
        bound = rules.bound if is_world else world is not None and world.bound_device_id is not None
        return StrictGroup(of, own, number, count, bound=bound)

    dist.Backend.register_backend("strict", make, devices=[rules.device])
    dist.init_process_group("strict", rank=rank, world_size=size, store=store)
    group = dist.group.WORLD
    assert group is not None
    if rules.bound:
        group.bound_device_id = BOUND
    dist.batch_isend_irecv = _batched  # torch knows batches of its own class of groups alone
    return Joined(group, of)


def _batched(operations: list[dist.P2POp]) -> list[Any]:
    group = cast("StrictGroup", operations[0].group or dist.group.WORLD)
    with group.batch() as works:
        for one in operations:
            one.op(one.tensor, group=one.group, **{_PEER[one.op]: one.group_peer})
    return works


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _size(tensors: list[Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:2])


def strictly(folder: Path, size: int, work: Callable[[Joined], Any], rules: Strict = Strict()) -> list[Any]:
    """`work(joined)` on each rank, a fork: what it returned, or the error's text where it ended by a hang."""

    def rank(number: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
        store = FileStore(str(folder / "store"), size)
        joined = join_strictly(number, size, store, rules)
        try:
            found = work(joined)
        except Exception as error:
            if not joined.hangs:
                raise
            found = str(error)  # or what came of it where others had ended
        torch.save(found, folder / f"rank{number}.pt")
        store.add("ended", 1)
        until = time.monotonic() + _END_S
        while (
            store.add("ended", 0) < size and time.monotonic() < until
        ):  # others may ask for this one's heads
            time.sleep(_POLL_S)
        os._exit(0)  # threads hang

    in_forks(folder, size, rank)
    return [torch.load(folder / f"rank{number}.pt", weights_only=False) for number in range(size)]
