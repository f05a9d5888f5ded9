"""Problem: given which arguments of an instruction a rank has by rows, what computes its rows of the result?

    linear, norm, embedding     its rows alone
    attention                   rows of q; all keys and values, which are gathered; rows of the mask
    sum, mean over the rows     the sum of all ranks' parts
    cross entropy               the sum over its rows, of all ranks, over the number of all targets
    a single row, by an index   all rows, which are gathered

Everything else follows the rules of tensor parallelism (sharding/propagate.py), which follow a divided
dim whatever it means. A rank holds rows [start, stop) of each sequence of a batch; where a view joins batch
and sequence the rows of a rank are as many runs as samples: `Share(0, (tokens,) * samples)`. Under a causal
mask each sequence is two parts, the second of which is divided in reverse order (`Share.mirrored`).

Sources: Llama 3, arXiv 2407.21783, sec. 3.3.2, gathers keys and values as this does; rows of a causal
attention read the keys up to their own. Complexity: O(operands) each. Oracle: tests/dist/test_context.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch import nn

from outsize.program.sharding.context_parallel.calls import AddsUpOverRows, OverRows, ScaledOverRows
from outsize.program.sharding.context_parallel.function_trials import follow_by_trial, has_no_inside
from outsize.program.sharding.expert_parallel.experts import experts_of
from outsize.program.sharding.op_table import RowRule, op_of
from outsize.program.sharding.opaque_modules import runs_own_code, works_by_rows
from outsize.program.sharding.products import product_of
from outsize.program.sharding.propagate import elementwise, follow
from outsize.program.sharding.propagate_views import resized_arguments
from outsize.program.sharding.rank_step import (
    NeedsParts,
    NotPropagated,
    Operand,
    OwnPart,
    RankStep,
    RuleInput,
    Shape,
    op_name,
    ruled,
)
from outsize.program.sharding.scaled_linear import can_be_divided, is_scaled_linear, odd_scales
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Instruction, Ref
from outsize.program.tree import leaves

Rule = Callable[[RuleInput], RankStep]


def follow_rows(call: RuleInput, module: nn.Module | None, ranks: int) -> RankStep:
    """Returns how to compute an instruction of which some operands are divided. Raises NotPropagated."""
    if module is not None and runs_own_code(module):
        raise NotPropagated(f"{type(module).__name__} has hooks or a forward of its own")
    if isinstance(call.instruction.target, AddsUpOverRows):
        return call.instruction.target.follow_rows(call, ranks)
    if module is None:
        return _function(call, ranks)
    if is_scaled_linear(module) and not can_be_divided(module):
        raise NotPropagated(f"its scales are not of tensors, but {odd_scales(module)}")
    product = product_of(call.instruction, module, _ndims(call))
    if product is not None:
        step = _by_vector(call)
        return replace(step, call=ScaledOverRows(product)) if product.asks_ranks else step
    if isinstance(module, nn.Embedding):
        return _looked_up(call, module)
    if type(module) is nn.MultiheadAttention:
        return _module_attention(call, module)
    if call.instruction.parameters():
        return _opaque(call, module)
    return _by_rule(call, lambda each: follow(each, module))


def _function(call: RuleInput, ranks: int) -> RankStep:
    if product_of(call.instruction, None, _ndims(call)) is not None:
        return _by_vector(call)
    kind = op_of(call.instruction).rows
    if kind == "indexed":
        return _by_rule(call, lambda each: _item(each, ranks))
    if has_no_inside(call.instruction.target):
        return follow_by_trial(call)
    rule = _as_any_dim if kind is None else RULES[kind]
    try:
        return _by_rule(call, rule)
    except NotPropagated:
        if not _are_indices(call):
            raise
        return _by_all(call, call.divided())


def _as_any_dim(call: RuleInput) -> RankStep:
    return follow(call, None)


def _by_rule(call: RuleInput, rule: Rule) -> RankStep:
    try:
        return ruled(rule, call)
    except NeedsParts as parted:
        # Parts answer for weights, which can be divided otherwise; where the rows of a batch lie is given.
        raise NotPropagated("it takes some rows apart from others") from parted


def _ndims(call: RuleInput) -> dict[str, int]:
    return {name: len(shape) for name, shape in call.weights.items()}


def _are_indices(call: RuleInput) -> bool:
    """Returns whether all that is divided of a call is integers, such as the experts that a router chose.

    They have no gradient and are few beside the channels of their tokens, so all of them may be gathered.
    """
    metas = [call.metas[operand.slot] for operand in call.divided() if isinstance(operand, Ref)]
    # A mask of bools is as large as what it masks, and what is written must stay on its own ranks.
    integers = not any(m.requires_grad or m.dtype.is_floating_point or m.dtype.is_complex for m in metas)
    return integers and not call.instruction.writes and torch.bool not in {m.dtype for m in metas}


def _by_vector(call: RuleInput) -> RankStep:
    """Handles what works on each vector along the last dims: products, norms as functions."""
    share = call.alone()
    if share.dim == len(call.shape(call.args[0])) - 1:
        raise NotPropagated("a product over what is divided")
    return call.same(share)


def _opaque(call: RuleInput, module: nn.Module) -> RankStep:
    """Handles modules whose code is not recorded, such as routers and experts, by trials on small copies."""
    try:
        return follow(call, module)
    except NotPropagated:
        shares = {call.share(operand) for operand in call.operands()}
        share = shares.pop()
        # Operands that are divided in two ways cannot be compared with one trial on rows.
        if shares or share is None or not _treats_tokens_equally(call, module, share.dim):
            raise
    before = call.shape(next(call.operands()))
    return RankStep(tuple(_kept_or_joined(share, before, shape) for shape in call.results()))


def _treats_tokens_equally(call: RuleInput, module: nn.Module, dim: int) -> bool:
    """Returns whether rows of all tensors give rows of the results, by trials on small copies.

    Experts of which each token has some give each pair of a token and a choice the same in any company.
    """
    if experts_of(call.instruction, module, call.metas) is not None:
        return dim == 0
    args = [call.metas[a.slot] if isinstance(a, Ref) else a for a in call.args]
    if any(isinstance(leaf, Ref) for leaf in leaves(args)):
        return False  # A state in a tuple, such as an LSTM's, has no tokens.
    return not call.instruction.kwargs and works_by_rows(module, args, dim)


def _kept_or_joined(share: Share, before: Shape, after: Shape) -> Share:
    """Returns the share of a result whose tokens are apart, or one dim with the samples before them."""
    if after[: share.dim + 1] == before[: share.dim + 1]:
        return share
    return replace(share, dim=0, parts=share.parts * prod(before[: share.dim]))


def _normalized(call: RuleInput) -> RankStep:
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    if share.dim >= ndim - len(tuple(call.arg(1, "normalized_shape"))):
        raise NotPropagated("a norm over what is divided")
    return call.same(share)


# -- lookups -------------------------------------------------------------------------------------------


def _looked_up(call: RuleInput, module: nn.Embedding) -> RankStep:
    """Handles a lookup; one that sees more than its own index, such as of positions, gets the whole index."""
    if looks_up_by_row(module):
        return call.same(call.alone())
    return _by_all(call, call.divided())


def looks_up_by_row(module: nn.Embedding) -> bool:
    """Returns whether rows of an index give rows of the result, by a trial on a copy with few rows."""
    # Both look at all indices of a batch: the one renormalises weights in place, the other counts how often
    # each is used.
    if module.max_norm is not None or module.scale_grad_by_freq or runs_own_code(module):
        return False
    if type(module) is nn.Embedding:
        return True
    small = _small_copy(module)
    index = torch.randint(0, small.num_embeddings, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            # Rows in the middle: a module that counts positions from its first row gives others there.
            whole, rows = small(index), small(index[:, 2:5])
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
    return whole.shape == (2, 6, _WIDTH) and torch.equal(whole[:, 2:5], rows)


_ROWS, _WIDTH = 16, 4


def _small_copy(module: nn.Embedding) -> nn.Embedding:
    """Returns a copy with new weights of a few rows; the values of the module's own are not read."""
    # `deepcopy` would copy the table of the vocabulary, so it is taken out meanwhile.
    parameters = dict(module._parameters)
    try:
        module._parameters.update(dict.fromkeys(parameters))
        small = copy.deepcopy(module)
    finally:
        module._parameters.update(parameters)
    weight = torch.rand(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(1))
    small._parameters["weight"] = nn.Parameter(weight)
    # An index of padding beyond the few rows would be refused.
    small.num_embeddings, small.embedding_dim, small.padding_idx = _ROWS, _WIDTH, None
    for each in small.modules():
        buffers = each._buffers.items()
        each._buffers.update({n: None if b is None else torch.ones(b.shape) for n, b in buffers})
    return small


