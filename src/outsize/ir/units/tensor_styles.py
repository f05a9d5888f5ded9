"""Describes how tensor parallelism shards a model, module by module, and why.

The styles are derived from the recorded program in program/sharding/tensor_parallel/styles.py.
"""

from __future__ import annotations

from math import gcd
from typing import Literal, final

from outsize.axes.tensor import TENSOR
from outsize.errors import BadOption
from outsize.ir.base import Record

Style = Literal["column", "row", "vocabulary", "heads", "experts", "whole"]


@final
class ModuleStyle(Record):
    """Says what ranks have of a module's weights.

    column      rows of its weight, so columns of its result: a rank has some features, or some heads
    row         the matching columns of its weight; the ranks add up what they get
    vocabulary  rows of an embedding; the results of lookups are added up
    heads       an nn.MultiheadAttention: some heads of its projections, whose results are added up
    experts     a part of the inner dim of each expert; the results of ranks are added up
    whole       every rank has all of it
    """

    module: str
    style: Style
    why: str


@final
class DivisibleSize(Record):
    """Describes a size that the number of ranks has to divide; `what` names it: `num_key_value_heads`."""

    size: int
    what: str


@final
class TensorStyles(Record):
    """Holds the styles of a model; `hints` says where its own plan, which is not trusted, differs."""

    modules: tuple[ModuleStyle, ...]
    divided: tuple[DivisibleSize, ...]
    hints: tuple[str, ...] = ()

    @property
    def degrees(self) -> tuple[int, ...]:
        """Returns the numbers of ranks, 2 and more, that divide all sizes; empty where nothing is sharded."""
        common = gcd(*(d.size for d in self.divided))
        return tuple(n for n in range(2, common + 1) if common % n == 0)

    def insist_on_degree(self, degree: int) -> None:
        """Raises BadOption where so many ranks do not divide a size, with the nearest number that does.

        It raises as well where there is nothing to shard.
        """
        if degree > 1 and not self.divided and all(module.style == "whole" for module in self.modules):
            raise BadOption(
                f"tensor parallelism finds nothing to divide, tp={degree}",
                numbers=f"{len(self.modules)} modules with weights, no product of a pair among them",
                next_step=f"{TENSOR.typed(1)}, and stages or replicas (`--stages`, `--axes dp_replicate=2`)",
            )
        wrong = [d for d in self.divided if d.size % degree]
        if not wrong:
            return
        fits = self.degrees
        near = min(fits, key=lambda n: (abs(n - degree), n), default=1)
        raise BadOption(
            f"{', '.join(f'{d.what}={d.size}' for d in wrong)} {_is(wrong)} not divided by tp={degree}",
            numbers=f"{_listed(fits)} divide{'s' * (len(fits) == 1)} all sizes" if fits else "no degree fits",
            next_step=TENSOR.typed(near),
        )

    def table(self) -> str:
        """Returns a line for each module: `column  layers.0.attn.q_proj  added up by
        layers.0.attn.o_proj`.
        """
        width = max((len(m.module) for m in self.modules), default=0)
        rows = [f"{m.style:<10}  {m.module:<{width}}  {m.why}" for m in self.modules]
        return "\n".join([*rows, *self.hints])


def _is(wrong: list[DivisibleSize]) -> str:
    return "is" if len(wrong) == 1 else "are"


def _listed(numbers: tuple[int, ...]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
