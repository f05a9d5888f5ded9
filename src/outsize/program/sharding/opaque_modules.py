"""Tells what a user's module does that its program does not show, by its hooks and by trials on a small copy.

    runs_own_code     has it hooks, or a forward of its own? They see the values of one device, all of them.
    works_by_rows     does it treat all tokens equally, whatever it makes of each, as routers and experts do?
    works_by_vector   does it treat all vectors along its last dim equally, as a norm does? (Each transformers
                      model file defines its own RMSNorm class.)
    adds_up           experts with weights (experts, a, b): with which parts of them do the results of ranks
                      add up to the whole? Tried with an inner dim of 8 and a width of 16.

Copies get random weights and inputs, so that properties that hold by accident are not accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn

from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Meta
from outsize.program.tree import leaves

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks of these modules fill lists of the running forward (router logits, hidden states) and do nothing else,
# so they are recorded with that forward.
_COLLECTORS: Final = frozenset({"transformers.utils.output_capturing"})
# What a module has besides its attributes; hooks are among the others, and have to be empty.
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_KNOWN: dict[tuple[Hashable, ...], bool] = {}  # What was tried of modules that are built the same.
_TRIED = 4  # The sharded dim is tried with so many items.
_MOST = 1 << 20  # A module with more weights is not tried.


def is_hooked(module: nn.Module) -> bool:
    """Returns whether the user has set hooks on the module, which must run on every step."""
    hooks = [hook for kind in HOOKS for hook in (getattr(module, kind, None) or {}).values()]
    return any(getattr(hook, "__module__", None) not in _COLLECTORS for hook in hooks)


def runs_own_code(module: nn.Module) -> bool:
    """Returns whether the module or a part of it has hooks, or a forward that is not its class's."""
    return any(is_hooked(each) or "forward" in vars(each) for each in module.modules())


def works_by_vector(module: nn.Module, shape: tuple[int, ...], dim: int) -> bool:
    """Returns whether `module(x)` cut along `dim` is `module(x cut along dim)`, bit by bit or nearly."""
    if dim == len(shape) - 1 or sum(p.numel() for p in module.parameters()) > _MOST:
        return False
    sizes = [*(min(size, 2) for size in shape[:-1]), shape[-1]]
    sizes[dim] = _TRIED
    built = _built(module)
    if built is None:
        return _works_by_vector(module, sizes, dim)
    key = built, *sizes, dim
    if key not in _KNOWN:
        _KNOWN[key] = _works_by_vector(module, sizes, dim)
    return _KNOWN[key]