# -- attention -----------------------------------------------------------------------------------------


def _attention(call: RuleInput) -> RankStep:
    """Handles scaled_dot_product_attention: rows of q, of the mask, and all keys and values."""
    query, *others = (call.arg(n, name) for n, name in enumerate(("query", "key", "value")))
    ndim, share = len(call.shape(query)), call.share(query)
    by_rows = share is not None and share.dim == ndim - 2
    # Divided by samples or heads, each rank has all that its part of the attention needs.
    if share is not None and not by_rows:
        return follow(call, None)
    gather = {o: s for o in others if (s := call.share(o)) is not None}
    if share is None:
        return _by_all(call, gather)
    # The query would have to be its rows and, as the keys, all of it: an operand has one form in a step.
    if query in gather:
        raise NotPropagated("its query and its keys are one value")
    if call.instruction.random and call.arg(4, "dropout_p", 0.0) > 0:
        raise NotPropagated("its dropout draws one mask for all rows; eager attention and p=0 are divided")
    mask = call.arg(3, "attn_mask")
    if mask is not None and call.share(mask) is not None:
        raise NotPropagated("a mask that is made of divided values")
    cut: dict[Operand, Share] = {}
    # A mask with one row is for all queries: padding of the keys, which every rank reads whole.
    if mask is not None and len(shape := call.shape(mask)) > 1 and shape[-2] > 1:
        cut[mask] = _fitting(share.at(len(shape) - 2), shape)
    return call.same(share, cut=cut, gather=gather, call=OverRows("attention", share))


