"""Names the actions of a row as ranges of torch.profiler, where a profiler is on.

    range                                       what happens in it
    1F0: forward, stage 1, microbatch 0         kernels of the forward are launched
    1F0: wait, stage 1, microbatch 0            the host waits for the messages that the action needs

The text before the colon is the action in the schedule's grammar (ir/schedule.py). Whether a profiler is on
is asked once for a step; without one an action costs nothing more. Oracle:
tests/unit/run/interpreter/test_ranges.py.
"""

from __future__ import annotations

from typing import Final

from outsize.ir.schedule import Action, Kind

WORDS: Final = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradients",
    Kind.W: "weight gradients",
    Kind.SEND_F: "send activations",
    Kind.RECV_F: "post receive of activations",
    Kind.SEND_B: "send gradients",
    Kind.RECV_B: "post receive of gradients",
    Kind.UNSHARD: "gather weights",
    Kind.RESHARD: "free gathered weights",
    Kind.REDUCE_GRAD: "reduce gradients",
    Kind.LOAD: "load weights",
    Kind.UNLOAD: "unload weights",
    Kind.OFFLOAD_F: "offload activations",
    Kind.OFFLOAD_B: "offload gradients",
    Kind.FETCH_F: "fetch activations",
    Kind.FETCH_B: "fetch gradients",
    Kind.SHOW: "show work",
    Kind.VERIFY: "repeat work",
}
_WAIT: Final = "wait"


def range_name(action: Action) -> str:
    """Returns the name of the range in which the action runs."""
    return _named(action, WORDS[action.kind])


def wait_name(action: Action) -> str:
    """Returns the name of the range in which the action waits for its messages."""
    return _named(action, _WAIT)


def _named(action: Action, word: str) -> str:
    microbatch = f", microbatch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"{action}: {word}, stage {action.stage}{microbatch}"
