"""Generates one Python function for a slice of a tape.

    def stage_1(v12, v3, p0, seed):
        v13 = m0(v12)  # transformer.h.2.ln_1
        seed(57)
        v14 = f1(v13, 0.1, True)  # transformer.h.2:dropout
        del v13
        return (v14,)

The function uses locals instead of a dictionary, `del` at the last use, and weights read from their module at
each call (an optimizer or a checkpoint may have replaced them), as is a number that is an input of the
program (`n0.value()`). A tied parameter that another stage owns
arrives as an argument (`p0`) and is in the module only around the call. Modes that differ from the ambient
ones become `with` blocks. No name becomes code: names of the model are in the text as quoted constants, and
in comments without line ends. The function's attribute `source` has the text, so that a user can read a
stage. A Python number that a leaf returned has determined the code after it when the tape was made: `expect`
checks it. Under autocast a function that is compiled takes the copies of its weights as arguments (`c0`), and
always an alias for each use of a weight that several calls use: autograd then adds up the gradients of the
uses one by one, to what other stages have sent, as it does without a compiler.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from types import FrameType, FunctionType
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError, ReplayMismatch, visible
from outsize.program.lengths import is_length, length_inputs
from outsize.program.python_reads import NumberInput
from outsize.program.replaying.modes import entering
from outsize.program.replaying.replay import resolve
from outsize.program.tape import Instruction, Modes, Ref, Weight
from outsize.program.tree import FIELD, ITEM, Steps, leaves, paths
from outsize.program.weights.lookup import attribute_place, weight_named

_LITERALS = (
    int,
    float,
    bool,
    str,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.memory_format,
)


PLACES: Final = "_place_of_line"
Function = Callable[..., Any]


class Compiler(Protocol):
    """Compiles a generated function, whose seeds come as one tensor of numbers instead of a callable."""

    @property
    def seed_at(self) -> Callable[[Tensor, int], object]:
        """Seeds by one of the numbers, within the compiled graph."""
        ...

    @property
    def seed_outside(self) -> Callable[[Tensor, int], object]:
        """Seeds by one of the numbers, between two graphs."""
        ...

    def compile(self, function: Function, draws: Sequence[int], /) -> Function:
        """Returns the compiled function, whose last argument is the seed again.

        `draws` are the instructions (`Instruction.origin`) that draw, by their places among the numbers.
        """
        ...


def replayed_place(frame: FrameType, line: int) -> tuple[str, str] | None:
    """Returns the name and the user's file:line of the instruction that a generated function's frame runs."""
    return frame.f_globals.get(PLACES, {}).get(line)


def name_instruction(error: Exception) -> None:
    """Adds the unit and the user's file:line to an error that a generated function has raised."""
    if isinstance(error, OutsizeError):
        return
    places = [replayed_place(*step) for step in traceback.walk_tb(error.__traceback__)]
    place = next((place for place in reversed(places) if place is not None), None)
    if place is not None:
        error.add_note(f"This was in {place[0]}, {place[1]}")


@final
@dataclass(frozen=True)
class SliceSpec:
    """Defines the function to generate: `entries` and `foreign` weights are arguments, `exits` are returned.

    `copied` maps names to weights whose module has them on another device; it is read at each call. A weight
    named in `through` is passed through that function at each use. `cast(parameter, dtype)` returns the copy
    of a parameter that an instruction reads as a cast alone (Instruction.casts); it gets the parameter's
    `through` as a third argument. None leaves all casts to autocast.
    """

    name: str
    instructions: Sequence[Instruction]
    entries: Sequence[int]
    exits: Sequence[int]
    foreign: Sequence[str] = ()
    constants: Mapping[int, Tensor] = field(default_factory=dict)
    copied: Mapping[str, Tensor] = field(default_factory=dict)
    through: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    cast: Callable[..., Tensor] | None = None


