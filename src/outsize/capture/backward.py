"""What the backward of one ATen op costs, from the forward call alone: no backward is ever run.

For each argument that requires a gradient, with g the gradient of the result and a hat for gradients:

    mm(a, b)          a^ = g b', b^ = a' g       the FLOPs of the forward for each; reads g and the other
    convolution       likewise                   (also grouped ones, where torch's own formula for the
                                                 weight, FlopCounterMode, counts `groups` times too many)
    bias              the sum of g               no FLOPs; reads g, writes the bias
    attention         q^, k^, v^ in one kernel   five products where the forward has two: 2.5 times
                                                 (arXiv 2205.14135, algorithm 4; torch's formula)
    normalisation     x^ reads g and x           the affine weights, in a kernel of theirs, read both again
    embedding         scatters g into zeros      bytes of the table, no FLOPs
    element by element                           reads g and what the derivative needs, writes the argument;
                                                 sums where the argument was broadcast
    sum, views        nothing: g is viewed       slices and splits write zeros or a concatenation

Bytes count tensors of the ATen ops that torch's derivatives run (tools/autograd/derivatives.yaml), each
read or written once. Complexity: O(arguments) per op. Oracle: tests/unit/capture/test_costs_truth.py
runs the real backward, with FlopCounterMode for FLOPs and a dispatch mode for bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from outsize.ir.graph import Family


@final
@dataclass(slots=True)
class Call:
    """One op that ran: bytes of each tensor argument and of the results together.

    `wanted` are the indices of the arguments that require a gradient.
    """

    family: Family
    flops: int
    sizes: list[int]
    out_bytes: int
    wanted: list[int]


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """The gradient of one argument; no launch where the same kernel gives another's."""

    family: Family
    flops: int
    moved_bytes: int
    launches: int = 1


# Ops whose derivative is written with their result: it is kept even if nobody else wants it.
_WITH_RESULT = """exp exp2 expm1 sigmoid tanh sqrt rsqrt reciprocal relu threshold elu _softmax _log_softmax
    _safe_softmax logsumexp cumprod prod norm linalg_vector_norm max_pool2d_with_indices native_dropout
    logcumsumexp tan atanh sgn hardsigmoid"""
KEEP_RESULT = frozenset(_WITH_RESULT.split())

# Ops whose weights' gradients a backward in two halves puts off (run/split_backward.py).
WAITING: frozenset[Family] = frozenset({"matmul", "convolution", "embedding"})

Rule = Callable[[Call, int], "Pass | None"]


def rule_of(name: str, family: Family, *, view: bool) -> Rule:
    """The rule for an op by its name, for unknown ones by its family."""
    known = _RULES.get(name.removesuffix("_"))
    if known is not None:
        return known
    return _nothing if view else _BY_FAMILY.get(family, _element)


def _nothing(_call: Call, _argument: int) -> Pass | None:
    """The gradient of the result, or a view of it, is the gradient of the argument."""
    return None


def _product(call: Call, _argument: int) -> Pass:
    """Without a bias: reads g and the other factor, writes this one."""
    return Pass(call.family, call.flops, call.out_bytes + sum(call.sizes))


def _bias_first(call: Call, argument: int) -> Pass:
    return _matrix_or_bias(call, argument, 0)


def _bias_third(call: Call, argument: int) -> Pass:
    return _matrix_or_bias(call, argument, 2)


def _matrix_or_bias(call: Call, argument: int, bias: int) -> Pass:
    if argument == bias:
        return Pass("reduction", 0, call.out_bytes + call.sizes[bias])
    factors = sum(size for index, size in enumerate(call.sizes) if index != bias)
    return Pass(call.family, call.flops, call.out_bytes + factors)


def _attention(call: Call, argument: int) -> Pass | None:
    """One kernel gives all three; it counts for the first of them that wants a gradient."""
    if argument != call.wanted[0]:
        return None
    q_k_v = sum(call.sizes[:3])
    return Pass(call.family, call.flops * 5 // 2, 2 * call.out_bytes + 2 * q_k_v)


def _norm(call: Call, argument: int) -> Pass:
    """x^ reads g and x; one kernel more that reads both gives the affine weights."""
    affine = [i for i in call.wanted if i > 0]
    if argument in affine[1:]:
        return Pass(call.family, 0, call.sizes[argument], launches=0)
    return Pass(call.family, 0, call.out_bytes + call.sizes[0] + call.sizes[argument])


def _element(call: Call, argument: int) -> Pass:
    """Reads g and the other argument, or its own when it is alone; writes, and sums when it was broadcast."""
    own = call.sizes[argument]
    others = sum(call.sizes) - own if len(call.sizes) > 1 else own
    broadcast = call.out_bytes if own < call.out_bytes else 0
    return Pass(call.family, 0, call.out_bytes + others + 2 * broadcast + own)


def _unary(call: Call, argument: int) -> Pass:
    """Reads g and the argument (or the result), writes the gradient."""
    return Pass(call.family, 0, call.out_bytes + 2 * call.sizes[argument])


def _loss(call: Call, argument: int) -> Pass:
    """Reads g and all arguments, writes the gradient."""
    return Pass(call.family, 0, call.out_bytes + sum(call.sizes) + call.sizes[argument])


def _spread(call: Call, argument: int) -> Pass:
    """Reads g, writes the argument's gradient."""
    return Pass(call.family, 0, call.out_bytes + call.sizes[argument])


def _indexed(call: Call, argument: int) -> Pass:
    """Reads g and the indices, writes the whole argument's gradient."""
    return Pass(call.family, 0, call.out_bytes + sum(call.sizes))


def _added(call: Call, argument: int) -> Pass | None:
    """g itself, summed where the argument was broadcast."""
    own = call.sizes[argument]
    return Pass("reduction", 0, call.out_bytes + own) if own < call.out_bytes else None


def _table(rules: dict[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in rules.items() for name in names.split()}


_RULES: dict[str, Rule] = _table(
    {
        _bias_first: "addmm baddbmm addbmm addmv addr",
        _bias_third: "convolution _convolution cudnn_convolution mkldnn_convolution",
        _added: "add sub rsub",
        _nothing: """sum clone cat stack zeros_like ones_like full_like empty_like new_zeros new_ones new_full
            fill zero copy detach alias lift_fresh rand_like randn_like bernoulli sign floor ceil round
            trunc""",
        _spread: """_to_copy expand slice select split split_with_sizes unbind chunk narrow diagonal mean
            constant_pad_nd repeat roll flip upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
            _adaptive_avg_pool2d _adaptive_avg_pool3d neg amax amin max min cumsum unfold tril triu
            nll_loss_forward nll_loss2d_forward as_strided topk sort upsample_nearest1d upsample_linear1d""",
        _unary: """avg_pool2d avg_pool3d avg_pool1d max_pool2d_with_indices max_pool3d_with_indices
            norm linalg_vector_norm logsumexp var std var_mean std_mean prod glu""",
        _loss: """mse_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss
            binary_cross_entropy_with_logits""",
        _indexed: "gather index index_select _unsafe_index take embedding scatter scatter_add index_add",
    }
)
_BY_FAMILY: dict[Family, Rule] = {
    "matmul": _product,
    "convolution": _bias_third,
    "attention": _attention,
    "normalisation": _norm,
    "embedding": _indexed,
    "reduction": _unary,
    "elementwise": _element,
}
