"""Defines in which numbers a step computes: what is multiplied, what is stored, and what is sent.

    name         products                weights, gradients   what ranks send       paper
    fp32         float32                 as the model has     the same
    tf32         tfloat32                the same             the same              NVIDIA A100 whitepaper
    bf16         bfloat16                bfloat16             bfloat16              arXiv 1905.12322
    bf16-mixed   bfloat16, by autocast   float32              bfloat16, gradients   arXiv 1710.03740
    fp16-mixed   float16, by autocast    float32                in float32          the same
    fp16-fp16acc the same, added up in float16                                      NVIDIA AD102 whitepaper
    fp8          scales for a tensor     bfloat16             bfloat16 and maxima   arXiv 2209.05433
    fp8-block    for 1 x 128, 128 x 128  bfloat16             bfloat16              arXiv 2412.19437, sec. 3.3
    mxfp8        for 32 elements         bfloat16             bfloat16              arXiv 2506.08027
    nvfp4        for 16 elements         bfloat16             bfloat16              arXiv 2509.25149

A precision is something that a plan assumes: only the user's own code converts weights, turns autocast on or
swaps layers. In which type a device adds products up is a switch of it, which the engine sets in its steps
alone (`NarrowSums`). Everything that the package knows of one is in its record below: the types, what a
linear layer whose operands have scales costs beside its products (`ScaledProducts`), which peak a device
needs for it, the nearest other one, and its words. To add one, write its name and its record here.

A precision is stored by its name, as a schedule is. Oracle: tests/unit/capture/costs/test_scaled_products.py
counts the bytes and FLOPs of a linear layer by hand, tests/integrations/test_torchao.py compares them with
those of torchao, and tests/house/test_precision_names.py finds names that are compared elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from types import MappingProxyType
from typing import Final, Literal, final

PrecisionName = Literal[
    "fp32", "tf32", "bf16", "bf16-mixed", "fp16-mixed", "fp16-fp16acc", "fp8", "fp8-block", "mxfp8", "nvfp4"
]
Operand = Literal["input", "weight", "gradient"]
"""Names the three operands of a linear layer's products: what it reads, its weight, its result's gradient."""


@final
@dataclass(frozen=True, kw_only=True)
class Cast:
    """Says what it takes to cast an operand, for each of its elements of two bytes.

    moved_bytes     bytes that its kernels read and write
    launches        kernels: the largest element, the scale, the cast, the copy in the other order
    workspace_bytes bytes that they hold at their peak, with the result
    by_writer       the kernel that writes an operand casts it, too, since it knows the scale before: a half
                    of the bytes is left
    """

    moved_bytes: float
    launches: int
    workspace_bytes: float
    by_writer: bool = False

    @property
    def left(self) -> float:
        """Returns what is left of the bytes beside the kernels that write operands."""
        return 0.5 if self.by_writer else 1.0


@final
@dataclass(frozen=True, kw_only=True)
class ScaledProducts:
    """Says how a linear layer multiplies operands that are cast to few bits, with scales for their range.

    forward         the type that the forward's product counts in: that of its first operand
    backward        the same of the two products of the backward
    item_bytes      bytes of an element of an operand, with its part of the scales
    side            both sides of a weight are multiples of it, or the layer is not swapped
    padded_rows     tokens are padded to a multiple of it where they are added up
    eager           a cast where each function of torch is a kernel of its own
    fused           the same where a compiler writes few kernels
    library         the same where a transformer engine does, in both orders, for its two products
    forward_casts   the operands that the forward casts, in their order
    backward_casts  the same of the backward; those for the gradient of the input come first
    copied_bytes    bytes of codes that a stage has of an element of a weight for all microbatches of a step
    saved_bytes     bytes that the forward saves of an element of its input; None where it saves it as it is
    one_backward    one function of autograd computes both gradients, even of weights that are frozen
    adds_bias       a bias is added by a kernel of its own
    over_ranks      the scale is of a whole tensor, so ranks that divide it have to know the largest element
    by_library      layers of a library alone multiply so; in other stacks of kernels nothing is cast
    swap            what the user's code calls so that the model computes so
    """

    forward: str
    backward: str
    item_bytes: float
    side: int
    padded_rows: int = 1
    eager: Cast
    fused: Cast
    library: Cast
    forward_casts: tuple[Operand, ...]
    backward_casts: tuple[Operand, ...]
    copied_bytes: float = 0
    saved_bytes: float | None = None
    one_backward: bool = False
    adds_bias: bool = False
    over_ranks: bool = False
    by_library: bool = False
    swap: str

    def fits(self, sides: tuple[int, ...]) -> bool:
        """Tells whether a weight of such sides can be multiplied so."""
        return not any(size % self.side for size in sides)


@final
@dataclass(frozen=True, kw_only=True)
class NarrowSums:
    """Says in which type the terms of a product are added up where that is narrower than float32.

    dtype       the type of the running sum
    largest     the largest sum that it has; those beyond are infinite
    together    terms that are added up exactly before the running sum is rounded
    round_off   what rounding changes a number by, a share of it, as a root mean square
    switch      what the engine sets on the device for its steps, and users for loops of their own
    """

    dtype: str
    largest: float
    together: int
    round_off: float
    switch: str

    def error(self, terms: int) -> float:
        """Returns the error of a product of so many terms, a share of its size, as a root mean square.

        A sum of terms with random signs grows with the root of their number, and each rounding adds an error
        of its own, so half of the roundings count in full.
        """
        return self.round_off * sqrt(max(1.0, terms / self.together) / 2)


@final
@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Everything that the package knows of one precision.

    name        its name in plans and on the command line, in Lightning's words where it has one
    paper       where it comes from
    weights     the type of weights, gradients, states and inputs; None: as the model has them
    autocast    the type in which torch.autocast multiplies, with copies of weights that are made once a step
    products    maps the type of a product's operands to the one in which a device multiplies them
    sums        how products are added up where that is not in float32; only those who ask for it have it
    scaled      how linear layers multiply whose operands have scales; None where none does
    stacks      the same of groups of rows that meet a weight of a stack each, as those of experts do
    peak        the peak that an accelerator needs to have for it, by its name in devices.json; "" for any
    needs       what that peak stands for, as an error says it
    on_cpu      a CPU computes so, if only to try it out
    nearest     the precision to take on a device that lacks the peak; None where all have it
    is_timed    `measure` times its units; otherwise they are estimated alone
    lower       precisions in fewer bytes, which `fit` tries where a step does not fit, in this order
    help        what the command line says of it
    """

    name: PrecisionName
    paper: str
    weights: str | None = None
    autocast: str | None = None
    products: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sums: NarrowSums | None = None
    scaled: ScaledProducts | None = None
    stacks: ScaledProducts | None = None
    peak: str = ""
    needs: str = ""
    on_cpu: bool = True
    nearest: PrecisionName | None = None
    is_timed: bool = True
    lower: tuple[PrecisionName, ...] = ()
    help: str

    @property
    def is_plain(self) -> bool:
        """Tells whether it leaves the model as it is."""
        return not (self.weights or self.autocast or self.products)

    @property
    def is_mixed(self) -> bool:
        """Tells whether autocast casts."""
        return self.autocast is not None

    def runs_on(self, peaks: Mapping[str, float], *, accelerator: bool) -> bool:
        """Tells whether a device with such peaks computes so."""
        return (not self.peak or self.peak in peaks) if accelerator else self.on_cpu