def is_causal(instruction: Instruction) -> bool:
    """Returns whether a call is attention under its kernel's causal mask, which reads earlier keys alone."""
    attends = op_of(instruction).rows == "attention"
    args, kwargs = instruction.args, instruction.kwargs
    return attends and bool(args[5] if len(args) > 5 else kwargs.get("is_causal", False))


def _module_attention(call: RuleInput, module: nn.MultiheadAttention) -> RankStep:
    """Handles a call of nn.MultiheadAttention: rows of the query, all of key and value."""
    if module.training and module.dropout > 0:
        raise NotPropagated("its dropout draws one mask for all rows; p=0 is divided")
    # The positions of its forward; the caller may have named any of them.
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average", "is_causal")
    query, key, value, _, wants_weights, mask, _, _ = (
        call.arg(n, name, {"need_weights": True}.get(name)) for n, name in enumerate(names)
    )
    share = call.share(query)
    if wants_weights or module.bias_k is not None or module.add_zero_attn:
        raise NotPropagated("it returns its weights, or adds a key")
    if share is None or share.dim != len(call.shape(query)) - (2 if module.batch_first else 3):
        raise NotPropagated("its query is not divided along the tokens")
    cut = {}
    if mask is not None:
        cut[mask] = _fitting(share.at(len(call.shape(mask)) - 2), call.shape(mask))
    gather = {o: s for o in (key, value) if (s := call.share(o)) is not None}
    # One value may be query and keys: its own rows are named apart from what is gathered of it.
    kwargs = dict(zip(("query", "key", "value"), (OwnPart(query), key, value), strict=True))
    more = {n: call.arg(at, n) for at, n in ((3, "key_padding_mask"), (5, "attn_mask"))}
    return call.same(
        share,
        cut=cut,
        gather=gather,
        rewrite=lambda _: ((), {**kwargs, **more, "need_weights": False}),
    )


def _matmul(call: RuleInput) -> RankStep:
    """Handles eager attention: rows of the first matrix, all of the second."""
    a, b, *_ = call.args
    shares, ndims = (call.share(a), call.share(b)), (len(call.shape(a)), len(call.shape(b)))
    # Dims are counted from the end, because the matrices may have other numbers of batch dims.
    behind = [None if s is None else n - s.dim for s, n in zip(shares, ndims, strict=True)]
    if min(ndims) < 2 or shares[1] is None or (behind[0] is not None and behind[0] != 2):
        return follow(call, None)
    if behind[1] is not None and behind[1] > 2:
        return follow(call, None)
    gather = {b: shares[1]}
    if shares[0] is None:
        return _by_all(call, gather)
    return call.same(shares[0].at(len(call.results()[0]) - 2), gather=gather)


