"""Problem: given which dims of an instruction's arguments are divided among ranks, which of its results are?

One rule for each kind of function; what has no rule is not followed. A rule says for every result its Share
(None: all ranks have the whole), which whole operands have to be cut to match, and how arguments that name
sizes (of views, splits) read on a rank. Source: GSPMD (arXiv 2105.04663, sec. 3.5) propagates shardings so;
deviations: along one mesh dim, forward only, and without partial sums. Complexity: O(operands) each.
Oracle: tests/dist/test_tensor_parallel.py, numbers of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from outsize.program.alike import works_by_vector
from outsize.program.follow_views import VIEWS
from outsize.program.share import Share
from outsize.program.step import Call, Lost, Operand, Shape, Step, op_name
from outsize.program.tape import Ref, Weight
from outsize.program.tree import leaves


def elementwise(call: Call) -> Step:
    """Broadcast from the right; a whole operand that reaches along the divided dim is cut."""
    shape = max(call.results(), key=len)
    return _aligned(call, shape, list(call.operands()))


def _aligned(call: Call, shape: Shape, operands: Sequence[Operand]) -> Step:
    share, behind = _common(call, operands)
    cut: dict[Operand, Share] = {}
    for operand in operands:
        own = call.shape(operand)
        if call.share(operand) is None and len(own) >= behind and own[-behind] > 1:
            cut[operand] = _cut(operand, own, share.at(len(own) - behind), call)
    return call.same(share.at(len(shape) - behind), cut=cut)


def _common(call: Call, operands: Sequence[Operand]) -> tuple[Share, int]:
    """The share in which the divided operands agree, and its dim counted from behind."""
    found = [(call.share(o), len(call.shape(o))) for o in operands]
    known = [(share, ndim - share.dim) for share, ndim in found if share is not None]
    share, behind = known[0]
    if any(s.layout != share.layout or b != behind for s, b in known):
        raise Lost("its arguments are divided along different dims")
    return _union(share, [s for s, _ in known]), behind


def _union(share: Share, shares: Sequence[Share]) -> Share:
    origins = frozenset[str]().union(*(s.origins for s in shares))
    return Share(share.dim, share.parts, origins, share.complete)


def _cut(operand: Operand, shape: Shape, share: Share, call: Call) -> Share:
    """A whole operand may be cut, except along its last dim when it carries gradients: that is the stream."""
    trains = isinstance(operand, Weight) or call.metas[operand.slot].requires_grad
    if trains and isinstance(operand, Ref) and share.dim == len(shape) - 1:
        raise Lost("it meets a value that is whole")
    if shape[share.dim] != share.size:
        raise Lost("sizes differ along the divided dim")
    return share


def dropout(call: Call) -> Step:
    """Its mask is drawn for the whole value (Step.dropout)."""
    share = call.alone()
    return call.same(share, dropout=share)


def joined(call: Call) -> Step:
    """cat along another dim than the divided one; pieces that are whole are cut, empty ones do not matter."""
    shape = call.results()[0]
    pieces = [p for p in call.args[0] if len(call.shape(p)) == len(shape)]
    share, behind = _common(call, pieces)
    if share.dim == int(call.arg(1, "dim", 0)) % len(shape):
        raise Lost("it joins along the divided dim")
    whole = [p for p in pieces if call.share(p) is None]
    cut = {p: _cut(p, call.shape(p), share.at(len(shape) - behind), call) for p in whole}
    return call.same(share, cut=cut)


# -- over dims -----------------------------------------------------------------------------------------


def over(call: Call) -> Step:
    """softmax, sum, mean and the like, over other dims than the divided one."""
    share, ndim = call.alone(), len(call.shape(call.args[0]))
    given = call.arg(1, "dim", call.instruction.kwargs.get("axis"))
    dims = None if given is None else {int(d) % ndim for d in leaves(given)}
    if dims is None or share.dim in dims:
        raise Lost(f"{op_name(call.instruction)} goes over what is divided")
    gone = ndim - len(call.results()[0])
    return call.same(share.at(share.dim - (sum(d < share.dim for d in dims) if gone else 0)))


def matmul(call: Call) -> Step:
    """Batch dims as elementwise; rows of the first, columns of the second."""
    a, b, *_ = call.args
    if len(call.shape(a)) < 2 or len(call.shape(b)) < 2:
        raise Lost("a product with a vector")
    shape = call.results()[0]
    behind = {o: len(call.shape(o)) - s.dim for o, s in call.divided().items()}
    if all(at > 2 for at in behind.values()):
        return _aligned(call, shape, [a, b])
    if behind == {a: 2} or behind == {b: 1}:
        return call.same(next(iter(call.divided().values())).at(len(shape) - next(iter(behind.values()))))
    raise Lost("a product over what is divided")


def attention(call: Call) -> Step:
    """scaled_dot_product_attention: heads of q, k, v; a mask with heads is cut."""
    operands = [call.arg(n, name) for n, name in enumerate(("query", "key", "value"))]
    ndim = len(call.shape(operands[0]))
    shares = [
        s for o in operands if (s := call.share(o)) is not None and s.dim < ndim - 2 and len(s.parts) == 1
    ]
    if len(shares) < 3 or len({s.dim for s in shares}) > 1:
        raise Lost("attention whose q, k and v are not divided by heads alike")
    share = _union(shares[0], shares)
    random = call.instruction.random and call.arg(4, "dropout_p", 0.0) > 0
    return call.same(share, cut=_cut_mask(call, ndim - share.dim, share), dropout=share if random else None)


def _cut_mask(call: Call, behind: int, share: Share) -> dict[Operand, Share]:
    mask = call.arg(3, "attn_mask")
    if mask is None or call.share(mask) is not None:
        return {}
    shape = call.shape(mask)
    return {mask: share.at(len(shape) - behind)} if len(shape) >= behind and shape[-behind] > 1 else {}


def einsum(call: Call) -> Step:
    """The letter of the divided dim, wherever it stands."""
    text, first, *more = call.args
    operands = [first, *more] if isinstance(first, Ref | Weight) else list(first)
    if not isinstance(text, str) or "->" not in text or "." in text:
        raise Lost("an einsum without letters for every dim")
    inputs, result = text.replace(" ", "").split("->")
    named = list(zip(operands, inputs.split(","), strict=True))
    shares = list(call.divided().values())
    divided = {letters[s.dim] for o, letters in named if (s := call.share(o)) is not None}
    letter, share = next(iter(divided)), _union(shares[0], shares)
    if len(divided) > 1 or letter not in result or len({s.layout for s in shares}) > 1:
        raise Lost("an einsum over what is divided")
    whole = [(o, letters) for o, letters in named if letter in letters and call.share(o) is None]
    cut = {o: _cut(o, call.shape(o), share.at(letters.index(letter)), call) for o, letters in whole}
    return call.same(share.at(result.index(letter)), cut=cut)


def _by_vector(call: Call, module: nn.Module) -> Step:
    """A module with weights, such as a norm, that treats each vector alike."""
    share, shape = call.alone(), call.shape(call.args[0])
    if call.results() != [shape] or not works_by_vector(module, shape, share.dim):
        raise Lost(f"there is no rule for {type(module).__name__}")
    return call.same(share)


def entering(call: Call, step: Step) -> list[str]:
    """Parameters of which a rank gets a part of the gradient: whole ones that meet what is divided."""
    cut = {leaf.name for leaf in step.cut if isinstance(leaf, Weight)}
    return [name for name in call.instruction.parameters() if name not in cut]


# -- which rule ----------------------------------------------------------------------------------------

_ELEMENTWISE = """
add sub rsub mul div truediv floordiv pow neg exp exp2 log log1p sqrt rsqrt tanh sigmoid relu relu6
gelu silu mish elu selu celu leaky_relu hardswish hardsigmoid hardtanh softplus logsigmoid erf abs
sign square sin cos clamp clip minimum maximum where masked_fill eq ne lt le gt ge logical_and
logical_or logical_not and or xor invert float double half bfloat16 to type type_as contiguous clone
detach nan_to_num reciprocal addcmul lerp isinf isnan zeros_like ones_like full_like iadd isub imul
itruediv ipow radd rmul rtruediv rpow rdiv multiply divide subtract
"""
_OVER = "softmax log_softmax sum mean amax amin logsumexp norm var std cumsum all any argmax"


def _each(names: str, rule: Callable[[Call], Step]) -> dict[str, Callable[[Call], Step]]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Callable[[Call], Step]] = {
    **VIEWS,
    **_each(_ELEMENTWISE, elementwise),
    **_each(_OVER, over),
    **_each("cat concat", joined),
    **_each("matmul bmm", matmul),
    "einsum": einsum,
    "dropout": dropout,
    "scaled_dot_product_attention": attention,
}
_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Tanh),
    *(nn.Sigmoid, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.LogSigmoid, nn.Identity),
)


def follow(call: Call, module: nn.Module | None) -> Step:
    """The step of an instruction some of whose operands are divided. Raises Lost and Parted."""
    if module is not None and call.instruction.parameters():
        return _by_vector(call, module)
    if module is None:
        rule = RULES.get(op_name(call.instruction))
    else:
        rule = (
            elementwise if type(module) in _ACTIVATIONS else dropout if type(module) is nn.Dropout else None
        )
    if rule is None:
        what = op_name(call.instruction) if module is None else type(module).__name__
        raise Lost(f"there is no rule for {what}")
    try:
        return rule(call)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # Functions are called in many forms; one that its rule does not know is not followed.
        raise Lost(f"there is no rule for such a {op_name(call.instruction)}") from error