def _built(module: nn.Module) -> tuple[Hashable, ...] | None:
    """Returns a key that only modules share which compute the same from the same weights: class, plain
    attributes, and kinds of weights; None where a module holds anything else.

    A model of 80 layers has 161 equal norms, and is recorded at several sizes.
    """
    keys: list[Hashable] = []
    for name, each in module.named_modules():
        attributes = vars(each)
        plain = {n: value for n, value in attributes.items() if _is_plain(value)}
        if any(attributes[n] for n in attributes.keys() - plain.keys() - _TABLES):
            return None
        weights = (*each._parameters.items(), *each._buffers.items())
        kinds = tuple((n, t if t is None else (tuple(t.shape), t.dtype)) for n, t in weights)
        keys.append((name, type(each), tuple(plain.items()), kinds))
    return tuple(keys)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _works_by_vector(module: nn.Module, sizes: Sequence[int], dim: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        small_copy = _with_new_weights(module)
        for weight in leaves([*small_copy.parameters(), *small_copy.buffers()]):
            # With weights of zeros or ones a module that mixes vectors could look as if it did not.
            weight.copy_(torch.rand(weight.shape, generator=generator))
        x = torch.randn(sizes, generator=generator, dtype=torch.float64)
        # The part does not begin with the first vector: a module that counts positions from it is found out.
        try:
            whole, part = small_copy(x), small_copy(x.narrow(dim, 1, 2))
        except (RuntimeError, ValueError, TypeError):
            return False
    return whole.shape == x.shape and torch.allclose(whole.narrow(dim, 1, 2), part, rtol=1e-9, atol=1e-12)


def _with_new_weights(module: nn.Module) -> nn.Module:
    """Returns a copy on the CPU in double precision; the values of the weights, which may be on another rank,
    are not read.
    """
    made = copy.deepcopy(module)
    for each in made.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = nn.Parameter(_new(parameter))
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = _new(buffer)
    return made


def _new(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape, dtype=torch.float64 if weight.is_floating_point() else weight.dtype)


def works_by_rows(module: nn.Module, args: Sequence[Any], dim: int) -> bool:
    """Returns whether tensors cut along `dim` (those of the tokens) give the results cut so.

    The tokens of a result may be one dim with the samples.

    Experts with weights (experts, a, b) are tried with few channels, other modules as they are.
    """
    if adds_up(module, args) is not None and dim == 0:
        return _experts_by_rows(module, args)
    if sum(p.numel() for p in module.parameters()) > _MOST_OPAQUE:
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        small_copy = _with_new_weights(module)
        for weight in leaves([*small_copy.parameters(), *small_copy.buffers()]):
            weight.copy_(torch.rand(weight.shape, generator=generator))
        inputs = [_with_few_tokens(arg, dim, generator) for arg in args]
        return _same_by_rows(small_copy, inputs, dim)


def _experts_by_rows(module: nn.Module, args: Sequence[Any]) -> bool:
    shares = adds_up(module, args)
    assert shares is not None
    inner, generator = min(share.parts[0] for share in shares.values()), torch.Generator().manual_seed(0)
    experts = next(iter(module.parameters())).shape[0]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        weights = {n: _weight(experts, _small(share, inner), generator) for n, share in shares.items()}
        inputs = [_input(arg, _WIDTH, experts, generator) for arg in args]
        inputs[0] = torch.rand(_TOKENS, _WIDTH, generator=generator)
        return _same_by_rows(copied_with(module, weights), inputs, 0)


def _with_few_tokens(arg: Any, dim: int, generator: torch.Generator) -> Any:
    """Returns an input like the recorded one, in double precision, with few tokens and samples."""
    if not isinstance(arg, Meta):
        return arg
    sizes = [min(size, 2) if d < len(arg.shape) - 1 else size for d, size in enumerate(arg.shape)]
    sizes[dim] = _TOKENS
    if not arg.dtype.is_floating_point:
        return torch.zeros(sizes, dtype=arg.dtype)
    return torch.randn(sizes, generator=generator, dtype=torch.float64)


def _same_by_rows(module: nn.Module, inputs: Sequence[Any], dim: int) -> bool:
    rows = [x.narrow(dim, 1, 3).contiguous() if isinstance(x, Tensor) else x for x in inputs]
    sizes = next(x.shape[: dim + 1] for x in inputs if isinstance(x, Tensor))
    try:
        whole, some = (list(leaves(module(*each))) for each in (inputs, rows))
        kept = [_some_rows(x, sizes) if isinstance(x, Tensor) else x for x in whole]
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    tensors = all(isinstance(x, Tensor) and x.ndim for x in whole)
    return tensors and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)
        for a, b in zip(kept, some, strict=True)
    )