# torchao.float8: abs and max of the operand; the scale in seven kernels of one element; a copy in float32,
# its product with the scale, and that clamped; the cast; and a copy with rows of zeros behind it.
_TORCHAO: Final = Cast(moved_bytes=35, launches=13, workspace_bytes=9)
# A compiler's: the largest element, the scale, and the cast, which reads the operand again.
_COMPILED: Final = Cast(moved_bytes=5, launches=3, workspace_bytes=1)
_TRANSFORMER_ENGINE: Final = "transformer_engine.pytorch.autocast with the recipe"


def _in_both_orders(item_bytes: float, launches: int, *, reads: int, by_writer: bool = False) -> Cast:
    """Returns a library's cast, which writes its operand by rows and by columns: one is for each product."""
    moved_bytes, held = 2 * reads + 2 * item_bytes, 2 * item_bytes
    return Cast(moved_bytes=moved_bytes, launches=launches, workspace_bytes=held, by_writer=by_writer)


def _of_blocks(dtype: str, item_bytes: float, side: int, casts: Cast, recipe: str) -> ScaledProducts:
    """Returns products whose scales are of blocks, as a library computes them: an operand is cast once, by a
    kernel of its own, since a block of columns has the elements of many rows, and a norm works row by row.
    """
    return ScaledProducts(
        forward=dtype,
        backward=dtype,
        item_bytes=item_bytes,
        side=side,
        padded_rows=side,
        eager=casts,
        fused=casts,
        library=casts,
        # A weight is cast once a step, by rows for the forward and by columns for the backward.
        forward_casts=("input",),
        backward_casts=("gradient",),
        copied_bytes=2 * item_bytes,
        saved_bytes=item_bytes,
        swap=f"{_TRANSFORMER_ENGINE} {recipe}",
    )


