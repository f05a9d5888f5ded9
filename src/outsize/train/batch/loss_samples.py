"""Tells what an instruction does along the dims in which the samples of a batch lie.

    softmax(x, 0), cumsum(x, 0), topk(flat, k)     combines entries of several samples
    x[::2], chunk(x, 2), x.roll(1, 0)              takes some samples, or puts others in their places
    x[3], unbind(x)                                takes single samples
    a @ b.T, a[:, None] - a[None]                  has an entry for each pair of samples

A loss over such values is no mean over microbatches. Which dims are those of samples is the caller's guess or
knowledge (loss_denominators.py); nothing here is asked of a reduction, which has rules of its own there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, Literal

from outsize.program.tape import Instruction

Taken = Literal["one", "some"]

_LAST: Final = -1
# What combines or moves entries along a dim: the place of the dim among the arguments, and its default. None
# stands for all dims.
_ALONG: Final[Mapping[str, tuple[int, int | None]]] = {
    **dict.fromkeys(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"], (1, None)),
    **dict.fromkeys(["softmax", "log_softmax", "softmin", "logsumexp", "flip"], (1, None)),
    **dict.fromkeys(["sort", "argsort", "msort"], (1, _LAST)),
    **dict.fromkeys(["topk", "kthvalue"], (2, _LAST)),
    **dict.fromkeys(["var", "std", "prod", "max", "min", "amax", "amin", "median", "nanmedian"], (1, None)),
    **dict.fromkeys(["argmax", "argmin", "nanmean", "any", "all"], (1, None)),
    **dict.fromkeys(["roll", "norm", "quantile"], (2, None)),
    "normalize": (2, 1),
    "diff": (2, _LAST),
}
_PARTS: Final[Mapping[str, int]] = dict.fromkeys(["chunk", "split", "tensor_split", "split_with_sizes"], 2)
_NORMALIZING: Final = "batch_norm"
_TRAINS: Final = 5  # the place of `training` among the arguments of F.batch_norm
_ELEMENTWISE_WITH_TWO: Final = frozenset(["max", "min"])


def operator(instruction: Instruction) -> str:
    """Returns the name of the function, without underscores."""
    return instruction.name.rpartition(":")[2]


def combined_dims(instruction: Instruction, dims: int) -> set[int]:
    """Returns the dims along which a function of one tensor combines or moves entries, of `dims` in all."""
    name = operator(instruction)
    if name == _NORMALIZING:
        trains = instruction.kwargs.get(
            "training", instruction.args[_TRAINS] if instruction.args[_TRAINS:] else False
        )
        return set(range(dims)) - {1} if trains else set()
    if name not in _ALONG:
        return set()
    at, default = _ALONG[name]
    second = instruction.args[1] if len(instruction.args) > 1 else None
    if name in _ELEMENTWISE_WITH_TWO and not (isinstance(second, int) or "dim" in instruction.kwargs):
        return set()
    given = instruction.kwargs.get("dim", instruction.kwargs.get("dims"))
    if given is None:
        given = instruction.args[at] if len(instruction.args) > at else default
    return set(range(dims)) if given is None else set(_dims(given, dims))


def taken(instruction: Instruction, dims: int, samples: Collection[int]) -> Taken | None:
    """Returns how many of the samples, which lie along some of `dims` dims, a function takes; None: all."""
    name, args = operator(instruction), instruction.args
    if name == "getitem":
        return _indexed(args[1], dims, samples)
    dim = instruction.kwargs.get("dim", args[1] if name in ("unbind", "select", "narrow") and args[1:] else 0)
    if name in _PARTS:
        at = _PARTS[name]
        dim = instruction.kwargs.get("dim", args[at] if len(args) > at else 0)
    elif name not in ("unbind", "select", "narrow"):
        return None
    if not isinstance(dim, int) or not dims or dim % dims not in samples:
        return None
    return "one" if name in ("unbind", "select") else "some"


def _indexed(index: Any, dims: int, samples: Collection[int]) -> Taken | None:
    """Returns what `x[index]` takes; what a tensor of indices takes is not known, and counts as all."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is None or entry is Ellipsis or isinstance(entry, int | slice) for entry in entries):
        return None
    indexed = [entry for entry in entries if entry is not None]
    before = next((n for n, entry in enumerate(indexed) if entry is Ellipsis), len(indexed))
    after = len(indexed) - before - 1
    for place, entry in enumerate(indexed):
        dim = place if place < before else dims - after + (place - before - 1)
        if entry is Ellipsis or dim not in samples:
            continue
        if isinstance(entry, int):
            return "one"
        if entry != slice(None):
            return "some"
    return None


def _dims(given: Any, dims: int) -> Iterator[int]:
    for dim in given if isinstance(given, tuple | list) else (given,):
        if isinstance(dim, int) and dims:
            yield dim % dims