def compile_slice(
    spec: SliceSpec, model: nn.Module, ambient: Modes, compiler: Compiler | None = None
) -> Callable[..., tuple[Any, ...]]:
    """Returns the function `f(*entries, *foreign, seed) -> exits`; where instructions have lengths as inputs,
    their values (program/lengths.py) are its last argument, `lengths`.

    A `compiler` gets it without the casts of parameters: their copies come as arguments, made outside.
    """
    writer = _FunctionWriter(spec, model, compiler)
    for group in _same_modes(spec.instructions):
        writer.block(group, entering(group[0].modes, ambient))
    return writer.finish()


def _same_modes(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    groups: list[list[Instruction]] = []
    for instruction in instructions:
        if groups and groups[-1][0].modes == instruction.modes:
            groups[-1].append(instruction)
        else:
            groups.append([instruction])
    return groups


@final
class _FunctionWriter:
    """Collects the lines of the function, and the objects that its names refer to."""

    def __init__(self, spec: SliceSpec, model: nn.Module, compiler: Compiler | None) -> None:
        self._spec, self._model, self._compiler = spec, model, compiler
        self._draws: list[int] = []  # The origins of random instructions.
        self._modules = dict(model.named_modules())
        self._foreign = {name: f"p{i}" for i, name in enumerate(spec.foreign)}
        self._copies: dict[str, str] = {}  # The text of each copy maps to the argument that it is.
        # A compiled backward would add up what such a weight gets within the function first.
        self._uncast = _read_uncast(spec.instructions) if compiler is not None else frozenset[str]()
        self._names: dict[str, Any] = {
            "torch": torch,
            "resolve": resolve,
            "swapped": swapped,
            "expect": expect,
            "write_again": write_again,
            "use": use,
            "copied": spec.copied,
        }
        self._name_of: dict[int, str] = {}
        self._plain = self._foreign | {name: f"copied[{name!r}]" for name in spec.copied}
        self._everywhere = self._plain | {name: self._through(name) for name in spec.through}
        self._elsewhere = self._everywhere
        self._used = Counter(name for each in spec.instructions for name in each.parameters())
        self._lines: list[str] = []
        # The unit and the user's file:line of each line; a traceback's frame finds it among its globals.
        self._place_of_line: dict[int, tuple[str, str]] = {}
        self._names[PLACES] = self._place_of_line
        self._last_use = _last_uses(spec)
        self._lengths = {number: place for place, number in enumerate(length_inputs(spec.instructions))}
        for slot, tensor in spec.constants.items():
            self._names[f"v{slot}"] = tensor

    def block(self, group: list[Instruction], contexts: list[str]) -> None:
        indent = "    "
        if contexts:
            self._lines.append(f"{indent}with {', '.join(contexts)}:")
            indent += "    "
        for instruction in group:
            first = len(self._lines) + 2  # Lines count from 1, and the line of `def` comes before.
            self._lines += [indent + line for line in self._statement(instruction)]
            place = instruction.name, instruction.where
            self._place_of_line |= dict.fromkeys(range(first, len(self._lines) + 2), place)

    def finish(self) -> Callable[..., tuple[Any, ...]]:
        entries = [f"v{s}" for s in self._spec.entries] + list(self._foreign.values())
        exits = "".join(f"v{s}, " for s in self._spec.exits)
        lines = [*self._lines, f"    return ({exits})"]
        function = self._defined([*entries, *self._copies.values()], lines, self._names)
        if self._compiler is None:
            return function
        fast = self._compiler.compile(function, tuple(self._draws))
        if not self._copies:
            return fast
        line = f"    return fast({', '.join([*entries, *self._copies, 'seed'])})"
        names = {name: value for name, value in self._names.items() if name != PLACES}
        return self._defined(entries, [line], names | {"fast": fast})

    def _defined(self, arguments: Sequence[str], lines: Sequence[str], names: dict[str, Any]) -> Any:
        more = ["seed", "lengths"] if self._lengths else ["seed"]
        head = f"def {self._spec.name}({', '.join([*arguments, *more])}):"
        source = "\n".join([head, *lines, ""])
        exec(compile(source, f"<outsize {self._spec.name}>", "exec"), names)
        # The function is popped because one among its own globals would be a cycle that references the
        # weights until gc runs.
        function = names.pop(self._spec.name)
        function.source = source
        return function

    def _statement(self, instruction: Instruction) -> list[str]:
        self._elsewhere = self._everywhere | self._aliases(instruction) | self._casts(instruction)
        lines = [self._seed(instruction)] if instruction.random else []
        # Results that nothing reads are not unpacked either: a list of states may be shorter the next time.
        dead = set(self._last_use.get(instruction.index, ()))
        unread = dead.intersection(instruction.defines())
        refs = list(paths(instruction.out, lambda leaf: isinstance(leaf, Ref) and leaf.slot not in unread))
        call = f"{self._callee(instruction)}({self._arguments(instruction)})"
        expected = self._expectations(instruction, unread)
        if len(refs) == 1 and not refs[0][0]:
            lines += self._guarded(instruction, f"v{refs[0][1].slot} = {call}")
        else:
            named = refs or expected
            lines += self._guarded(instruction, f"out = {call}" if named else call)
            lines += [*expected, *(f"v{ref.slot} = {self._part('out', steps)}" for steps, ref in refs)]
            # The container would keep all its tensors until the next call, also those that are read no more.
            lines += ["del out"] if named else []
        if instruction.writes_twice:
            arguments = self._arguments(instruction)
            lines += self._guarded(instruction, f"write_again({self._callee(instruction)}, {arguments})")
        # As the frame of the plain forward would, but at once: what no later line reads must not wait in a
        # local variable for the end of the function, or a stage needs the memory of all its values.
        gone = ", ".join(f"v{slot}" for slot in sorted(dead - unread))
        return [*lines, f"del {gone}"] if gone else lines

    def _seed(self, instruction: Instruction) -> str:
        """Returns the statement that seeds the generators for an instruction."""
        if self._compiler is None:
            return f"seed({instruction.origin})"
        self._draws.append(instruction.origin)
        inside = _draws_by_torch(self._target(instruction))
        seed = self._compiler.seed_at if inside else self._compiler.seed_outside
        return f"{self._bind(seed, 'f')}(seed, {len(self._draws) - 1})"

    def _expectations(self, instruction: Instruction, unread: set[int]) -> list[str]:
        """Returns checks of the Python values that a leaf returns, and of the lengths of its lists
        (rule 11).
        """
        if not instruction.is_leaf:
            return []
        values = paths(instruction.out, _is_python)
        checks = [(self._part("out", steps), value) for steps, value in values]
        lengths = _lengths(instruction.out, unread)
        checks += [(f"len({self._part('out', steps)})", items) for steps, items in lengths]
        place = f"{str(instruction.name)!r}, {str(instruction.where)!r}"
        return [f"expect({text}, {self._value(value)}, {place})" for text, value in checks]

    def _guarded(self, instruction: Instruction, line: str) -> list[str]:
        """Returns the call, inside a swap of tied parameters where it uses some that live elsewhere."""
        comment = f"  # {visible(instruction.name)}"
        named = {leaf for leaf in leaves((instruction.args, instruction.kwargs)) if isinstance(leaf, Weight)}
        swapped_in = [w.name for w in instruction.weights if w.name in self._elsewhere and w not in named]
        if not swapped_in:
            return [line + comment]
        places = [
            (table, key, self._elsewhere[n])
            for n in swapped_in
            for table, key in self._places(instruction, n)
        ]
        swaps = ", ".join(f"({self._bind(table, 't')}, {key!r}, {value})" for table, key, value in places)
        return [f"with swapped({swaps}):{comment}", f"    {line}"]

    def _places(self, instruction: Instruction, name: str) -> list[tuple[dict[str, Any], str]]:
        """Returns where the call reads the weight: in its own module, else (a module as argument)
        anywhere.
        """
        wanted = weight_named(self._model, name)
        leaf = [self._modules[str(instruction.target)]] if instruction.is_leaf else []
        holders = (_holders(module, wanted) for module in (*leaf, self._model))
        return next((places for places in holders if places), [])

    def _target(self, instruction: Instruction) -> Any:
        target = instruction.target
        return self._modules[target] if isinstance(target, str) else target

    def _callee(self, instruction: Instruction) -> str:
        return self._bind(self._target(instruction), "m" if instruction.is_leaf else "f")

    def _arguments(self, instruction: Instruction) -> str:
        positional = [self._value(a) for a in instruction.args]
        named = [(key, self._value(value)) for key, value in instruction.kwargs.items()]
        words = [f"{key}={text}" if _is_word(key) else f"**{{{str(key)!r}: {text}}}" for key, text in named]
        return ", ".join(positional + words)

    def _value(self, tree: Any) -> str:
        """Returns the Python text of an argument."""
        if isinstance(tree, Ref):
            return f"v{tree.slot}"
        if isinstance(tree, Weight):
            return self._elsewhere.get(tree.name) or self._weight(tree)
        if is_length(tree):
            return f"lengths[{self._lengths[tree]}]"
        if isinstance(tree, NumberInput):
            return f"{self._bind(tree, 'n')}.value()"
        if type(tree) in (tuple, list):
            inner = "".join(f"{self._value(item)}, " for item in tree)
            return f"({inner})" if type(tree) is tuple else f"[{inner}]"
        if type(tree) is dict and all(type(k) is str for k in tree):
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in tree.items()) + "}"
        if isinstance(tree, slice):
            return f"slice({self._value(tree.start)}, {self._value(tree.stop)}, {self._value(tree.step)})"
        return self._constant(tree)

    def _constant(self, tree: Any) -> str:
        if type(tree) in _LITERALS and not (type(tree) is float and tree != tree) and "inf" not in repr(tree):
            return f"torch.device({str(tree)!r})" if isinstance(tree, torch.device) else repr(tree)
        if not any(isinstance(leaf, Ref | Weight | NumberInput) for leaf in leaves(tree)):
            return self._bind(tree, "k")
        slots = {leaf.slot for leaf in leaves(tree) if isinstance(leaf, Ref)}
        env = ", ".join(f"{s}: v{s}" for s in sorted(slots))
        weights = [leaf for leaf in leaves(tree) if isinstance(leaf, Weight)]
        table = ", ".join(f"{str(w.name)!r}: {self._value(w)}" for w in weights)
        return f"resolve({self._bind(tree, 'k')}, {{{env}}}, {{{table}}})"

    def _aliases(self, instruction: Instruction) -> dict[str, str]:
        """Returns the aliases that a compiled function gets of weights that other calls in it use, too."""
        if self._compiler is None:
            return {}
        shared = [name for name in instruction.parameters() if self._used[name] > 1]
        texts = {name: self._everywhere.get(name) or self._as_it_is(name) for name in shared}
        return {name: self._copy(f"use({text}, {instruction.index})") for name, text in texts.items()}

    def _casts(self, instruction: Instruction) -> dict[str, str]:
        """Returns the text of the copies that the instruction gets in place of parameters."""
        if self._spec.cast is None:
            return {}
        cast, casts = self._bind(self._spec.cast, "f"), dict[str, str]()
        for name, dtype in instruction.casts:
            if dtype is not None and name not in self._uncast:
                through = self._spec.through.get(name)
                last = "" if through is None else f", {self._bind(through, 'f')}"
                casts[name] = self._copy(f"{cast}({self._as_it_is(name)}, {dtype}{last})")
        return casts

    def _copy(self, text: str) -> str:
        return self._copies.setdefault(text, f"c{len(self._copies)}") if self._compiler is not None else text

    def _through(self, name: str) -> str:
        return f"{self._bind(self._spec.through[name], 'f')}({self._as_it_is(name)})"

    def _as_it_is(self, name: str) -> str:
        return self._plain.get(name) or self._weight(Weight(name, "parameter"))

    def _weight(self, weight: Weight) -> str:
        if weight.kind == "attribute":
            table, key, steps = attribute_place(self._modules, weight.name)
            return self._part(f"{self._bind(table, 't')}[{key!r}]", steps)
        path, _, key = weight.name.rpartition(".")
        owner = self._modules[path]
        table = owner._parameters if weight.kind == "parameter" else owner._buffers
        return f"{self._bind(table, 't')}[{key!r}]"

    def _part(self, text: str, steps: Steps) -> str:
        """Returns the Python text of a part; a key that is no plain text or number is bound to a name."""
        for kind, key in steps:
            if kind == FIELD and _is_word(key):
                text += f".{key}"
            elif kind == ITEM and type(key) in (int, str):
                text += f"[{key!r}]"
            elif kind == ITEM:
                text += f"[{self._bind(key, 'k')}]"
            else:
                text = f"getattr({text}, {str(key)!r})"
        return text

    def _bind(self, value: Any, prefix: str) -> str:
        if id(value) not in self._name_of:
            name = f"{prefix}{len(self._name_of)}"
            self._name_of[id(value)], self._names[name] = name, value
        return self._name_of[id(value)]


