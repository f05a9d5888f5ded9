"""Records what a model's forward did.

    slot 0 = input                            Ref(0)
    slot 1 = call  transformer.wte (Ref(0))   a leaf module, by FQN
    slot 2 = glue  torch.add (Ref(1), Weight("transformer.bias"))

An Instruction is one call of a leaf module or one public torch function between leaves. Its arguments are
references to earlier slots, weights by FQN, plain Python constants, or numbers that are computed at each call
(NumberInput). Each result has a new slot, also when it *is* an argument (in-place, Identity). A tape holds no
weights; it is valid for one input signature and the values its guards name.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from outsize.ir.graph import SMALL_BYTES, Work
from outsize.program.python_reads import NumberDecision, PythonRead
from outsize.program.tree import leaves


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """References an earlier value of the tape."""

    __tape_leaf__: ClassVar[bool] = True
    slot: int


@final
@dataclass(frozen=True, slots=True)
class Weight:
    """References a parameter, buffer or tensor attribute of the model by its canonical FQN."""

    __tape_leaf__: ClassVar[bool] = True
    name: str
    kind: Literal["parameter", "buffer", "attribute"]


@final
@dataclass(frozen=True, slots=True)
class Meta:
    """Describes a slot before it has a value; `storage` groups slots that share memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of the distinct elements (an expanded dimension counts once)."""
        count = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            count *= size if step or size == 0 else 1
        return count * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True)
class Modes:
    """Records grad and autocast state around an instruction; `autocast` lists the (device, dtype) that are
    on.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """Holds costs from the fake pass: FLOPs, bytes read and written, bytes that autograd saves.

    The first two are of the forward. A storage that several instructions save counts in the first, and is in
    `saved_storages` of all of them; `saved_sizes` are the bytes of those of its storages that may be small.
    `workspace_bytes`
    is how much more than at its end the instruction holds at its peak; `backward_workspace_bytes` is the same
    for its backward, without what the forward has saved (below zero where the gradients are less than what is
    freed before). `waiting_bytes` are the gradients that a split backward stores for its weights.
    `weight_sum_bytes` of the workspace of the backward are sums of gradients of weights.
    `cast_bytes` are the copies of weights in autocast's dtype, which are made once per step and counted
    nowhere else. The three tuples are its work by family; `exact_instructions` are, by pass and work, the
    numbers whose rounded ones its instructions add up, where these are known. `on_accelerator` has the costs
    on an accelerator where those are others.
    """

    flops: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0
    saved_sizes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    waiting_bytes: int = 0
    weight_sum_bytes: int = 0
    cast_bytes: int = 0
    forward: tuple[Work, ...] = ()
    backward_input: tuple[Work, ...] = ()
    backward_weight: tuple[Work, ...] = ()
    exact_instructions: tuple[tuple[tuple[float, ...], ...], ...] = ()
    saved_storages: frozenset[int] = frozenset()
    on_accelerator: Cost | None = None

    @property
    def saved_small_bytes(self) -> int:
        """Returns the saved bytes in storages below SMALL_BYTES."""
        return sum(size for size in self.saved_sizes if size < SMALL_BYTES)


