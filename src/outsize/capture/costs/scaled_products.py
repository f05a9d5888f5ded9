"""Counts what products cost whose operands are cast to few bits with scales, from the record of their
precision: those of a linear layer, and those of groups of rows with a weight of a stack each (experts).

    forward    casts of input and weight, one product, and the bias where a kernel of its own adds it
    backward   casts of the gradient and of what the record names, and two products

With m rows of k features each that become n features, a product has 2 m n k FLOPs, reads its operands in the
bytes of the record and writes its result in two bytes for an element. Rows that meet a stack of weights read
all of it, and those of each weight are padded by themselves, in the mean by half of the most. Kernels of
casts are the family `cast`, so that a stack of kernels which writes fewer of them can be priced by the
record, too. A transformer engine casts the input in the forward and the gradient in the backward, each in
both orders where the weight has a gradient; weights are cast once a step, or stored so. Memory of a layer:
casts follow each other, and each keeps its result until the products have read it. That of a stack counts as
in the type of its weights, which is more.

Oracle: tests/unit/capture/costs/test_scaled_products.py by hand; tests/integrations/test_torchao.py counts
the kernels of torchao's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, final

from torch import Tensor, nn

from outsize.capture.costs.live_memory import storage_key
from outsize.ir.graph import MATMULS, Work
from outsize.policies.precisions import Operand, ScaledProducts
from outsize.program.sharding.scaled_linear import ScaledLinear, products_of_stacks, weight_stacks
from outsize.program.tape import Cost

# The type in which kernels of casts compute, and the bytes of an element that they cast.
_COMPUTED: Final = "float32"
_HALF: Final = 2
# How many casts of one backward are for the gradient of the input; they come first.
_OF_INPUT: Final = 2


@final
@dataclass(frozen=True)
class LinearCall:
    """Holds the sizes of a product with a weight: rows, features that it takes and makes, whether its input
    and its weight have gradients, and how many weights share the rows.
    """

    rows: int
    taken: int
    made: int
    has_bias: bool
    of_input: bool
    of_weight: bool
    weights: int = 1

    def elements(self, operand: Operand) -> int:
        """Returns the elements of an operand."""
        sides: dict[Operand, tuple[int, int]] = {
            "input": (self.rows, self.taken),
            "weight": (self.made, self.taken * self.weights),
            "gradient": (self.rows, self.made),
        }
        one, other = sides[operand]
        return one * other

    @property
    def flops(self) -> int:
        """Returns the FLOPs of one product."""
        return 2 * self.rows * self.taken * self.made

    def padded(self, rows: int) -> LinearCall:
        """Returns the call whose rows are padded to a multiple of `rows`, those of each weight by themselves:
        how many it has is not known, so that half of what a pad may be is added for it.
        """
        if self.weights == 1:
            return replace(self, rows=-(-self.rows // rows) * rows)
        return replace(self, rows=self.rows + self.weights * (rows // 2))


def cost_of_call(module: nn.Module | None, args: Sequence[Any], cost: Cost) -> Cost:
    """Returns the cost of a call of a module; `cost` is what it is without scales, which stand-ins have."""
    if not isinstance(module, ScaledLinear):
        return cost
    x: Tensor = args[0]
    weight = module.weight
    has_bias = module.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
    call = LinearCall(
        rows=x.numel() // module.in_features,
        taken=module.in_features,
        made=module.out_features,
        has_bias=has_bias,
        of_input=x.requires_grad,
        of_weight=weight.requires_grad,
    )
    return scaled_cost(module.products, call, cost)


def scaled_cost(products: ScaledProducts, call: LinearCall, cost: Cost) -> Cost:
    """Returns the cost of a call whose operands have scales; `cost` is that of the plain layer."""
    counted = _Counted(products, call)
    trains = any(work.family in MATMULS for work in (*cost.backward_input, *cost.backward_weight))
    scaled = scaled_works(products, call, trains=trains)
    forward = (*scaled.forward, *_without_products(cost.forward))
    splits = trains and not products.one_backward and call.of_input and call.of_weight
    return replace(
        cost,
        flops=sum(work.flops for work in forward),
        moved_bytes=sum(work.moved_bytes for work in forward),
        workspace_bytes=max(0, counted.forward_peak_bytes() - _HALF * call.elements("gradient")),
        backward_workspace_bytes=counted.backward_peak_bytes() - cost.saved_bytes if trains else 0,
        waiting_bytes=_HALF * call.elements("gradient") if splits else 0,
        forward=forward,
        backward_input=(*scaled.of_input, *_without_products(cost.backward_input)),
        backward_weight=(*scaled.of_weight, *_without_products(cost.backward_weight)),
        cast_bytes=round(products.copied_bytes * call.elements("weight")),
        exact_instructions=_exact_instructions(cost, scaled),
        on_accelerator=None,
    )


@final
class ScaledWorks(NamedTuple):
    """Holds the work of a call with scales: of its forward, and of the gradients of input and weight."""

    forward: tuple[Work, ...]
    of_input: tuple[Work, ...]
    of_weight: tuple[Work, ...]


def scaled_works(products: ScaledProducts, call: LinearCall, *, trains: bool) -> ScaledWorks:
    """Returns the casts and products of a call; `trains` says that it has a backward."""
    counted = _Counted(products, call)
    return ScaledWorks(tuple(counted.forward()), *(counted.backward() if trains else ((), ())))


def in_library(works: ScaledWorks, dtype: str, flops: int, moved_bytes: int) -> ScaledWorks:
    """Returns the works where a library alone multiplies so. In other kernels each product is one of operands
    in their own type, of so many FLOPs and bytes, and nothing is cast.
    """

    def either(work: Work) -> Work:
        fused = {"fused_flops": work.flops, "fused_bytes": work.moved_bytes, "fused_launches": work.launches}
        if work.family in MATMULS:
            own = {"dtype": dtype, "flops": flops, "moved_bytes": moved_bytes, "launches": 1}
        else:
            own = {"flops": 0, "moved_bytes": 0, "launches": 0}
        return work.model_copy(update={"library_dtype": work.dtype, **fused, **own})

    return ScaledWorks(*(tuple(map(either, each)) for each in works))


def stacks_of(modules: Iterable[nn.Module]) -> dict[int, ScaledProducts]:
    """Returns by storage the weights of a stack whose products have scales, and how they multiply."""
    return {
        storage_key(weight): products
        for module in modules
        if (products := products_of_stacks(module)) is not None
        for weight in weight_stacks(module, products)
    }


def _exact_instructions(cost: Cost, scaled: ScaledWorks) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Returns what the instructions of each work were rounded from: casts and products have none."""
    if not cost.exact_instructions:
        return ()
    passes = (cost.forward, cost.backward_input, cost.backward_weight)
    return tuple(
        (*(() for _ in added), *(each for work, each in zip(works, exact, strict=True) if _is_beside(work)))
        for works, exact, added in zip(passes, cost.exact_instructions, scaled, strict=True)
    )


