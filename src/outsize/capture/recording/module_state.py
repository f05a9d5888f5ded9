"""State that a forward keeps in its modules from call to call (rule 9), and whether a tape may ignore it.

    self.mean = 0.9 * self.mean + 0.1 * x.mean()     a submodule that does this becomes one leaf
    self.last_hidden = x                             in the model itself: harmless if nothing reads it

Harmless means: a second forward, on the state that the first left behind, writes the same tape. A leaf
that keeps state *and* hands out the tensor (`self.aux`, read by its parent) is walked through under the
same proof. What matters and cannot be kept is refused with the attribute's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, final

from torch import nn

from outsize.capture.fakes.fake_model import FakeModel
from outsize.capture.guards.consumed import Consumed, is_random_generator
from outsize.capture.guards.notes import Notes
from outsize.capture.guards.values import is_container
from outsize.capture.guards.writes import Write
from outsize.capture.recording.leaf_rule import LeafRule, common_module
from outsize.errors import NotCapturable
from outsize.errors.interruptions import raise_interruption
from outsize.program.python_reads import LOSS
from outsize.program.sharding.opaque_modules import HOOKS
from outsize.program.source_line import line_of
from outsize.program.tape import Tape
from outsize.program.tree import leaves

Attribute = tuple[str, str]  # module, name


def kept_state(model: nn.Module, rule: LeafRule, fakes: FakeModel) -> list[Attribute]:
    """What the recorded forward has rebound outside leaves."""
    modules = dict(model.named_modules())
    return [(fqn, name) for fqn, name in fakes.rebound() if not _inside_leaf(fqn, modules, rule)]


def unsettled(
    state: list[Attribute], tape: Tape, fakes: FakeModel, again: Callable[[], Tape]
) -> list[Attribute]:
    """What a second forward binds anew once more: without the rest, all later forwards are like the second.

    `self.mode = "dense"` is settled after the first forward, `self.steps += 1` never. All of the state where
    the second forward is another one.
    """
    before = {fqn: fakes.state_of(fqn)[""] for fqn, _ in state}
    held = [list(leaves(vars(fakes.modules[fqn]))) for fqn in before]  # else an id could come again
    try:
        same = _same(tape, again())
    except Exception as error:
        raise_interruption(error)
        return state
    now = {fqn: fakes.state_of(fqn)[""] for fqn in before}
    del held
    moving = [(f, n) for f, n in state if before[f].get(n) != now[f].get(n)]
    return moving if same or moving else state


def _inside_leaf(fqn: str, modules: dict[str, nn.Module], rule: LeafRule) -> bool:
    if rule.live_loss and fqn in rule.of_loss:
        return True
    return _head_of(fqn, modules, rule) is not None


def _heads(fqn: str) -> Iterator[str]:
    parts = fqn.split(".") if fqn else []
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def insist_on_harmless(
    model: nn.Module,
    state: Iterable[Attribute],
    tape: Tape,
    again: Callable[[], Tape],
    reads: Notes,
    fakes: FakeModel,
) -> tuple[str, ...]:
    """Notes on the state if it does not matter; `again` records a second forward. Raises NotCapturable.

    A number that the forward changes at each call and uses otherwise may matter from a later call on, and so
    may a container.
    """
    state = list(state)
    for fqn, name in state:
        table = model.get_submodule(fqn)._buffers
        if name in table and name not in model.get_submodule(fqn)._non_persistent_buffers_set:
            raise _refusal(model, fqn, name, "it is a buffer, which the tape cannot rebind")
    before = {fqn: fakes.state_of(fqn)[""] for fqn, _ in state}
    try:
        same = _same(tape, again())
    except Exception as error:
        raise_interruption(error)
        raise _refusal(model, *next(iter(state)), f"the next call depends on it ({error})") from error
    if not same:
        raise _refusal(model, *next(iter(state)), "the next call computes something else")
    for fqn, name in state:
        module = model.get_submodule(fqn)
        # A flag, or a cache, of the first call has its last value after the second.
        value = vars(module).get(name)
        moves = is_container(value) and before[fqn].get(name) != fakes.state_of(fqn)[""].get(name)
        if (type(value) in (int, float) or moves) and reads.writes.uses_what_it_writes(module, name):
            raise _refusal(model, fqn, name, "a later call may compute something else")
    return tuple(
        f"{_path(f, n)}: set by the forward, not kept (the numbers do not depend on it)"
        for f, n in state
        if n not in HOOKS
    )


def insist_on_harmless_writes(
    model: nn.Module, rule: LeafRule, reads: Notes, again: Callable[[], Tape]
) -> tuple[str, ...]:
    """Makes modules that write at each call into objects that are no modules leaves, which run as they are.

    Returns notes on such writes of the model's own forward. Raises NotCapturable where it uses them. `again`
    records a second forward: what is written once alone, such as a cache, is no state.
    """
    modules = dict(model.named_modules())
    writes = reads.writes.writes_elsewhere()
    enclosed = [write for write in writes if _is_enclosed(model, write, modules, rule)]
    if enclosed:
        return ()
    if all(_runs_as_it_is(write.site.frame, modules, rule) for write in writes):
        return ()
    times = {id(write): write.times for write in writes}
    again()
    # It judges anew, and what was made by the first forward may be written by the second.
    now = (w for w in reads.writes.writes_elsewhere() if not _runs_as_it_is(w.site.frame, modules, rule))
    moving = [write for write in now if write.times > times.get(id(write), 0)]
    lasting: list[Write] = []
    # What both forwards write into has lived before the second one.
    finding = {write.site.frame for write in moving if id(write) in times}
    for write in moving:
        frame = write.site.frame
        if frame and frame not in rule.opened:
            if frame not in finding:
                rule.renewing[frame] = None
            rule.forced[frame] = f"it writes {write.site.label}, outside of the model ({write.site.where})"
            rule.keepers.add(frame)
        elif write.is_used:
            raise NotCapturable(
                f"the forward of {type(model).__name__} uses what it writes into {write.site.label}: a later "
                "call may compute something else",
                numbers=f"at {write.site.where}",
                next_step="move that code into a submodule, which then runs as one instruction",
            )
        else:
            lasting.append(write)
    return tuple(
        f"{write.site.label}: written by the forward at {write.site.where}, and not by a split run"
        for write in lasting
    )


def _is_enclosed(model: nn.Module, write: Write, modules: dict[str, nn.Module], rule: LeafRule) -> bool:
    """Makes the smallest module that has both a write and a leaf that reads what is written a leaf itself.

    Returns whether there was such a write. Raises NotCapturable where that module is the model.
    """
    writer = write.site.frame
    heads = {_head_of(reader, modules, rule) for reader in write.readers}
    outside = [name for name in modules if name in heads and not f"{writer}.".startswith(f"{name}.")]
    for head in outside:
        around = common_module((writer, head))
        if not around or around in rule.opened:
            raise NotCapturable(
                f"the forward of {type(model).__name__} writes {write.site.label}, which {head} reads",
                numbers=f"at {write.site.where}",
                next_step=f"pass the value to {head} as an argument, or move both into one submodule",
            )
        rule.forced[around] = f"it writes {write.site.label}, which {head} reads ({write.site.where})"
    return bool(outside)


def _head_of(frame: str, modules: dict[str, nn.Module], rule: LeafRule) -> str | None:
    """Returns the outermost module that runs as it is and has this code, if any."""
    return next(
        (head for head in _heads(frame) if head in modules and rule.is_leaf(head, modules[head])), None
    )


def leave_alone(model: nn.Module, rule: LeafRule, use: Consumed) -> None:
    """Makes the module (or the loss) that uses an object which changes with each use run as it is.

    Raises NotCapturable where that is the model itself, where two modules use one object, and where a
    recording would take values of it.
    """
    earlier = rule.used.setdefault(id(use.value), [])
    frame, known = use.frame, [other.frame for other in earlier]
    if not use.can_be_kept() or frame in known:
        raise NotCapturable(
            f"the forward of {type(model).__name__} uses {use.label}, a {type(use.value).__name__} that "
            "lives between calls and cannot be copied where it is: a recording would take values of it",
            numbers=f"at {use.where}",
            next_step="hold a number in an attribute and add to it, or an iterator over a list",
        )
    if frame == "" or frame in rule.opened or any(not _is_one(frame, other) for other in known):
        raise NotCapturable(
            f"the forward of {type(model).__name__} uses {use.label}, which changes with each use: a later "
            "call computes something else",
            numbers=f"at {use.where}",
            next_step="move that code into one submodule, which then runs as one instruction",
        )
    earlier.append(use)
    if frame == LOSS:
        rule.run_loss_live()
    else:
        rule.forced[frame] = f"it uses {use.label}, which changes with each use ({use.where})"
        rule.keepers.add(frame)


def _is_one(frame: str, other: str) -> bool:
    """Returns whether one of two modules is part of the other."""
    return f"{frame}.".startswith(f"{other}.") or f"{other}.".startswith(f"{frame}.")


@final
class LiveCode:
    """Knows which code may use objects that change with each use: what runs as it is, on their copies."""

    def __init__(self, model: nn.Module, rule: LeafRule, copies: Collection[int]) -> None:
        self._modules, self._rule, self._copies = dict(model.named_modules()), rule, copies

    def may_use(self, value: Any, frame: str) -> bool:
        """Answers for one object and the code of one module, or the loss."""
        is_known = is_random_generator(value) and id(value) in self._rule.used
        if not is_known and id(value) not in self._copies:
            return False
        if frame == LOSS:
            return self._rule.live_loss
        return _runs_as_it_is(frame, self._modules, self._rule)


def _runs_as_it_is(frame: str, modules: dict[str, nn.Module], rule: LeafRule) -> bool:
    return frame == LOSS or _inside_leaf(frame, modules, rule)


def _refusal(model: nn.Module, fqn: str, name: str, why: str) -> NotCapturable:
    owner = type(model.get_submodule(fqn))
    return NotCapturable(
        f"the forward of {owner.__name__} keeps state in self.{name}: {why}",
        numbers=f"at {line_of(owner.forward)}",
        next_step=f"write self.{name}.copy_(...) on a registered buffer, or move it into a submodule",
    )


def _path(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name


def _same(first: Tape, second: Tape) -> bool:
    """Tells whether two tapes make the same calls with the same arguments."""
    if len(first.instructions) != len(second.instructions):
        return False
    pairs = zip(first.instructions, second.instructions, strict=True)
    return all(a.target == b.target and _equal((a.args, a.kwargs), (b.args, b.kwargs)) for a, b in pairs)


def _equal(first: Any, second: Any) -> bool:
    a, b = list(leaves(first)), list(leaves(second))
    return len(a) == len(b) and all(x is y or repr(x) == repr(y) for x, y in zip(a, b, strict=True))
