"""Reads where a thread of this process is: in the user's code, in a collective, or waiting for a message.

    innermost   distributed_c10d.py  all_reduce        a frame of torch.distributed: a collective,
                train.py:42          log_everything    and it is the user's: this line is named
                engine.py            step
    outermost   train.py:80          <module>

A thread waits when its innermost frame is one of torch.distributed or of outsize's transports. The nearest
frame outside of torch.distributed says whose call that is. Where it is the call of torch's backward, no
Python says what it does: it computes, or C++ that somebody has hooked into the backward waits for other
ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Final, Literal, final

from outsize.program.source_line import is_outsize_file
from outsize.run.progress import SAVER

Where = Literal["waits", "collective", "saves", "runs", "backward", "debugger"]
_DISTRIBUTED: Final = f"{os.sep}torch{os.sep}distributed{os.sep}"
_WAITING_FILES: Final = tuple(
    os.sep.join(part) for part in (("run", "transport", ""), ("device", "futex.py"), ("train", "ranks", ""))
)
_BACKWARD_FILES: Final = tuple(
    os.sep.join(part)
    for part in (
        ("run", "stage", "stage.py"),
        ("run", "stage", "split_backward.py"),
        ("torch", "autograd", "graph.py"),
    )
)
_SAVING_FILE: Final = os.sep.join(("train", "checkpoint", "background.py"))
_STANDARD_LIBRARY: Final = str(Path(os.__file__).parent) + os.sep
_LIBRARIES: Final = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    _STANDARD_LIBRARY,
    "<frozen ",
)
_DEBUGGERS: Final = ("bdb.py", "pdb.py", "pydevd.py", "_pydevd_bundle")
_SHOWN_FRAMES: Final = 12


@final
@dataclass(frozen=True, slots=True)
class Stack:
    """Says where a thread is: `waits` in outsize, in a `collective` of the user's, in torch's `backward`, it
    `runs`, or is debugged.

    It `saves` where it waits for the thread that writes a checkpoint, which waits for other ranks.
    `line` is the nearest `file:line` of the user's code, `call` the function of torch.distributed.
    """

    where: Where
    line: str
    call: str
    text: str


def stack_of(thread: int, helpers: Collection[int] = ()) -> Stack:
    """Returns where the thread is; where it runs, a helper of it may be in a collective of the user's."""
    frames = sys._current_frames()
    own = _stack(frames.get(thread))
    if own.where not in ("runs", "backward"):
        return own
    if _awaits_saver(frames.get(thread)) and any(_waits(frames.get(one)) for one in _savers()):
        return replace(own, where="saves")
    others = (_stack(frames.get(helper)) for helper in helpers)
    return next((other for other in others if other.where == "collective"), own)


def _savers() -> list[int]:
    """Returns the threads of this process that write checkpoints."""
    return [one.ident for one in threading.enumerate() if one.ident and one.name.startswith(SAVER)]


def _awaits_saver(frame: FrameType | None) -> bool:
    """Tells whether a thread is in a lock of Python's library that a wait for a save has asked for."""
    while frame is not None and frame.f_code.co_filename.startswith(_STANDARD_LIBRARY):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(_SAVING_FILE)


def _waits(frame: FrameType | None) -> bool:
    return _stack(frame).where in ("waits", "collective")


def _stack(frame: FrameType | None) -> Stack:
    if frame is None:
        return Stack("runs", "?", "", "")
    shown = [at for at in traceback.extract_stack(frame) if not is_outsize_file(at.filename)]
    text = "".join(traceback.format_list(shown[-_SHOWN_FRAMES:]))
    chain: list[tuple[str, FrameType]] = []
    here: FrameType | None = frame
    while here is not None:
        chain.append((here.f_code.co_filename, here))
        here = here.f_back
    names = [name for name, _ in chain]
    line = next((_line(at) for name, at in chain if _is_users(name)), "?")
    if any(name.endswith(_DEBUGGERS) or _DEBUGGERS[-1] in name for name in names):
        return Stack("debugger", line, "", text)
    calls = 0
    while calls < len(names) and _DISTRIBUTED in names[calls]:
        calls += 1
    if calls:
        functions = [at.f_code.co_name for _, at in chain[:calls] if at.f_code.co_name != "wrapper"]
        is_ours = calls < len(names) and is_outsize_file(names[calls])
        call = f"torch.distributed.{functions[-1]}" if functions else ""
        return Stack("waits" if is_ours else "collective", line, call, text)
    return Stack(_where(frame), line, "", text)


def _where(innermost: FrameType) -> Where:
    """Returns what a thread does that is in no collective, by its innermost frame."""
    name = innermost.f_code.co_filename
    if is_outsize_file(name) and any(part in name for part in _WAITING_FILES):
        return "waits"
    is_backward = name.endswith(_BACKWARD_FILES) and "backward" in innermost.f_code.co_name
    return "backward" if is_backward else "runs"


def _is_users(name: str) -> bool:
    if is_outsize_file(name) or name.startswith("<"):
        return False
    return not any(part in name for part in (*_LIBRARIES, _DISTRIBUTED))


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
