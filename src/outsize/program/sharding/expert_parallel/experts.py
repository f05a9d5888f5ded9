"""Problem: which modules of a model hold many experts, such that each rank can have some of them?

    experts(x (tokens, width), index (tokens, k), weight (tokens, k))  ->  (tokens, width)
    parameters (experts, ...), for example gate_up_proj (8, 2 x 14336, 4096)

A call of this form gives each token the sum of what its k experts make of it. So a pair of a token and one of
its choices can be computed anywhere: as a row with k = 1, by a module that has only some of the experts, of
which the index then counts. Whether a module is one is tried on a small copy with random weights, which the
parameters of two ranks (one with more experts than the other) have to give the same. The attribute by which
its code counts experts is found by the same trial. A name or a plan of transformers is not trusted.

Source: GShard, arXiv 2006.16668, sec. 3.2, for experts over devices; deviation: they are derived. Symbols: E
experts, k choices. Complexity: one trial for each kind of module. Oracle: tests/dist/test_experts.py, and
tests/unit/program/sharding/expert_parallel/test_find_experts.py by hand.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from outsize.axes.expert import EXPERT
from outsize.errors import BadOption
from outsize.program.sharding.opaque_modules import copied_with, runs_own_code
from outsize.program.sharding.scaled_linear import is_cast_by_torchao
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Instruction, Meta, Ref, Tape

_WIDTH, _INNER, _TOKENS = 16, 8, 12
_OPERANDS: Final = 3


@final
@dataclass(frozen=True)
class Experts:
    """Describes a module that holds `count` experts, of which each token has `choices`.

    `counters` are the attributes that hold their number; `width` is that of a token.
    """

    name: str
    count: int
    choices: int
    width: int
    counters: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def share(self) -> Share:
        """Returns how each of the parameters is divided."""
        return Share(0, (self.count,), frozenset({self.name}))


def expert_count(module: nn.Module) -> int:
    """Returns the size of the first dim that all parameters of a module have; 0 for any other module."""
    own = [p for p in module._parameters.values() if p is not None]
    sizes = {p.shape[0] if p.ndim > 1 else 0 for p in own}
    if len(sizes) != 1 or not any(p.ndim == _OPERANDS for p in own):
        return 0
    return sizes.pop() if len(own) == len([*module.parameters(), *module.buffers()]) else 0


def calls_experts(module: nn.Module, operands: Sequence[Any]) -> bool:
    """Returns whether a module has the parameters of experts, and these (tensors or metas) are a call's."""
    if len(operands) != _OPERANDS or expert_count(module) < 2:
        return False
    if not all(isinstance(each, Tensor | Meta) and len(each.shape) == 2 for each in operands):
        return False
    x, index, weight = operands
    floats = x.dtype.is_floating_point and weight.dtype.is_floating_point
    return (
        floats
        and index.dtype in (torch.int64, torch.int32)
        and tuple(index.shape) == tuple(weight.shape)
        and x.shape[0] == index.shape[0]
    )


def find_experts(tape: Tape, model: nn.Module) -> dict[int, Experts]:
    """Returns the calls of experts by the index of their instruction, in the order of the tape."""
    modules, known, found = dict(model.named_modules()), dict[Hashable, tuple[str, ...] | None](), {}
    for instruction in tape.instructions:
        if isinstance(instruction.target, str):
            experts = experts_of(instruction, modules[instruction.target], tape.metas, known)
            if experts is not None:
                found[instruction.index] = experts
    return found


