"""Tape: what a model's forward did, written down.

    slot 0 = input                            Ref(0)
    slot 1 = call  transformer.wte (Ref(0))   a leaf module, by FQN
    slot 2 = glue  torch.add (Ref(1), Weight("transformer.bias"))

An Instruction is one call of a leaf module or one public torch function between leaves. Its arguments
are references to earlier slots, weights by FQN, or plain Python constants. Each result has a new slot,
also when it *is* an argument (in-place, Identity). A tape holds no weights; it is valid for one input
signature and the values its guards name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from outsize.ir.graph import Work
from outsize.program.tree import leaves


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """An earlier value of the tape."""

    __tape_leaf__: ClassVar[bool] = True
    slot: int


@final
@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer or tensor attribute of the model, by its canonical FQN."""

    __tape_leaf__: ClassVar[bool] = True
    name: str
    kind: Literal["parameter", "buffer", "attribute"]


@final
@dataclass(frozen=True, slots=True)
class Meta:
    """What is known of a slot before it exists. `storage` groups slots that share memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the distinct elements (an expanded dimension counts once)."""
        count = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            count *= size if step or size == 0 else 1
        return count * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True)
class Modes:
    """Grad and autocast state around an instruction. `autocast` is (device, dtype) pairs that are on."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """Costs from the fake pass: FLOPs, bytes read and written, bytes that autograd keeps.

    The first two are of the forward; a storage that several instructions keep counts in the first, and is
    in `kept` of all of them; `saved_small_bytes` are in storages below SMALL_BYTES. `workspace_bytes` is how
    much more than at its end the instruction holds at its worst moment; `backward_workspace_bytes` the same
    for its backward, beside what it has saved (below zero where the gradients are less than what is freed
    before). `waiting_bytes` are the gradients that a split backward keeps for its weights. The three tuples
    are its work by family.
    """

    flops: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0
    saved_small_bytes: int = 0
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    waiting_bytes: int = 0
    forward: tuple[Work, ...] = ()
    backward_input: tuple[Work, ...] = ()
    backward_weight: tuple[Work, ...] = ()
    kept: frozenset[int] = frozenset()


@final
@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of the tape."""

    index: int
    target: str | Callable[..., Any]  # FQN of a leaf module, or a function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any  # tree with a Ref per tensor
    frame: str  # FQN of the module whose code made the call
    modes: Modes
    random: bool
    writes: frozenset[int]  # storages changed in place
    weights: tuple[Weight, ...]  # every weight that is touched
    written_weights: tuple[Weight, ...]
    where: str  # file:line of the user's code
    cost: Cost = field(default_factory=Cost)
    serves: int | None = None  # on a rank's own tape: the instruction of the whole one that it is or helps

    @property
    def origin(self) -> int:
        """Its number on the tape of one device, by which random numbers are drawn."""
        return self.index if self.serves is None else self.serves

    @property
    def is_leaf(self) -> bool:
        """A module call (True) or glue (False)."""
        return isinstance(self.target, str)

    @property
    def name(self) -> str:
        """`layer1.0.conv1` for a leaf, `layer1.0:add` for glue in that frame, `add` in the model's own."""
        if isinstance(self.target, str):
            return self.target
        op = getattr(self.target, "__name__", type(self.target).__name__)
        op = op.strip("_")
        return f"{self.frame}:{op}" if self.frame else op

    def reads(self) -> Iterator[int]:
        """Slots that the arguments mention, in order, possibly repeated."""
        return (leaf.slot for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref))

    def defines(self) -> Iterator[int]:
        """Slots that the result fills."""
        return (leaf.slot for leaf in leaves(self.out) if isinstance(leaf, Ref))

    def parameters(self) -> tuple[str, ...]:
        """Canonical names of the parameters that it touches."""
        return tuple(w.name for w in self.weights if w.kind == "parameter")


@final
@dataclass(frozen=True, slots=True)
class Guard:
    """A Python decision on input values: the tape holds only while the call still gives `value`."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    where: str


@final
@dataclass(frozen=True)
class Tape:
    """A recorded step: forward, and the loss if there is one."""

    inputs: tuple[int, ...]  # slots of the tensors among the inputs, in the order of `leaves`
    instructions: tuple[Instruction, ...]
    metas: tuple[Meta, ...]
    constants: dict[int, Tensor]  # slots whose tensor existed before recording and is no weight
    output: Any
    loss: Ref | None
    guards: tuple[Guard, ...]
    modes: Modes  # ambient when recording began
    opaque: tuple[str, ...]  # modules that the ladder made one leaf, with the reason
    through: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # weight -> at each use

    @cached_property
    def producer(self) -> dict[int, int]:
        """Slot -> index of the instruction that defines it; inputs and constants are absent."""
        return {slot: i.index for i in self.instructions for slot in i.defines()}

    def storage(self, slot: int) -> int:
        """The memory that a slot lives in."""
        return self.metas[slot].storage

    def output_slots(self) -> tuple[int, ...]:
        """Slots that the caller of the model can see."""
        return tuple(x.slot for x in leaves(self.output) if isinstance(x, Ref))


def backward_slice(tape: Sequence[Instruction], metas: Sequence[Meta], slots: Iterable[int]) -> list[int]:
    """Indices of the instructions that the slots depend on, earlier writers of their memory included."""
    needed, storages = set(slots), {metas[s].storage for s in slots}
    kept: list[int] = []
    for instruction in reversed(tape):
        if needed.isdisjoint(instruction.defines()) and storages.isdisjoint(instruction.writes):
            continue
        kept.append(instruction.index)
        reads = set(instruction.reads())
        needed |= reads
        storages |= {metas[s].storage for s in reads}
    return kept[::-1]