def _draws_by_torch(callee: Any) -> bool:
    """Tells whether a call draws by torch's operators alone, and its code is torch's own.

    Code of the user may draw from Python's generators, and a compiler may end its graph in the middle.
    """
    code = callee if isinstance(callee, FunctionType) else type(callee)
    return code.__module__.partition(".")[0] in ("torch", "builtins")


def _is_word(name: object) -> bool:
    """Tells whether a name can be written as it is: an ASCII identifier that Python does not reserve."""
    return type(name) is str and name.isascii() and name.isidentifier() and not iskeyword(name)


def expect(actual: object, recorded: object, name: str, where: str) -> None:
    """Raises ReplayMismatch when a leaf returns another Python value than when it was captured."""
    if actual != recorded and not (actual != actual and recorded != recorded):
        raise ReplayMismatch(
            f"{name} returns another Python value than when it was captured",
            numbers=f"captured {recorded!r}, got {actual!r}, used at {where}",
            next_step="return a tensor there, or move what uses the value into the same module",
        )


def use(weight: Tensor, _index: int) -> Tensor:
    """Returns an alias of a weight for one of its uses, so that each has a gradient of its own."""
    return weight.view_as(weight)


@torch.no_grad()
def write_again(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a module once more for the buffers that it writes."""
    call(*args, **kwargs)


def _is_python(leaf: Any) -> bool:
    return isinstance(leaf, int | float | str)


def _lengths(out: Any, unread: set[int]) -> Iterator[tuple[Steps, int]]:
    """Yields (steps, number of items) of each list and tuple from which something is read by its index."""
    for place, items in paths(out, lambda part: isinstance(part, tuple | list)):
        if any(isinstance(leaf, Ref) and leaf.slot not in unread for leaf in leaves(items)):
            yield place, len(items)


def _holders(module: nn.Module, wanted: Tensor) -> list[tuple[dict[str, Any], str]]:
    tables = [table for m in module.modules() for table in (m._parameters, m._buffers)]
    return [(table, key) for table in tables for key, p in table.items() if p is wanted]


@final
class swapped:
    """Sets `table[key] = value` for each place within the context.

    It is a class because a stage under autocast enters it for each of its layers.
    """

    __slots__ = ("_before", "_places")

    def __init__(self, *places: tuple[dict[str, Any], str, Tensor]) -> None:
        self._places = places
        self._before = [table[key] for table, key, _ in places]

    def __enter__(self) -> None:
        for table, key, value in self._places:
            table[key] = value

    def __exit__(self, *_: object) -> None:
        for (table, key, _value), before in zip(self._places, self._before, strict=True):
            table[key] = before


def _read_uncast(instructions: Sequence[Instruction]) -> frozenset[str]:
    """Returns the weights that some instruction reads in another way than as a cast alone."""
    known = [{name for name, dtype in i.casts if dtype is not None} for i in instructions]
    pairs = zip(instructions, known, strict=True)
    return frozenset(w.name for i, casts in pairs for w in i.weights if w.name not in casts)


def _last_uses(spec: SliceSpec) -> dict[int, list[int]]:
    """Maps each instruction index to the slots that are not needed after it."""
    last: dict[int, int] = {}
    for instruction in spec.instructions:
        for slot in (*instruction.reads(), *instruction.defines()):
            last[slot] = instruction.index
    always_needed = {*spec.exits, *spec.constants}
    dead: dict[int, list[int]] = {}
    for slot, index in last.items():
        if slot not in always_needed:
            dead.setdefault(index, []).append(slot)
    return dead
