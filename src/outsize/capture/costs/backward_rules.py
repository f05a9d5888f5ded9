"""Computes what the backward of one ATen op costs from the forward call alone: no backward is ever run.

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
read or written once. Complexity: O(arguments) per op. Oracle: tests/unit/capture/costs/test_costs_truth.py
runs the real backward, with FlopCounterMode for FLOPs and a dispatch mode for bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from outsize.ir.graph import OpFamily


@final
@dataclass(slots=True)
class OpCall:
    """Describes one op that ran: bytes of each tensor argument, and of the results together.

    `wanted` are the indices of the arguments that require a gradient. An op that `has_scales` is a product
    whose backward is counted with its casts (scaled_products.py), and by no rule.
    """

    family: OpFamily
    flops: int
    sizes: list[int]
    out_bytes: int
    wanted: list[int]
    has_scales: bool = False


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """Costs the gradient of one argument; `launches` is 0 where another argument's kernel computes it."""

    family: OpFamily
    flops: int
    moved_bytes: int
    launches: int = 1


# The derivatives of these ops use their result, so autograd saves it even if no other op does.
_WITH_RESULT = """exp exp2 expm1 sigmoid tanh sqrt rsqrt reciprocal relu threshold elu _softmax _log_softmax
    _safe_softmax logsumexp cumprod prod norm linalg_vector_norm max_pool2d_with_indices native_dropout
    logcumsumexp tan atanh sgn hardsigmoid"""
KEEP_RESULT = frozenset(_WITH_RESULT.split())

# A backward in two halves delays the weight gradients of these ops (run/stage/split_backward.py).
WAITING: frozenset[OpFamily] = frozenset({"matmul", "convolution", "embedding"})

Rule = Callable[[OpCall, int], "Pass | None"]


def rule_of(name: str, family: OpFamily, *, view: bool) -> Rule:
    """Returns the rule for an op by its name, or for unknown ones by its family."""
    known = _RULES.get(name.removesuffix("_"))
    if known is not None:
        return known
    return _nothing if view else _BY_FAMILY.get(family, _element)


def _nothing(_call: OpCall, _argument: int) -> Pass | None:
    """Costs nothing: the gradient of the argument is that of the result, or a view of it."""
    return None


def _product(call: OpCall, _argument: int) -> Pass:
    """Costs a factor of a product without a bias: it reads g and the other factor, and writes this one."""
    return Pass(call.family, call.flops, call.out_bytes + sum(call.sizes))


def _bias_first(call: OpCall, argument: int) -> Pass:
    return _matrix_or_bias(call, argument, 0)


def _bias_third(call: OpCall, argument: int) -> Pass:
    return _matrix_or_bias(call, argument, 2)


def _matrix_or_bias(call: OpCall, argument: int, bias: int) -> Pass:
    if argument == bias:
        return Pass("reduction", 0, call.out_bytes + call.sizes[bias])
    factors = sum(size for index, size in enumerate(call.sizes) if index != bias)
    return Pass(call.family, call.flops, call.out_bytes + factors)


def _attention(call: OpCall, argument: int) -> Pass | None:
    """Costs one kernel for all three gradients, counted for the first argument that wants one."""
    if argument != call.wanted[0]:
        return None
    q_k_v = sum(call.sizes[:3])
    return Pass(call.family, call.flops * 5 // 2, 2 * call.out_bytes + 2 * q_k_v)


def _norm(call: OpCall, argument: int) -> Pass:
    """Costs a normalisation: x^ reads g and x; one more kernel that reads both gives the affine weights."""
    affine = [i for i in call.wanted if i > 0]
    if argument in affine[1:]:
        return Pass(call.family, 0, call.sizes[argument], launches=0)
    return Pass(call.family, 0, call.out_bytes + call.sizes[0] + call.sizes[argument])


def _element(call: OpCall, argument: int) -> Pass:
    """Costs an elementwise op: it reads g and the other argument, or its own when it is alone, and writes.

    Where the argument was broadcast, it also sums.
    """
    own_bytes = call.sizes[argument]
    others = sum(call.sizes) - own_bytes if len(call.sizes) > 1 else own_bytes
    broadcast = call.out_bytes if own_bytes < call.out_bytes else 0
    return Pass(call.family, 0, call.out_bytes + others + 2 * broadcast + own_bytes)


def _unary(call: OpCall, argument: int) -> Pass:
    """Costs a unary op: it reads g and the argument (or the result), and writes the gradient."""
    return Pass(call.family, 0, call.out_bytes + 2 * call.sizes[argument])


def _loss(call: OpCall, argument: int) -> Pass:
    """Costs a loss: it reads g and all arguments, and writes the gradient."""
    return Pass(call.family, 0, call.out_bytes + sum(call.sizes) + call.sizes[argument])


def _spread(call: OpCall, argument: int) -> Pass:
    """Costs an op that spreads g: it reads g and writes the argument's gradient."""
    return Pass(call.family, 0, call.out_bytes + call.sizes[argument])


def _indexed(call: OpCall, argument: int) -> Pass:
    """Costs an indexed op: it reads g and the indices, and writes the whole argument's gradient."""
    return Pass(call.family, 0, call.out_bytes + sum(call.sizes))


def _added(call: OpCall, argument: int) -> Pass | None:
    """Costs an addition: nothing, or a sum of g where the argument was broadcast."""
    own_bytes = call.sizes[argument]
    return Pass("reduction", 0, call.out_bytes + own_bytes) if own_bytes < call.out_bytes else None


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
_BY_FAMILY: dict[OpFamily, Rule] = {
    "matmul": _product,
    "convolution": _bias_third,
    "attention": _attention,
    "normalisation": _norm,
    "embedding": _indexed,
    "reduction": _unary,
    "elementwise": _element,
}
