"""Answers: how does a part of a value pass through a function of torch? One row for each function.

    dims       how a divided dim follows, whatever it means: a rule of propagate.py and propagate_views.py
    rows       how rows of a sequence follow where that is another way: a rule of context_parallel/rules.py.
               Pieces of rows on one device follow as rows of a rank do (loss_in_pieces).
    weight     how it multiplies with a weight, if it can: by `weight.T`, or by the weight as it is
    sizes      how its arguments name the sizes of its result, which are others on a rank
    reshapes   whether it only turns its one tensor, or repeats it: made again from what is gathered
    classes    whether it is a loss of which ranks compute the part of their classes

A function without a row is not followed. Names are those of `op_name`: `add` is torch.add, Tensor.add_ and
Tensor.__add__. The table is data: what a column says is done by the rule of that name, in the files named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, final

from outsize.program.sharding.rank_step import op_name
from outsize.program.tape import Instruction

DimRule = Literal[
    "elementwise", "reduced", "matmul", "einsum", "attention", "dropout", "concatenated", "stacked",
    "viewed", "transposed", "transposed last", "permuted", "unsqueezed", "expanded", "repeated heads",
    "split", "indexed", "unchanged",
]  # fmt: skip
RowRule = Literal[
    "attention", "multiplied", "einsum", "normalized", "cross entropy", "averaged", "summed", "chosen",
    "picked", "viewed", "joined", "stacked", "repeated", "added product", "viewed as", "copied", "emptied",
    "made whole", "indexed",
]  # fmt: skip
Multiplied = Literal["by its transpose", "as it is"]
Sizes = Literal["one by one", "as a tuple", "of one dim"]


@final
@dataclass(frozen=True, slots=True)
class Op:
    """Holds what the columns say of a function."""

    dims: DimRule | None = None
    rows: RowRule | None = None
    weight: Multiplied | None = None
    sizes: Sizes | None = None
    reshapes: bool = False
    classes: bool = False


ROWS: Final[tuple[tuple[str, Op], ...]] = (
    # -- of each element
    (
        """
        add sub rsub mul div truediv floordiv pow neg exp exp2 log log1p sqrt rsqrt tanh sigmoid relu relu6
        gelu silu mish elu selu celu leaky_relu hardswish hardsigmoid hardtanh softplus logsigmoid erf abs
        sign square sin cos clamp clip minimum maximum where masked_fill eq ne lt le gt ge logical_and
        logical_or logical_not and or xor invert float double half bfloat16 to type type_as clone
        detach nan_to_num reciprocal addcmul lerp isinf isnan zeros_like ones_like full_like iadd isub imul
        itruediv ipow radd rmul rtruediv rpow rdiv multiply divide subtract
        """,
        Op("elementwise"),
    ),
    ("contiguous", Op("elementwise", reshapes=True)),
    ("copy", Op(rows="copied")),
    ("dropout", Op("dropout")),
    # -- over dims
    ("sum mean", Op("reduced", "summed")),
    ("softmax log_softmax amax amin logsumexp norm var std cumsum all any argmax", Op("reduced")),
    ("topk sort max min", Op(rows="chosen")),
    ("gather", Op(rows="picked")),
    ("layer_norm rms_norm", Op(rows="normalized")),
    # -- products and attention
    ("linear", Op(weight="by its transpose")),
    ("matmul", Op("matmul", "multiplied", weight="as it is")),
    ("bmm", Op("matmul", "multiplied")),
    ("baddbmm", Op(rows="added product")),
    ("einsum", Op("einsum", "einsum")),
    ("scaled_dot_product_attention", Op("attention", "attention")),
    # -- losses
    ("cross_entropy", Op(rows="cross entropy", classes=True)),
    ("nll_loss", Op(rows="cross entropy")),
    ("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits", Op(rows="averaged")),
    # -- views
    ("view", Op("viewed", "viewed", sizes="one by one", reshapes=True)),
    ("reshape", Op("viewed", "viewed", sizes="as a tuple", reshapes=True)),
    ("unflatten", Op("viewed", "viewed", sizes="of one dim")),
    ("flatten", Op("viewed", "viewed")),
    ("squeeze", Op("viewed", "viewed", reshapes=True)),
    ("view_as", Op(rows="viewed as")),
    ("view_as_complex view_as_real", Op("unchanged")),
    ("transpose", Op("transposed", reshapes=True)),
    ("swapaxes swapdims", Op("transposed")),
    ("t", Op("transposed last")),
    ("mT", Op("transposed last", reshapes=True)),
    ("permute", Op("permuted", reshapes=True)),
    ("unsqueeze", Op("unsqueezed", reshapes=True)),
    ("expand", Op("expanded", sizes="one by one", reshapes=True)),
    ("repeat_interleave", Op("repeated heads", reshapes=True)),
    ("repeat", Op(rows="repeated")),
    ("getitem", Op("indexed", "indexed", reshapes=True)),
    # -- of several tensors, and of none
    ("split split_with_sizes chunk unbind", Op("split")),
    ("cat concat", Op("concatenated", "joined")),
    ("stack", Op("stacked", "stacked")),
    ("new_empty", Op(rows="emptied")),
    ("new_zeros new_ones new_full", Op(rows="made whole")),
)


def _by_name() -> Iterator[tuple[str, Op]]:
    return ((name, op) for names, op in ROWS for name in names.split())


OPS: Final[Mapping[str, Op]] = MappingProxyType(dict(_by_name()))
_UNKNOWN: Final = Op()


def op_of(instruction: Instruction) -> Op:
    """Returns the row of an instruction's function; an empty one where there is none."""
    return OPS.get(op_name(instruction), _UNKNOWN)