def _is_beside(work: Work) -> bool:
    return work.family not in MATMULS


def _without_products(works: Iterable[Work]) -> Iterator[Work]:
    return filter(_is_beside, works)


@final
class _Counted:
    def __init__(self, products: ScaledProducts, call: LinearCall) -> None:
        self._products, self._call = products, call

    def forward(self) -> Iterator[Work]:
        """Yields the work of the forward."""
        call, products = self._call, self._products
        yield self._casts(products.forward_casts, products.forward_casts, "input")
        yield self._product(products.forward, ("input", "weight"), "gradient")
        if call.has_bias and products.adds_bias:
            moved_bytes = _HALF * (2 * call.elements("gradient") + call.made)
            yield Work(family="elementwise", dtype="bfloat16", flops=0, moved_bytes=moved_bytes)

    def backward(self) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
        """Returns the work that belongs to the gradient of the input, and that to the weight's.

        One function for both computes both, whoever needs them; a schedule cannot divide it. A compiler, or a
        library, leaves out the product and the casts of a gradient that nobody needs, as of frozen weights.
        """
        products, call = self._products, self._call
        casts = (self._casts(products.backward_casts, self._needed_casts(), "gradient"),)
        of_input = self._product(products.backward, ("gradient", "weight"), "input")
        of_weight = self._product(products.backward, ("gradient", "input"), "weight", rows_added=True)
        if products.one_backward:
            kept = [of_input] * call.of_input + [of_weight] * call.of_weight
            return (*casts, _sum(of_input, of_weight).model_copy(update=_left(kept))), ()
        if not call.of_input:
            return (), (*casts, of_weight)
        return (*casts, of_input), (of_weight,) if call.of_weight else ()

    def forward_peak_bytes(self) -> float:
        """Returns the bytes that the forward holds at its peak, with its result."""
        peak, held = self._casting(self._products.forward_casts, 0.0)
        return round(max(peak, 2 * held + _HALF * self._call.elements("gradient")))

    def backward_peak_bytes(self) -> int:
        """Returns the bytes that the backward holds at its peak: the gradient that it gets and those that it
        makes, too.
        """
        call = self._call
        first = self._products.backward_casts[: _OF_INPUT if self._products.one_backward else None]
        peak, held = self._casting(first, _HALF * call.elements("gradient"))
        held += _HALF * call.elements("input")
        later_peak, held = self._casting(self._products.backward_casts[len(first) :], held)
        return round(max(peak, later_peak, held + _HALF * call.elements("weight")))

    def _casting(self, operands: tuple[Operand, ...], held: float) -> tuple[float, float]:
        """Returns the peak of casts one after the other, and what is held behind them."""
        peak = held
        for operand in operands:
            elements = self._call.elements(operand)
            peak = max(peak, held + self._products.eager.workspace_bytes * elements)
            held += self._products.item_bytes * elements
        return peak, held

    def _needed_casts(self) -> tuple[Operand, ...]:
        """Returns the casts of the backward for gradients that somebody needs."""
        casts, call = self._products.backward_casts, self._call
        if not self._products.one_backward:
            return casts
        return (*(casts[:_OF_INPUT] if call.of_input else ()), *(casts[_OF_INPUT:] if call.of_weight else ()))

    def _casts(self, operands: tuple[Operand, ...], needed: tuple[Operand, ...], of_library: Operand) -> Work:
        """Returns the kernels of casts of some operands; a compiler writes those that are needed, and a
        transformer engine that of one.
        """
        call, products = self._call, self._products
        elements, written = (sum(map(call.elements, each)) for each in (operands, needed))
        eager, fused, library = products.eager, products.fused, products.library
        # The product for the weight's gradient alone reads its operands in the other order.
        cast_bytes = library.moved_bytes - (0 if call.of_weight else products.item_bytes)
        return Work(
            family="cast",
            dtype=_COMPUTED,
            flops=0,
            moved_bytes=round(eager.moved_bytes * elements),
            launches=eager.launches * len(operands),
            fused_bytes=round(fused.moved_bytes * written),
            fused_launches=fused.launches * len(needed),
            library_bytes=round(library.left * cast_bytes * call.elements(of_library)),
            library_launches=library.launches,
        )

    def _product(
        self, dtype: str, read: tuple[Operand, Operand], written: Operand, *, rows_added: bool = False
    ) -> Work:
        call = self._call
        if rows_added:
            call = call.padded(self._products.padded_rows)
        read_bytes = self._products.item_bytes * sum(map(call.elements, read))
        moved_bytes = round(read_bytes) + _HALF * call.elements(written)
        work = Work(family="matmul", dtype=dtype, flops=call.flops, moved_bytes=moved_bytes)
        return work.model_copy(update=_left([work]))


def _left(works: Sequence[Work]) -> dict[str, int]:
    """Returns what a compiler leaves of products: those that somebody needs."""
    return {
        "fused_flops": sum(work.flops for work in works),
        "fused_bytes": sum(work.moved_bytes for work in works),
        "fused_launches": sum(work.launches for work in works),
    }


def _sum(one: Work, other: Work) -> Work:
    return one.model_copy(
        update={
            "flops": one.flops + other.flops,
            "moved_bytes": one.moved_bytes + other.moved_bytes,
            "launches": one.launches + other.launches,
        }
    )