def _einsum(call: RuleInput) -> RankStep:
    """Handles an einsum of rows and of keys: the operand whose divided letter is another one is gathered."""
    text, first, *more = call.args
    operands = [first, *more] if isinstance(first, Ref) else list(first)
    if "->" not in text or "." in text:
        raise NotPropagated("an einsum without letters for every dim")
    inputs, result = text.replace(" ", "").split("->")
    named = list(zip(operands, inputs.split(","), strict=True))
    letters = [None if (s := call.share(o)) is None else names[s.dim] for o, names in named]
    # The first divided letter of the result is that of its rows; another one is that of the keys.
    kept = next((each for each in letters if each is not None and each in result), None)
    if kept is None:
        raise NotPropagated("an einsum over what is divided")
    gather = {
        o: s
        for (o, _), each in zip(named, letters, strict=True)
        if each != kept and (s := call.share(o)) is not None
    }
    rest = {slot: s for slot, s in call.shares.items() if all(Ref(slot) != o for o in gather)}
    return replace(follow(replace(call, shares=rest), None), gather=gather)


def _by_all(call: RuleInput, gather: Mapping[Operand, Share]) -> RankStep:
    """Returns the step in which every rank computes all of the result."""
    return call.same(None, gather=gather)


def _fitting(share: Share, shape: Shape) -> Share:
    if shape[share.dim] != share.size:
        raise NotPropagated("sizes differ along the divided dim")
    return share


# -- losses and sums -----------------------------------------------------------------------------------


def _cross_entropy(call: RuleInput) -> RankStep:
    """Handles cross entropies of (rows, classes) or (samples, classes, rows)."""
    logits, target = call.arg(0, "input"), call.arg(1, "target")
    share, shape = call.share(logits), call.shape(logits)
    # Both would override `reduction`, by which the sums of ranks are put together.
    old = [call.instruction.kwargs.get(name) for name in ("size_average", "reduce")]
    if share is None or any(value is not None for value in old):
        raise NotPropagated("a cross entropy whose logits are whole, or with arguments of old")
    classes = 1 if len(shape) > 1 else 0
    if share.dim == classes:
        return _by_all(call, call.divided())
    # A target of probabilities has the dim of classes, too; one of indices has all dims but that.
    by_class = len(call.shape(target)) == len(shape)
    at = share.dim if by_class or share.dim == 0 else share.dim - 1
    cut: dict[Operand, Share] = {}
    if call.share(target) is None:
        cut[target] = _fitting(share.at(at), call.shape(target))
    elif call.share(target) != share.at(at):
        raise NotPropagated("its arguments are divided along different dims")
    kept = call.arg(6, "reduction", "mean") == "none"
    after = share.at(share.dim if share.dim == 0 else share.dim - 1) if kept else None
    return call.same(after, cut=cut, call=OverRows("cross_entropy", share))


def _averaged(call: RuleInput) -> RankStep:
    """Handles losses that are means or sums over all elements."""
    shape = max((call.shape(o) for o in call.operands()), key=len)
    if call.instruction.kwargs.get("reduction", "mean") == "none":
        raise NotPropagated("a loss of each element")
    others = [v for k, v in call.instruction.kwargs.items() if k not in ("reduction", "delta", "beta")]
    if len(call.args) != 2 or any(v is not None for v in others):
        raise NotPropagated("a loss with weights, or with arguments of old")
    # Elementwise rules read the shape of the result: that before the mean, where a row is still a row.
    each = replace(call, metas=_with_result(call, shape))
    step = elementwise(each)
    (share,) = step.out
    assert share is not None
    return call.same(None, cut=step.cut, call=OverRows("average", share))


def _with_result(call: RuleInput, shape: Shape) -> list[Any]:
    metas, (slot,) = list(call.metas), call.instruction.defines()
    metas[slot] = replace(metas[slot], shape=shape)
    return metas


def _sum_or_mean(call: RuleInput) -> RankStep:
    """Handles sums and means: over the rows, they are the sums of all ranks' parts."""
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    dims = call.arg(1, "dim", call.instruction.kwargs.get("axis"))
    if dims is not None and share.dim not in {int(d) % ndim for d in leaves(dims)}:
        return follow(call, None)
    averages = op_name(call.instruction) == "mean"
    return call.same(None, call=OverRows("mean" if averages else "sum", share))