def _some_rows(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns rows 1 to 3 of a result whose first dims have these sizes, or are one with all of them."""
    dim = len(sizes) - 1
    if tuple(x.shape[: dim + 1]) != tuple(sizes):
        x = x.unflatten(0, tuple(sizes))
        return x.narrow(dim, 1, 3).flatten(0, dim)
    return x.narrow(dim, 1, 3)


_MOST_OPAQUE: Final = 1 << 23  # A router of 8,192 channels and 1,024 experts is tried as it is.
_WIDTH, _INNER, _TOKENS = 16, 8, 6


def adds_up(module: nn.Module, args: Sequence[Any]) -> dict[str, Share] | None:
    """Returns how each parameter is sharded, if two ranks' results with their shards add up to one's."""
    weights = {name: p for name, p in module.named_parameters() if p.ndim == 3}
    tokens = args[0].shape[-1] if args and isinstance(args[0], Meta) and args[0].shape else 0
    if not weights or len(weights) < len(list(module.parameters())):
        return None
    for shares in _candidates({name: tuple(p.shape) for name, p in weights.items()}, tokens):
        if _tried(module, shares, tokens, args):
            return shares
    return None


def _candidates(shapes: Mapping[str, tuple[int, ...]], width: int) -> Iterator[dict[str, Share]]:
    """Yields shards along the dim that is not the tokens' width, in one part or in parts of the smallest
    size.
    """
    if any(width not in shape[1:] for shape in shapes.values()):
        return
    for dims in product((1, 2), repeat=len(shapes)):
        chosen = dict(zip(shapes, dims, strict=True))
        if any(shapes[name][3 - dim] != width for name, dim in chosen.items()):
            continue
        inner = min(shapes[name][dim] for name, dim in chosen.items())
        if any(shapes[name][dim] % inner for name, dim in chosen.items()):
            continue
        for fused in (True, False):
            yield {
                name: Share(dim, (inner,) * (shapes[name][dim] // inner) if fused else (shapes[name][dim],))
                for name, dim in chosen.items()
            }


def _tried(module: nn.Module, shares: Mapping[str, Share], width: int, args: Sequence[Any]) -> bool:
    inner = min(share.parts[0] for share in shares.values())
    generator = torch.Generator().manual_seed(0)
    small = {name: _small(share, inner) for name, share in shares.items()}
    experts = next(iter(module.parameters())).shape[0]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        whole = {name: _weight(experts, share, generator) for name, share in small.items()}
        inputs = [_input(a, width, experts, generator) for a in args]
        try:
            expected = copied_with(module, whole)(*inputs)
            parts = [
                copied_with(module, {n: _part(whole[n], small[n], rank) for n in whole})(*inputs)
                for rank in (0, 1)
            ]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        return bool(expected.abs().max() > 0) and torch.allclose(
            parts[0] + parts[1], expected, rtol=1e-3, atol=1e-4
        )


def _small(share: Share, inner: int) -> Share:
    return Share(share.dim, tuple(part * _INNER // inner for part in share.parts))


def _weight(experts: int, share: Share, generator: torch.Generator) -> Tensor:
    shape = [experts, _WIDTH, _WIDTH]
    shape[share.dim] = share.size
    return torch.randn(shape, generator=generator)


def _part(weight: Tensor, share: Share, rank: int) -> Tensor:
    ranges = RankPosition(rank, 2).ranges(share)
    return torch.cat([weight.narrow(share.dim, a, b - a) for a, b in ranges], share.dim)


def _input(arg: Any, width: int, experts: int, generator: torch.Generator) -> Any:
    """Returns an input like the recorded one, with few tokens; integers choose experts."""
    if not isinstance(arg, Meta):
        return arg
    shape = (_TOKENS, *arg.shape[1:-1], _WIDTH if arg.shape[-1] == width else arg.shape[-1])
    if arg.dtype.is_floating_point:
        return torch.rand(shape, generator=generator)
    return torch.rand(*shape[:-1], experts, generator=generator).argsort(-1)[..., : shape[-1]]


def copied_with(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of the module with these as its own parameters; its own values are not read."""
    parameters = dict(module._parameters)
    try:
        module._parameters.update(dict.fromkeys(parameters))
        copied = copy.deepcopy(module)
    finally:
        module._parameters.update(parameters)
    copied._parameters.update({name: nn.Parameter(weight) for name, weight in weights.items()})
    return copied