class _KnownSlots(ABC):
    """Keeps the slots of an instruction, which are asked for a dozen times while a graph is built, and a text
    of it; tapes at other lengths share the instruction.
    """

    __slots__ = ("_defined", "_read", "_text")
    _read: tuple[int, ...]
    _defined: tuple[int, ...]
    _text: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Instruction(_KnownSlots):
    """Represents one line of the tape."""

    index: int
    target: str | Callable[..., Any]  # The target is the FQN of a leaf module, or a function.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any  # The result is a tree with a Ref per tensor.
    frame: str  # The frame is the FQN of the module whose code made the call.
    modes: Modes
    random: bool
    writes: frozenset[int]  # These storages are changed in place.
    weights: tuple[Weight, ...]  # These are all weights that the call uses.
    written_weights: tuple[Weight, ...]
    where: str  # The value is a file:line of the user's code.
    # Autocast casts these parameters to these dtypes, and the call reads them in no other way; None says that
    # this is not known of all calls of the tape.
    casts: tuple[tuple[str, torch.dtype | None], ...] = ()
    cost: Cost = field(default_factory=Cost)
    # On a rank's own tape, it is the instruction of the whole tape that this one is or helps.
    serves: int | None = None
    # The call is in a region of torch.utils.checkpoint, whose backward calls it again and writes its buffers.
    writes_twice: bool = False

    @property
    def origin(self) -> int:
        """Returns the instruction's number on the tape of one device, by which random numbers are drawn."""
        return self.index if self.serves is None else self.serves

    @property
    def is_leaf(self) -> bool:
        """Returns True for a module call and False for glue."""
        return isinstance(self.target, str)

    @property
    def name(self) -> str:
        """Returns `layer1.0.conv1` for a leaf, `layer1.0:add` for glue in that frame, `add` in the model's
        own.
        """
        if isinstance(self.target, str):
            return self.target
        op = getattr(self.target, "__name__", type(self.target).__name__)
        op = op.strip("_")
        return f"{self.frame}:{op}" if self.frame else op

    def reads(self) -> Iterator[int]:
        """Yields the slots that the arguments mention, in order, possibly repeated."""
        try:
            return iter(self._read)
        except AttributeError:
            read = tuple(leaf.slot for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref))
            object.__setattr__(self, "_read", read)
            return iter(read)

    def defines(self) -> Iterator[int]:
        """Yields the slots that the result fills."""
        try:
            return iter(self._defined)
        except AttributeError:
            defined = tuple(leaf.slot for leaf in leaves(self.out) if isinstance(leaf, Ref))
            object.__setattr__(self, "_defined", defined)
            return iter(defined)

    def text(self, write: Callable[[Instruction], tuple[str, ...]]) -> tuple[str, ...]:
        """Returns what `write`, always the same function, has written of the instruction."""
        try:
            return self._text
        except AttributeError:
            text = write(self)
            object.__setattr__(self, "_text", text)
            return text

    def parameters(self) -> tuple[str, ...]:
        """Returns the canonical names of the parameters that the instruction uses."""
        return tuple(w.name for w in self.weights if w.kind == "parameter")


@final
@dataclass(frozen=True, slots=True)
class Guard:
    """Records a Python decision on input values: the tape is valid only while the call still
    returns `value`.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    where: str


@final
@dataclass(frozen=True)
class Tape:
    """Holds a recorded step: the forward, and the loss if there is one."""

    inputs: tuple[int, ...]  # The slots are those of the tensors among the inputs, in the order of `leaves`.
    instructions: tuple[Instruction, ...]
    metas: tuple[Meta, ...]
    constants: dict[int, Tensor]  # The keys are slots whose tensor existed before recording and is no weight.
    output: Any
    loss: Ref | None
    guards: tuple[Guard, ...]
    modes: Modes  # These modes were ambient when recording began.
    opaque: tuple[str, ...]  # The texts name modules that retries made leaves, with the reason.
    # Each weight is passed through its function at each use.
    through: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    # The Python values that were read; the tape is valid only while they are the same.
    reads: tuple[PythonRead, ...] = ()
    # What Python decided on numbers that are inputs of the program (NumberInput); it is valid only while they
    # fall the same way.
    decisions: tuple[NumberDecision, ...] = ()
    # Of a tape whose lengths are followed: decisions on values that follow from lengths alone.
    of_lengths: tuple[Guard, ...] = ()
    # Modules that retries made leaves, and LOSS: what only they read is read again at each replay.
    live: frozenset[str] = frozenset()
    # Leaves that set attributes, write outside of modules or draw from a generator of their own: their calls
    # are made in the forward's order, in one stage.
    keepers: frozenset[str] = frozenset()
    # Where the loss function is one instruction: the tape on which it is recorded op by op.
    loss_detail: Tape | None = None

    @cached_property
    def producer(self) -> dict[int, int]:
        """Maps each slot to the index of the instruction that defines it; inputs and constants are absent."""
        return {slot: i.index for i in self.instructions for slot in i.defines()}

    def storage(self, slot: int) -> int:
        """Returns the number of the storage that a slot lives in."""
        return self.metas[slot].storage

    def output_slots(self) -> tuple[int, ...]:
        """Returns the slots that the caller of the model can see."""
        return tuple(x.slot for x in leaves(self.output) if isinstance(x, Ref))


def backward_slice(tape: Sequence[Instruction], metas: Sequence[Meta], slots: Iterable[int]) -> list[int]:
    """Returns the indices of the instructions that the slots depend on, earlier writers of their memory
    included.
    """
    needed, storages = set(slots), {metas[s].storage for s in slots}
    indices: list[int] = []
    for instruction in reversed(tape):
        if needed.isdisjoint(instruction.defines()) and storages.isdisjoint(instruction.writes):
            continue
        indices.append(instruction.index)
        reads = set(instruction.reads())
        needed |= reads
        storages |= {metas[s].storage for s in reads}
    return indices[::-1]
