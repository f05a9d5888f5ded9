"""Finds the rank that failed first, and its message.

A worker that ends with an exception writes a record in torch elastic's error-file format
(`torch.distributed.elastic.multiprocessing.errors`), so torchrun can read it too; `extraInfo` carries more:

    {"message": {"message": "ValueError: boom",
                 "extraInfo": {"py_callstack": ..., "timestamp": "1730000000",        torch's, in seconds
                               "time_ns": 1730000000123456789, "shown": ..., "exit_code": 1, "ours": false,
                               "fields": {}}}}       of an error of outsize what raises it again elsewhere

One failure brings the others down: when rank 1 dies, rank 0 sees "connection closed by peer". So the ranks
are ordered by (is the text one of a lost connection, time), and the least of them is the root cause. Where
all have lost a connection, a rank that has ended well or is stopped is the cause: it has left the others. A
process that left no record (a signal, `os._exit`) counts with the time at which it was found dead.
Oracle: tests/unit/ops/launch/test_launch.py for the order; tests/dist/test_launch_processes.py, real
processes.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, final

from outsize.errors import OutsizeError
from outsize.files.replace import replace_text
from outsize.program.source_line import is_outsize_file, users_frame

_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|gloo/transport"
    r"|Dist(Network|Backend|Store)Error|remote process exited|rank \d+ (has gone|sent nothing)"
)
_TIMED_OUT = re.compile(r"[Tt]imed out|Timeout")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|MemoryError|(can't|Cannot) allocate memory")
_RUNPY = ("runpy", "<frozen runpy>")


@final
@dataclass(frozen=True)
class Failure:
    """How one rank ended: `exit_code` is negative for a signal; `shown` is the text that the user reads.

    `absence` says how a rank left the others without an error of its own; the rest is of one that it left.
    """

    rank: int
    pid: int
    exit_code: int
    time_ns: int
    message: str = ""
    shown: str = ""
    call_stack: str = ""
    ours: bool = False
    absence: str = ""
    fields: Mapping[str, str | bool] = field(default_factory=dict[str, str | bool])

    def to_json(self) -> str:
        """Returns the failure as text for the agents of other machines."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the failure that another agent has written."""
        return cls(**json.loads(text))

    @classmethod
    def lost(cls, message: str) -> Self:
        """Returns the failure of rank 0 when its machine no longer answers."""
        return cls(0, 0, 1, time.time_ns(), message=message, call_stack=message)

    def blamed_on(self, rank: int, pid: int, absence: str) -> Self:
        """Returns this failure as that of the rank whose absence has caused it."""
        return replace(self, rank=rank, pid=pid, absence=absence)

    @property
    def is_consequence(self) -> bool:
        """Tells whether the text is one of a peer whose connection was lost."""
        return _is_lost_connection(self.call_stack)

    def told(self, world_size: int) -> str:
        """Returns what happened in words; who only lost its connection is not called the first to fail."""
        who = f"rank {self.rank} of {world_size}"
        if self.absence or not self.is_consequence:
            return f"{who} {self.absence or 'failed first'}"
        how = "waited in vain for" if _TIMED_OUT.search(self.call_stack) else "lost its connection to"
        return f"{who} {how} another rank, and no rank has said why"

    @property
    def is_out_of_memory(self) -> bool:
        """Tells whether an allocator has refused."""
        return bool(_OUT_OF_MEMORY.search(self.message))

    @property
    def ending(self) -> str:
        """Returns `exit code 1, ValueError: boom` or `killed by SIGKILL`."""
        if self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        first_line = textwrap.shorten(self.message.split("\n", 1)[0], 120, placeholder=" ...")
        return f"exit code {self.exit_code}" + (f", {first_line}" if first_line else "")


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Returns the root cause among at least one failure."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time_ns, failure.rank))