def _chosen(call: RuleInput) -> RankStep:
    """Handles topk, sort, max and min over other dims than the divided one."""
    share, ndim, name = call.alone(), len(call.shape(call.args[0])), op_name(call.instruction)
    dim = call.arg(2 if name == "topk" else 1, "dim", -1 if name in ("topk", "sort") else None)
    if dim is None or int(dim) % ndim == share.dim:
        raise NotPropagated("it chooses among what is divided")
    return call.same(share)


def _picked(call: RuleInput) -> RankStep:
    """Handles gather(x, dim, index) along another dim than the divided one: rows of x and of the index."""
    x, dim, index = (call.arg(n, name) for n, name in enumerate(("input", "dim", "index")))
    share, shape = call.share(x), call.shape(index)
    if share is None or int(dim) % len(shape) == share.dim:
        raise NotPropagated("it picks among what is divided")
    if call.share(index) not in (None, share):
        raise NotPropagated("its arguments are divided along different dims")
    cut: dict[Operand, Share] = {} if call.share(index) else {index: _fitting(share, shape)}
    return call.same(share, cut=cut)


# -- views ---------------------------------------------------------------------------------------------


def _view(call: RuleInput) -> RankStep:
    """Handles views that leave the rows of a rank apart; batch and sequence may be joined, and parted."""
    share, shape = call.alone(), call.results()[0]
    if any(not isinstance(leaf, int) for leaf in leaves((call.args[1:], call.instruction.kwargs))):
        raise NotPropagated("a view of another dtype")
    new = _viewed(share, call.shape(call.args[0]), shape)
    return call.same(new, rewrite=lambda place: resized_arguments(call, place, new, shape))


