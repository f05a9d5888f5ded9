"""Which rank failed first, and what it said.

A worker that ends with an exception writes a record in torch elastic's error-file format
(`torch.distributed.elastic.multiprocessing.errors`), so torchrun can read it too; `extraInfo` carries more:

    {"message": {"message": "ValueError: boom",
                 "extraInfo": {"py_callstack": ..., "timestamp": "1730000000",        torch's, in seconds
                               "time_ns": 1730000000123456789, "shown": ..., "exit_code": 1, "ours": false}}}

One failure brings the others down: when rank 1 dies, rank 0 sees "connection closed by peer". So the ranks
are ordered by (is the text one of a lost connection, time), and the least of them is the root cause. A
process that left no record (a signal, `os._exit`) counts with the time at which it was found dead.
Oracle: tests/unit/train/test_launch.py for the order; tests/dist/test_launch_processes.py, real processes.
"""

from __future__ import annotations

import json
import re
import signal
import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from outsize.errors import OutsizeError

_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|gloo/transport"
    r"|Dist(Network|Backend|Store)Error|remote process exited"
)
_ENTRY_FILES = ("runpy", "<frozen runpy>", "outsize/train/worker.py")


@final
@dataclass(frozen=True)
class Failure:
    """How one rank ended: `exit_code` is negative for a signal; `shown` is what the user gets to read."""

    rank: int
    pid: int
    exit_code: int
    time_ns: int
    message: str = ""
    shown: str = ""
    call_stack: str = ""
    ours: bool = False

    def to_json(self) -> str:
        """For the agents of other machines."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What another agent has written."""
        return cls(**json.loads(text))

    @classmethod
    def lost(cls, message: str) -> Self:
        """Of rank 0, whose machine does not answer any more."""
        return cls(0, 0, 1, time.time_ns(), message=message, call_stack=message)

    @property
    def is_consequence(self) -> bool:
        """Whether the text is one of a peer that has gone away."""
        return _is_lost_connection(self.call_stack)

    @property
    def ending(self) -> str:
        """`exit code 1, ValueError: boom` or `killed by SIGKILL`."""
        if self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        first_line = textwrap.shorten(self.message.split("\n", 1)[0], 120, placeholder=" ...")
        return f"exit code {self.exit_code}" + (f", {first_line}" if first_line else "")


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The root cause among at least one failure."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time_ns, failure.rank))


def write_failure(path: Path, error: BaseException, exit_code: int) -> None:
    """Write the record of `error`, all at once, because the launcher reads while workers write."""
    ours = isinstance(error, OutsizeError)
    call_stack = "".join(traceback.format_exception(type(error), error, _user_frames(error.__traceback__)))
    extra = {
        "py_callstack": call_stack,
        # torchrun compares whole seconds: a later one keeps it from naming a consequence as the cause
        "timestamp": str(int(time.time()) + _is_lost_connection(call_stack)),
        "time_ns": time.time_ns(),
        "shown": shown(error, call_stack),
        "exit_code": exit_code,
        "ours": ours,
    }
    record = {"message": {"message": _summary(error), "errorCode": exit_code, "extraInfo": extra}}
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(record), encoding="utf-8")
    draft.replace(path)


def read_failure(record: Path, *, rank: int, pid: int, exit_code: int | None) -> Failure | None:
    """How the rank failed: by its record; without one by its exit code. None while nothing speaks for it.

    A record of torch's own `@record` counts only once its process has ended badly.
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
    )


def fault_file(record: Path) -> Path:
    """Where faulthandler writes the stack on a segmentation fault or an abort, beside the record."""
    return record.with_suffix(".fault")


def shown(error: BaseException, call_stack: str = "") -> str:
    """One line with its place for our own errors, the exit text for sys.exit, else the traceback."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else ""
    if not isinstance(error, OutsizeError):
        return call_stack
    frames = traceback.extract_tb(_user_frames(error.__traceback__))
    theirs = [frame for frame in frames if "/outsize/" not in frame.filename.replace("\\", "/")]
    place = f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}: " if theirs else ""
    return f"{place}{error}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _message(record: Path) -> dict[str, Any]:
    if not record.exists():
        return {}
    message = json.loads(record.read_text(encoding="utf-8"))["message"]
    return message if isinstance(message, dict) else {"message": message}  # a C++ error is a text alone


def _last_words(fault: Path) -> str:
    return fault.read_text(encoding="utf-8", errors="replace") if fault.exists() else ""


def _summary(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else ""
    return f"{type(error).__name__}: {error}"


def _is_lost_connection(call_stack: str) -> bool:
    return bool(_LOST_CONNECTION.search(call_stack))


def _user_frames(tb: TracebackType | None) -> TracebackType | None:
    """`tb` from the first frame that is neither runpy's nor the worker entry's."""
    while tb is not None and tb.tb_frame.f_code.co_filename.replace("\\", "/").endswith(_ENTRY_FILES):
        tb = tb.tb_next
    return tb