# Of operands with one scale, whose largest element is found before.
_OF_A_LIBRARY: Final = _in_both_orders(1, 2, reads=2)
_FP8_BLOCK_PRODUCTS: Final = _of_blocks(
    "float8_e4m3fn", 1 + 4 / 128, 16, _in_both_orders(1 + 4 / 128, 1, reads=1), "Float8BlockScaling"
)
_MXFP8_PRODUCTS: Final = _of_blocks(
    "float8_e4m3fn", 1 + 1 / 32, 32, _in_both_orders(1 + 1 / 32, 1, reads=1), "MXFP8BlockScaling"
)
# One pass finds the largest element of the tensor, whose scale is above those of its blocks.
_NVFP4_PRODUCTS: Final = _of_blocks(
    "float4_e2m1fn", 1 / 2 + 1 / 16, 32, _in_both_orders(1 / 2 + 1 / 16, 2, reads=2), "NVFP4BlockScaling"
)

FP32: Final = PrecisionPolicy(
    name="fp32", paper="IEEE 754", lower=("bf16-mixed", "bf16"), help="the weights as they are"
)
TF32: Final = PrecisionPolicy(
    name="tf32",
    paper="NVIDIA A100 Tensor Core GPU Architecture, 2020",
    products=MappingProxyType({"float32": "tfloat32"}),
    is_timed=False,
    lower=("bf16-mixed", "bf16"),
    help="the same, with torch.set_float32_matmul_precision('high')",
)
BF16: Final = PrecisionPolicy(
    name="bf16", paper="Kalamkar et al., arXiv 1905.12322", weights="bfloat16", help="all in bfloat16"
)
BF16_MIXED: Final = PrecisionPolicy(
    name="bf16-mixed",
    paper="Micikevicius et al., arXiv 1710.03740",
    autocast="bfloat16",
    lower=("bf16",),
    help="autocast with float32 weights",
)
FP16_MIXED: Final = PrecisionPolicy(
    name="fp16-mixed",
    paper="Micikevicius et al., arXiv 1710.03740",
    autocast="float16",
    lower=("bf16",),
    help="the same in float16, as with a GradScaler",
)
FP16_FP16ACC: Final = PrecisionPolicy(
    name="fp16-fp16acc",
    paper="NVIDIA AD102 whitepaper: twice the peak of a GeForce",
    autocast="float16",
    products=MappingProxyType({"float16": "float16_fp16acc"}),
    sums=NarrowSums(
        dtype="float16",
        largest=65504.0,
        # A product of tensor cores takes 16 terms, and leaves its sum in the type of the accumulator.
        together=16,
        # Half of a last bit of ten, evenly spread, of numbers whose logarithms are.
        round_off=2.07e-4,
        switch="torch.backends.cuda.matmul.allow_fp16_accumulation",
    ),
    on_cpu=False,
    needs="products that are added up in float16",
    nearest="fp16-mixed",
    is_timed=False,
    lower=("bf16",),
    help="fp16-mixed, products added up in float16: twice as fast on GeForce",
)
FP8: Final = PrecisionPolicy(
    name="fp8",
    paper="Micikevicius et al., arXiv 2209.05433",
    weights="bfloat16",
    scaled=ScaledProducts(
        forward="float8_e4m3fn",
        backward="float8_e5m2",
        item_bytes=1,
        side=16,
        padded_rows=16,
        eager=_TORCHAO,
        fused=_COMPILED,
        # The scale is that of steps before (DelayedScaling), so that an operand is read once.
        library=_in_both_orders(1, 1, reads=1, by_writer=True),
        forward_casts=("input", "weight"),
        backward_casts=("gradient", "weight", "gradient", "input"),
        one_backward=True,
        adds_bias=True,
        over_ranks=True,
        swap="torchao.float8.convert_to_float8_training(model)",
    ),
    # torchao swaps modules that are linear layers, and leaves experts as they are.
    stacks=ScaledProducts(
        forward="float8_e4m3fn",
        backward="float8_e5m2",
        item_bytes=1,
        side=16,
        padded_rows=16,
        eager=_OF_A_LIBRARY,
        fused=_OF_A_LIBRARY,
        library=_OF_A_LIBRARY,
        forward_casts=("input",),
        backward_casts=("gradient",),
        by_library=True,
        swap=f"{_TRANSFORMER_ENGINE} Float8CurrentScaling",
    ),
    peak="float8",
    needs="products in float8",
    nearest="bf16",
    help="bf16 with torchao's linear layers in float8, a scale for each tensor",
)
FP8_BLOCK: Final = PrecisionPolicy(
    name="fp8-block",
    paper="DeepSeek-AI, arXiv 2412.19437, sec. 3.3",
    weights="bfloat16",
    scaled=_FP8_BLOCK_PRODUCTS,
    stacks=_FP8_BLOCK_PRODUCTS,
    peak="float8",
    needs="products in float8",
    on_cpu=False,
    is_timed=False,
    nearest="bf16",
    help="the same with scales for blocks of 1 x 128 and 128 x 128",
)
MXFP8: Final = PrecisionPolicy(
    name="mxfp8",
    paper="Mishra et al., arXiv 2506.08027",
    weights="bfloat16",
    scaled=_MXFP8_PRODUCTS,
    stacks=_MXFP8_PRODUCTS,
    # Devices that multiply in four bits apply scales of blocks in their tensor cores, also of eight bits.
    peak="float4",
    needs="tensor cores that scale blocks (a peak for float4)",
    on_cpu=False,
    is_timed=False,
    nearest="fp8",
    help="float8 with scales for 32 elements, on Blackwell",
)
NVFP4: Final = PrecisionPolicy(
    name="nvfp4",
    paper="NVIDIA, arXiv 2509.25149",
    weights="bfloat16",
    scaled=_NVFP4_PRODUCTS,
    stacks=_NVFP4_PRODUCTS,
    peak="float4",
    needs="tensor cores that scale blocks (a peak for float4)",
    on_cpu=False,
    is_timed=False,
    nearest="mxfp8",
    help="float4 with scales for 16 elements, on Blackwell",
)

_PRECISIONS: Final[Mapping[str, PrecisionPolicy]] = MappingProxyType(
    {
        each.name: each
        for each in (
            FP32, TF32, BF16, BF16_MIXED, FP16_MIXED, FP16_FP16ACC, FP8, FP8_BLOCK, MXFP8, NVFP4,
        )
    }
)  # fmt: skip


def precision_policies() -> tuple[PrecisionPolicy, ...]:
    """Returns all records."""
    return tuple(_PRECISIONS.values())


def precision_policy(name: str) -> PrecisionPolicy:
    """Returns the record of the precision of this name. Raises KeyError for an unknown one."""
    return _PRECISIONS[name]


def nearest_on(policy: PrecisionPolicy, peaks: Mapping[str, float], *, accelerator: bool) -> PrecisionPolicy:
    """Returns the record itself where a device with such peaks computes so, else the nearest that it has."""
    while not policy.runs_on(peaks, accelerator=accelerator) and policy.nearest is not None:
        policy = precision_policy(policy.nearest)
    return policy
