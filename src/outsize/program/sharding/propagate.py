"""Problem: given which dims of an instruction's arguments are sharded, which dims of its results are?

Each kind of function has one rule, and op_table.py says which functions are of a kind; one without a rule is
not followed. A rule returns for every result its Share (None: all ranks have the whole), which whole operands
have to be cut to match, and a rank's arguments that name sizes (of views, splits). Source: GSPMD (arXiv
2105.04663, sec. 3.5) propagates shardings like this; deviations: along one mesh dim, forward only, and
without partial sums. Complexity: O(operands) each. Oracle: tests/dist/test_tensor_parallel.py, numbers of one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from torch import nn

from outsize.program.sharding.axis_group import CollectiveCall, collective_of, inner_call
from outsize.program.sharding.op_table import DimRule, op_of
from outsize.program.sharding.opaque_modules import runs_own_code, works_by_vector
from outsize.program.sharding.propagate_views import VIEWS
from outsize.program.sharding.rank_step import (
    NeedsParts,
    NotPropagated,
    Operand,
    RankStep,
    RuleInput,
    Shape,
    op_name,
    ruled,
)
from outsize.program.sharding.share import Share
from outsize.program.tape import Instruction, Ref, Weight
from outsize.program.tree import leaves


def elementwise(call: RuleInput) -> RankStep:
    """Broadcasts from the right; a whole operand that reaches along the sharded dim is cut."""
    shape = max(call.results(), key=len)
    return _aligned(call, shape, list(call.operands()))


def _aligned(call: RuleInput, shape: Shape, operands: Sequence[Operand]) -> RankStep:
    share, behind = _common(call, operands)
    cut: dict[Operand, Share] = {}
    for operand in operands:
        shape_of_operand = call.shape(operand)
        if call.share(operand) is None and len(shape_of_operand) >= behind and shape_of_operand[-behind] > 1:
            cut[operand] = _cut(operand, shape_of_operand, share.at(len(shape_of_operand) - behind), call)
    return call.same(share.at(len(shape) - behind), cut=cut)


def _common(call: RuleInput, operands: Sequence[Operand]) -> tuple[Share, int]:
    """Returns the share in which the sharded operands agree, and its dim counted from the end."""
    candidates = [(call.share(o), len(call.shape(o))) for o in operands]
    known = [(share, ndim - share.dim) for share, ndim in candidates if share is not None]
    share, behind = known[0]
    if any((s.layout, s.mirrored, b) != (share.layout, share.mirrored, behind) for s, b in known):
        raise NotPropagated("its arguments are divided along different dims")
    return _union(share, [s for s, _ in known]), behind


def _union(share: Share, shares: Sequence[Share]) -> Share:
    origins = frozenset[str]().union(*(s.origins for s in shares))
    return replace(share, origins=origins)


def _cut(operand: Operand, shape: Shape, share: Share, call: RuleInput) -> Share:
    """Cuts a whole operand, except along its last dim when it carries gradients: that is the
    residual stream.
    """
    trains = isinstance(operand, Weight) or call.metas[operand.slot].requires_grad
    if trains and isinstance(operand, Ref) and share.dim == len(shape) - 1:
        raise NotPropagated("it meets a value that is whole")
    if shape[share.dim] != share.size:
        raise NotPropagated("sizes differ along the divided dim")
    return share


def dropout(call: RuleInput) -> RankStep:
    """Draws the mask for the whole value (RankStep.dropout)."""
    share = call.alone()
    return call.same(share, dropout=share)


def concatenate(call: RuleInput) -> RankStep:
    """Joins pieces; whole ones are cut, empty ones do not matter. Of those that are divided along the joined
    dim each rank joins its own, so that the result has the parts of all.
    """
    shape = call.results()[0]
    pieces = [p for p in call.args[0] if len(call.shape(p)) == len(shape)]
    shares = [share for share in map(call.share, pieces) if share is not None]
    dim = int(call.arg(1, "dim", 0)) % len(shape)
    if {share.dim for share in shares} == {dim}:
        return call.same(_joined(shares, len(pieces)))
    share, behind = _common(call, pieces)
    whole = [p for p in pieces if call.share(p) is None]
    cut = {p: _cut(p, call.shape(p), share.at(len(shape) - behind), call) for p in whole}
    return call.same(share, cut=cut)


def _joined(shares: Sequence[Share], pieces: int) -> Share:
    """Returns the parts of all pieces, of one size. Raises NeedsParts of a piece that has larger ones."""
    if len(shares) < pieces or any(share.mirrored or not share.complete for share in shares):
        raise NotPropagated("it joins along the divided dim what is whole, or in another order")
    parts = tuple(part for share in shares for part in share.parts)
    least = max(1, min(parts))
    if any(part % least for part in parts):
        raise NotPropagated(f"it joins parts of {parts}, of which the least does not divide the others")
    for share in shares:
        if set(share.parts) != {least}:
            raise NeedsParts(share, [Fraction(end, share.size) for end in range(least, share.size, least)])
    return replace(_union(shares[0], shares), parts=parts)


def stack(call: RuleInput) -> RankStep:
    """Joins pieces that are divided alike along a dim of their own; whole ones are cut."""
    share, behind = _common(call, call.args[0])
    ndim = len(call.results()[0])
    dim = int(call.arg(1, "dim", 0)) % ndim
    whole = [p for p in call.args[0] if call.share(p) is None]
    cut = {p: _cut(p, call.shape(p), share.at(ndim - 1 - behind), call) for p in whole}
    return call.same(share.at(share.dim + (dim <= share.dim)), cut=cut)


# -- over dims -----------------------------------------------------------------------------------------


def reduce_dims(call: RuleInput) -> RankStep:
    """Reduces (softmax, sum, mean and the like) over other dims than the sharded one."""
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    dim_argument = call.arg(1, "dim", call.instruction.kwargs.get("axis"))
    dims = None if dim_argument is None else {int(d) % ndim for d in leaves(dim_argument)}
    if dims is None or share.dim in dims:
        raise NotPropagated(f"{op_name(call.instruction)} goes over what is divided")
    gone = ndim - len(call.results()[0])
    return call.same(share.at(share.dim - (sum(d < share.dim for d in dims) if gone else 0)))


def matmul(call: RuleInput) -> RankStep:
    """Multiplies matrices: batch dims as elementwise; rows of the first, columns of the second."""
    a, b, *_ = call.args
    if len(call.shape(a)) < 2 or len(call.shape(b)) < 2:
        raise NotPropagated("a product with a vector")
    shape = call.results()[0]
    behind = {o: len(call.shape(o)) - s.dim for o, s in call.divided().items()}
    if all(at > 2 for at in behind.values()):
        return _aligned(call, shape, [a, b])
    if behind == {a: 2} or behind == {b: 1}:
        return call.same(next(iter(call.divided().values())).at(len(shape) - next(iter(behind.values()))))
    raise NotPropagated("a product over what is divided")


def attention(call: RuleInput) -> RankStep:
    """Applies scaled_dot_product_attention by heads of q, k, v; a mask with heads is cut."""
    operands = [call.arg(n, name) for n, name in enumerate(("query", "key", "value"))]
    ndim = len(call.shape(operands[0]))
    shares = [
        s for o in operands if (s := call.share(o)) is not None and s.dim < ndim - 2 and len(s.parts) == 1
    ]
    if len(shares) < 3 or len({s.dim for s in shares}) > 1:
        raise NotPropagated("attention whose q, k and v are not divided by heads alike")
    share = _union(shares[0], shares)
    random = call.instruction.random and call.arg(4, "dropout_p", 0.0) > 0
    return call.same(share, cut=_cut_mask(call, ndim - share.dim, share), dropout=share if random else None)


def _cut_mask(call: RuleInput, behind: int, share: Share) -> dict[Operand, Share]:
    mask = call.arg(3, "attn_mask")
    if mask is None or call.share(mask) is not None:
        return {}
    shape = call.shape(mask)
    return {mask: share.at(len(shape) - behind)} if len(shape) >= behind and shape[-behind] > 1 else {}


def einsum(call: RuleInput) -> RankStep:
    """Follows the letter of the sharded dim, wherever it is."""
    text, first, *more = call.args
    operands = [first, *more] if isinstance(first, Ref | Weight) else list(first)
    if not isinstance(text, str) or "->" not in text or "." in text:
        raise NotPropagated("an einsum without letters for every dim")
    inputs, result = text.replace(" ", "").split("->")
    named = list(zip(operands, inputs.split(","), strict=True))
    shares = list(call.divided().values())
    divided = {letters[s.dim] for o, letters in named if (s := call.share(o)) is not None}
    letter, share = next(iter(divided)), _union(shares[0], shares)
    if len(divided) > 1 or letter not in result or len({s.layout for s in shares}) > 1:
        raise NotPropagated("an einsum over what is divided")
    whole = [(o, letters) for o, letters in named if letter in letters and call.share(o) is None]
    cut = {o: _cut(o, call.shape(o), share.at(letters.index(letter)), call) for o, letters in whole}
    return call.same(share.at(result.index(letter)), cut=cut)


def _by_vector(call: RuleInput, module: nn.Module) -> RankStep:
    """Applies a module such as a norm, with weights or without, that treats each vector equally."""
    share, shape = call.alone(), call.shape(call.args[0])
    is_tried = len(call.args) == 1 and not call.instruction.kwargs and not call.instruction.random
    if not is_tried or call.results() != [shape] or not works_by_vector(module, shape, share.dim):
        raise NotPropagated(f"there is no rule for {type(module).__name__}")
    return call.same(share)


def entering(call: RuleInput, step: RankStep) -> list[str]:
    """Returns the whole parameters that meet sharded values, of which a rank gets a part of the gradient."""
    cut = {leaf.name for leaf in step.cut if isinstance(leaf, Weight)}
    return [name for name in call.instruction.parameters() if name not in cut]


# -- which rule ----------------------------------------------------------------------------------------

RULES: Mapping[DimRule, Callable[[RuleInput], RankStep]] = {
    **VIEWS,
    "elementwise": elementwise,
    "reduced": reduce_dims,
    "concatenated": concatenate,
    "stacked": stack,
    "matmul": matmul,
    "einsum": einsum,
    "dropout": dropout,
    "attention": attention,
}
_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Tanh),
    *(nn.Sigmoid, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.LogSigmoid, nn.Identity),
)


def follow(call: RuleInput, module: nn.Module | None) -> RankStep:
    """Returns the step of an instruction with some sharded operands. Raises NotPropagated and NeedsParts."""
    if module is not None and runs_own_code(module):
        raise NotPropagated(f"{type(module).__name__} has hooks or a forward of its own")
    collective = collective_of(call.instruction)
    if collective is not None:
        return _within(collective, call)
    if module is not None and call.instruction.parameters():
        return _by_vector(call, module)
    rule = _rule_of(call.instruction) if module is None else _rule_of_module(module)
    if rule is None:
        raise NotPropagated(f"there is no rule for {op_name(call.instruction)}")
    return ruled(rule, call)


def _within(collective: CollectiveCall, call: RuleInput) -> RankStep:
    """Follows what ranks of another axis compute together: what is left of it for this axis to divide."""
    if collective.function is not None:
        inner = replace(call, instruction=inner_call(call.instruction))
        return _with_mask_of_both(follow(inner, None), call)
    share = call.alone()
    if collective.share is not None and share.dim == collective.share.dim:
        raise NotPropagated("rows of the sequence and parts of a layer are along one dim")
    return call.same(share)


def _with_mask_of_both(step: RankStep, call: RuleInput) -> RankStep:
    """Returns the step of a dropout whose mask is drawn for all parts of both axes."""
    share, args, kwargs = step.dropout, call.args, call.instruction.kwargs
    if share is None:
        return step
    return replace(step, dropout=None, rewrite=lambda place: ((*args, (share, place)), kwargs))


def _rule_of(instruction: Instruction) -> Callable[[RuleInput], RankStep] | None:
    """Returns the rule of a function."""
    kind = op_of(instruction).dims
    return None if kind is None else RULES[kind]


def _rule_of_module(module: nn.Module) -> Callable[[RuleInput], RankStep]:
    """Returns the rule of a module without weights."""
    if type(module) is nn.Dropout:
        return dropout
    return elementwise if type(module) in _ACTIVATIONS else partial(_by_vector, module=module)