def write_failure(path: Path, error: BaseException, exit_code: int) -> None:
    """Writes the record of `error`, all at once, because the launcher reads while workers write."""
    ours = isinstance(error, OutsizeError)
    call_stack = "".join(traceback.format_exception(type(error), error, _user_frames(error.__traceback__)))
    extra = {
        "py_callstack": call_stack,
        # torchrun compares whole seconds; a consequence gets one more, so that it is not named as the cause.
        "timestamp": str(int(time.time()) + _is_lost_connection(call_stack)),
        "time_ns": time.time_ns(),
        "shown": shown(error, call_stack),
        "exit_code": exit_code,
        "ours": ours,
        "fields": error.fields() if isinstance(error, OutsizeError) else {},
    }
    record = {"message": {"message": _summary(error), "errorCode": exit_code, "extraInfo": extra}}
    try:
        replace_text(path, json.dumps(record))
    except OSError as full:  # the disk has no place for it: the user reads it here
        sys.stderr.write(f"{shown(error, call_stack)}\n{path} is not written: {full.strerror}\n")


def read_failure(record: Path, *, rank: int, pid: int, exit_code: int | None) -> Failure | None:
    """Returns how the rank failed: by its record, or by its exit code; None while there is no sign of a
    failure.

    A record of torch's own `@record` counts only once its process has ended with an error.
    """
    ended_badly, message = exit_code not in (None, 0), _message(record)
    extra: dict[str, Any] = message.get("extraInfo", {})
    if not ended_badly and "shown" not in extra:
        return None
    code = exit_code if exit_code is not None else 1
    seconds = int(extra.get("timestamp", time.time()))
    return Failure(
        rank=rank,
        pid=pid,
        exit_code=int(extra.get("exit_code", code)),
        time_ns=int(extra.get("time_ns", seconds * 10**9 if extra else time.time_ns())),
        message=str(message.get("message", "")),
        shown=str(extra.get("shown", extra.get("py_callstack", _last_words(fault_file(record))))),
        call_stack=str(extra.get("py_callstack", "")),
        ours=bool(extra.get("ours", False)),
        fields=extra.get("fields", {}),
    )


def fault_file(record: Path) -> Path:
    """Returns the file next to the record where faulthandler writes the stack of a segmentation fault or
    an abort.
    """
    return record.with_suffix(".fault")


def shown(error: BaseException, call_stack: str = "") -> str:
    """Returns one line with its place for outsize's errors, the exit text for sys.exit, else the
    traceback.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else ""
    if not isinstance(error, OutsizeError):
        return call_stack
    last = users_frame(traceback.extract_tb(_user_frames(error.__traceback__)))
    place = f"{Path(last.filename).name}:{last.lineno}: " if last is not None else ""
    return f"{place}{error}"


KILLED: Final = -9
"""The exit code of a process that SIGKILL has ended; Windows has no such name."""


def signal_name(number: int) -> str:
    """Returns `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _message(record: Path) -> dict[str, Any]:
    if not record.exists():
        return {}
    try:
        message = json.loads(record.read_text(encoding="utf-8"))["message"]
    except ValueError:
        return {}  # torch's `@record` writes in place: it is read again, or the exit code tells
    return message if isinstance(message, dict) else {"message": message}  # a C++ error is only a text


def _last_words(fault: Path) -> str:
    return fault.read_text(encoding="utf-8", errors="replace") if fault.exists() else ""


def _summary(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else ""
    return f"{type(error).__name__}: {error}"


def _is_lost_connection(call_stack: str) -> bool:
    return bool(_LOST_CONNECTION.search(call_stack))


def _user_frames(tb: TracebackType | None) -> TracebackType | None:
    """Returns `tb` from where the target of the run begins: after the frames that lead to it by runpy."""
    begin = tb
    while tb is not None:
        filename = tb.tb_frame.f_code.co_filename
        is_runpy = filename.endswith(_RUNPY)
        if not is_runpy and not is_outsize_file(filename):
            break
        begin, tb = tb.tb_next if is_runpy else begin, tb.tb_next
    return begin