def _viewed(share: Share, before: Shape, after: Shape) -> Share:
    # Two sequences of 4 rows in one dim are the parts (4, 4): a rank has a run of rows of each.
    runs = share.parts * prod(before[: share.dim])
    # A mirrored sequence is a pair of parts: a dim with half of a pair would mirror nothing.
    inner, least = prod(before[share.dim + 1 :]), 2 if share.mirrored else 1
    for dim, size in enumerate(after):
        outside = prod(after[:dim])
        parts = runs[: len(runs) // outside] if outside else ()
        is_equal = bool(parts) and len(parts) % least == 0 and parts * outside == runs
        if is_equal and sum(parts) == size and prod(after[dim + 1 :]) == inner:
            return replace(share, dim=dim, parts=parts)
    raise NotPropagated(f"a view to {after} does not keep the rows of the sequence apart")


def _item(call: RuleInput, ranks: int) -> RankStep:
    """Handles an index: of the first rows, each rank takes those that it has; for others all are gathered."""
    first_rows = _first_rows(call, ranks)
    if first_rows is not None:
        return first_rows
    try:
        return follow(call, None)
    except (NotPropagated, NeedsParts):
        return _by_all(call, call.divided())


def _first_rows(call: RuleInput, ranks: int) -> RankStep | None:
    """Returns the step for x[..., :stop, ...] that leaves the rows of every rank where they are."""
    share, index = call.share(call.args[0]), call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    # Sequences that are joined in one dim end in the middle of it, where no slice ends.
    runs = 2 if share is not None and share.mirrored else 1
    if share is None or len(share.parts) > runs:
        return None
    if not all(i is Ellipsis or isinstance(i, slice) for i in index):
        return None
    ndim = len(call.shape(call.args[0]))
    at = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
    left = ndim - sum(isinstance(i, slice) for i in index)
    full = [*index[:at], *[slice(None)] * left, *index[at + 1 :]]
    start, stop, step = full[share.dim].indices(share.size)
    last = share.parts[-1] - (share.size - stop)
    if step != 1 or start != 0 or stop >= share.size or last < 1:
        return None
    new = replace(share, parts=(*share.parts[:-1], last))
    # `logits[:, :-1]` shortens the last rank alone. Divided anew, the shorter sequence may have other edges:
    # then a rank has not the rows that the share says, and all are gathered.
    places = [RankPosition(rank, ranks) for rank in range(ranks)]
    kept = ([(min(a, stop), min(b, stop)) for a, b in place.ranges(share)] for place in places)
    if [place.ranges(new) for place in places] != list(kept) or not all(map(_any_row(new), places)):
        return None

    def rewrite(place: RankPosition) -> tuple[tuple[Any, ...], dict[str, Any]]:
        local = (*full[: share.dim], slice(0, place.size(new)), *full[share.dim + 1 :])
        return (call.args[0], local), {}

    return call.same(new, rewrite=rewrite)


def _any_row(share: Share) -> Callable[[RankPosition], bool]:
    return lambda place: place.size(share) > 0


def _joined(call: RuleInput) -> RankStep:
    """Handles cat, whose empty pieces (a new cache) do not matter."""
    pieces = [p for p in call.args[0] if prod(call.shape(p))]
    if len(pieces) == 1 and (share := call.share(pieces[0])) is not None:
        return call.same(share)
    return follow(call, None)


def _stacked(call: RuleInput) -> RankStep:
    """Handles stack: its pieces are divided alike, whole ones are cut."""
    pieces = call.args[0]
    share = next(s for p in pieces if (s := call.share(p)) is not None)
    if any(call.share(p) not in (None, share) for p in pieces):
        raise NotPropagated("its pieces are divided along different dims")
    # The new dim counts among those of the result, and moves the rows behind it by one.
    at = int(call.arg(1, "dim", 0)) % len(call.results()[0])
    cut: dict[Operand, Share] = {p: _fitting(share, call.shape(p)) for p in pieces if call.share(p) is None}
    return call.same(share.at(share.dim + (at <= share.dim)), cut=cut)


def _repeated(call: RuleInput) -> RankStep:
    """Handles repeat: sequences one after the other are runs of rows."""
    share, times = call.alone(), [int(n) for n in leaves(call.args[1:])]
    # Where there are more numbers than dims, `repeat` puts the new dims in front.
    dim = share.dim + len(times) - len(call.shape(call.args[0]))
    return call.same(replace(share, dim=dim, parts=share.parts * times[dim]))


def _added_product(call: RuleInput) -> RankStep:
    """Handles baddbmm: rows of the first matrix and of what is added, all of the second matrix."""
    added, first, second = (call.arg(n, name) for n, name in enumerate(("input", "batch1", "batch2")))
    share, shape = call.share(first), call.shape(added)
    if share is None or share.dim != 1:
        raise NotPropagated("its first matrix is not divided by rows")
    cut: dict[Operand, Share] = {}
    # One row that is added to all of them is no row of any rank.
    if call.share(added) is None and shape[-2] > 1:
        cut[added] = _fitting(share.at(len(shape) - 2), shape)
    gather = {second: s} if (s := call.share(second)) is not None else {}
    return call.same(share, cut=cut, gather=gather)


def _viewed_as(call: RuleInput) -> RankStep:
    """Handles view_as: the other value must have its own rows already."""
    share, other = call.share(call.args[0]), call.share(call.args[1])
    if share is None or other is None or _viewed(share, call.shape(call.args[0]), call.results()[0]) != other:
        raise NotPropagated("it is viewed as what is not divided so")
    return call.same(other)


def _emptied(call: RuleInput) -> RankStep:
    """Handles `x.new_empty(...)`, which is written later: of rows, where it has the sizes of x up to them."""
    share, shape = call.share(call.args[0]), call.results()[0]
    before = call.shape(call.args[0])
    if share is None or shape[: share.dim + 1] != before[: share.dim + 1]:
        return _made_whole(call)
    sizes = [*shape]

    def rewrite(place: RankPosition) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes[share.dim] = place.size(share)
        return (call.args[0], tuple(sizes)), {k: v for k, v in call.instruction.kwargs.items() if k != "size"}

    return call.same(share, rewrite=rewrite)


def _copied(call: RuleInput) -> RankStep:
    """Handles x.copy_(y): rows of y into rows of x."""
    if call.share(call.args[0]) is None:
        raise NotPropagated("rows are written into a whole value")
    return elementwise(call)


def _made_whole(call: RuleInput) -> RankStep:
    """Handles `x.new_zeros(...)`, which reads nothing of x."""
    return call.same(None)


RULES: Final[Mapping[RowRule, Rule]] = {
    "attention": _attention,
    "multiplied": _matmul,
    "einsum": _einsum,
    "cross entropy": _cross_entropy,
    "averaged": _averaged,
    "summed": _sum_or_mean,
    "chosen": _chosen,
    "picked": _picked,
    "viewed": _view,
    "normalized": _normalized,
    "joined": _joined,
    "stacked": _stacked,
    "repeated": _repeated,
    "added product": _added_product,
    "viewed as": _viewed_as,
    "copied": _copied,
    "emptied": _emptied,
    "made whole": _made_whole,
}
