"""Finds leaves that read Python state which other code has set: a replay runs the leaf's call alone.

self.attention.cache = x        recorded code sets what the call below reads: the setter's module
y = self.attention(q)           becomes a leaf, or this leaf is opened
self.norm.calls += 1 inside     its own state: the call does it again at each replay
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn

from outsize.capture.fakes.fake_model import FakeModel, differing
from outsize.capture.guards.notes import Notes
from outsize.capture.recording.calls.failures import FrameFailed, Leaked
from outsize.capture.recording.calls.position import Position
from outsize.capture.recording.leaf_rule import LeafRule, common_module, may_read
from outsize.program.sharding.opaque_modules import is_hooked
from outsize.program.source_line import calling_line


@final
class LeafStates:
    """The Python state that the leaves of one recording find and leave."""

    def __init__(self, fakes: FakeModel, rule: LeafRule, position: Position, notes: Notes) -> None:
        self._fakes, self._rule, self._position, self._notes = fakes, rule, position, notes
        self._probed: set[str] = set()  # Leaves whose calls were not traced to their end.

    def note_probed(self, fqn: str) -> None:
        """Notes that nobody has seen what a leaf reads."""
        self._probed.add(fqn)

    def around(self, fqn: str, module: nn.Module, record: Callable[[], Any]) -> Any:
        """Records the call of a leaf. Raises FrameFailed or Leaked where other code has set the state that it
        reads, because only the call is replayed.
        """
        left, before = self._fakes.left, self._fakes.state_of(fqn)
        expected = left[fqn] if fqn in left else self._fakes.state_at_rest(fqn)
        out = record()
        if before != expected:
            changed = [
                (p, n) for p, values in before.items() for n in differing(expected.get(p, values), values)
            ]
            self._insist_on_own_state(fqn, module, [(module.get_submodule(p), p, n) for p, n in changed])
        after = self._fakes.state_of(fqn)
        if after != before:
            left[fqn] = after
        return out

    def _insist_on_own_state(
        self, fqn: str, leaf: nn.Module, changed: list[tuple[nn.Module, str, str]]
    ) -> None:
        """Checks that a leaf does not read these attributes (of a part of it), which other code has set."""
        notes = self._notes
        for module, part, name in changed:
            if "_hooks" in name and not is_hooked(module):  # Collectors, which are recorded with the forward.
                continue
            if not (fqn in self._probed or notes.has_read(module, name, fqn) or may_read(leaf, name)):
                continue
            writes = notes.writes.writes_of(module, name)
            frame = common_module([self._position.frame, *(write.site.frame for write in writes)])
            where = writes[0].site.where if writes else calling_line()
            label = ".".join(filter(None, (fqn, part, name)))
            if fqn in self._fakes.left:
                raise FrameFailed(frame, f"it sets the state that {fqn} keeps", where)
            failure = FrameFailed(frame, f"it sets {label}, which the call of {fqn} reads", where)
            if frame or fqn in self._rule.forced:
                raise failure
            raise Leaked(fqn, failure, f"the forward sets {label}")