def insist_on_experts(tape: Tape, model: nn.Module, ranks: int) -> dict[int, Experts]:
    """Returns the calls of experts that `ranks` ranks can divide.

    Raises BadOption where there are none, where a rank would have none, and where their weights cast rows
    with scales for several of them: those of other ranks would be among them, which no single device casts.
    """
    found = find_experts(tape, model)
    casting = [name for each in found.values() for name in each.parameters if _casts(model, name)]
    if casting:
        raise BadOption(
            f"ep would give rows of several ranks one scale, and {casting[0]} casts its operands with scales",
            numbers=f"{len(casting)} weights of experts are torchao's, ep={ranks}",
            next_step=f"{EXPERT.typed(1)}, or experts whose weights are plain tensors",
        )
    if not found:
        raise BadOption(
            "expert parallelism finds no experts in this model: no call experts(x (tokens, width), index "
            "(tokens, k), weight (tokens, k)) of a module whose weights all begin with a dim of experts",
            numbers=f"ep={ranks}",
            next_step=f"{EXPERT.typed(1)}, or another axis (dp_replicate, dp_shard, tp, pp)",
        )
    fewest = min(found.values(), key=lambda each: each.count)
    start, stop = RankPosition(ranks - 1, ranks).block(fewest.count)
    if start == stop:
        raise BadOption(
            f"a rank would have none of the experts of {fewest.name}",
            numbers=f"{fewest.count} experts in blocks of {-(-fewest.count // ranks)}, ep={ranks}",
            next_step=EXPERT.typed(max(1, ranks // 2)),
        )
    return found


def _casts(model: nn.Module, name: str) -> bool:
    module, _, own = name.rpartition(".")
    return is_cast_by_torchao(getattr(model.get_submodule(module), own))


def experts_of(
    instruction: Instruction,
    module: nn.Module,
    metas: Sequence[Meta],
    known: dict[Hashable, tuple[str, ...] | None] | None = None,
) -> Experts | None:
    """Returns what a call of a module is, if it is one of experts; None for any other.

    `known`: what trials of the model's other modules have shown.
    """
    known = {} if known is None else known
    operands = [metas[a.slot] if isinstance(a, Ref) else a for a in instruction.args]
    plain = not (instruction.kwargs or instruction.random or instruction.written_weights)
    if not plain or not calls_experts(module, operands) or runs_own_code(module):
        return None
    (result,) = [metas[slot].shape for slot in instruction.defines()] or [()]
    if tuple(result) != tuple(operands[0].shape):
        return None
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    width, choices = operands[0].shape[1], operands[1].shape[1]
    # Layers of one class that share plain values and the same objects (a config) are tried once.
    values = ((n, v if isinstance(v, int | float | str | bool) else id(v)) for n, v in _attributes(module))
    key = type(module), tuple(shapes.items()), width, choices, tuple(values)
    if key not in known:
        known[key] = _counters(module, shapes, width, choices)
    counters = known[key]
    if counters is None:
        return None
    names = tuple(f"{instruction.target}.{name}" for name in shapes)
    return Experts(str(instruction.target), expert_count(module), choices, width, counters, names)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((n, v) for n, v in vars(module).items() if not n.startswith("_") and n != "training")


def _counters(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], width: int, choices: int
) -> tuple[str, ...] | None:
    """Returns the attributes that count experts, if ranks with some experts each add up to the whole."""
    count = next(iter(shapes.values()))[0]
    equal = tuple(n for n, v in _attributes(module) if type(v) is int and v == count)
    named = tuple(n for n in equal if "expert" in n.lower())
    if choices > count:
        return None
    for sizes in _small_sizes(shapes, width):
        for counters in dict.fromkeys((named, equal, ())):
            if _adds_up(_Trial(module, shapes, sizes, counters, width, choices)):
                return counters
    return None


def _small_sizes(shapes: Mapping[str, tuple[int, ...]], width: int) -> Iterator[dict[int, int]]:
    """Yields small sizes for the sizes of dims, which keep their ratios to the smallest inner one."""
    sizes = {size for shape in shapes.values() for size in shape[1:]}
    inner = min(sizes - {width}, default=width)
    if width not in sizes:
        return
    if all(size % inner == 0 for size in sizes - {width}):
        yield {size: size // inner * _INNER for size in sizes} | {width: _WIDTH}
    if all(size % width == 0 for size in sizes):
        yield {size: size // width * _WIDTH for size in sizes}
    if sum(size for shape in shapes.values() for size in shape[1:]) < 1 << 10:
        yield {size: size for size in sizes} | {width: width}


@final
@dataclass(frozen=True)
class _Trial:
    """Holds a module, the small sizes of its dims, and the attributes that may count its experts."""

    module: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[int, int]
    counters: tuple[str, ...]
    width: int
    choices: int

    @property
    def count(self) -> int:
        """Returns the number of experts."""
        return next(iter(self.shapes.values()))[0]

    def part(self, weights: Mapping[str, Tensor], start: int, stop: int) -> nn.Module:
        """Returns a small copy with the experts [start, stop)."""
        copied = copied_with(self.module, {name: weight[start:stop] for name, weight in weights.items()})
        for name, value in _attributes(copied):
            if type(value) is int and name not in self.counters:
                setattr(copied, name, self.sizes.get(value, value))
        for name in self.counters:
            setattr(copied, name, stop - start)
        return copied


def _adds_up(trial: _Trial) -> bool:
    generator, count = torch.Generator().manual_seed(0), trial.count
    cut = RankPosition(0, 2).block(count)[1]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        weights = {
            name: torch.randn(count, *(trial.sizes[size] for size in shape[1:]), generator=generator)
            for name, shape in trial.shapes.items()
        }
        x = torch.rand(_TOKENS, trial.sizes[trial.width], generator=generator)
        index = torch.rand(_TOKENS, count, generator=generator).argsort(-1)[:, : trial.choices]
        weight = torch.rand(index.shape, generator=generator)
        try:
            expected = trial.part(weights, 0, count)(x, index, weight)
            summed = torch.zeros_like(expected)
            for start, stop in ((0, cut), (cut, count)):
                token, choice = ((index >= start) & (index < stop)).nonzero(as_tuple=True)
                local, chosen = index[token, choice, None] - start, weight[token, choice, None]
                if len(token):
                    summed.index_add_(0, token, trial.part(weights, start, stop)(x[token], local, chosen))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return False
        return bool(expected.abs().max() > 0) and torch.allclose(summed, expected, rtol=1e-3, atol=1e-4)


@contextmanager
def counting(module: nn.Module, counters: Sequence[str], count: int) -> Iterator[None]:
    """Sets the attributes by which a module's code counts experts, within the context."""
    before = {name: getattr(module, name) for name in counters}
    for name in counters:
        setattr(module, name, count)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
