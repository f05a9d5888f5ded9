"""TensorStyles: how tensor parallelism divides a model, module by module, and why."""

from __future__ import annotations

from math import gcd
from typing import Literal, final

from outsize.errors import BadOption
from outsize.ir.base import Record

Style = Literal["column", "row", "vocabulary", "heads", "experts", "whole"]


@final
class ModuleStyle(Record):
    """What the ranks have of a module's weights.

    column      rows of its weight, so columns of what it gives: a rank has some features, or some heads
    row         the matching columns of its weight; the ranks add up what they get
    vocabulary  rows of an embedding; what the ranks look up is added up
    heads       an nn.MultiheadAttention: some heads of its projections, and what they give is added up
    experts     a part of the inner dim of each expert, and what ranks get is added up
    whole       every rank has all of it
    """

    module: str
    style: Style
    why: str


@final
class Divided(Record):
    """A size that the number of ranks has to divide; `what` names it: `num_key_value_heads`."""

    size: int
    what: str


@final
class TensorStyles(Record):
    """The styles of a model; `hints` says where its own plan, which is not trusted, differs."""

    modules: tuple[ModuleStyle, ...]
    divided: tuple[Divided, ...]
    hints: tuple[str, ...] = ()

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of ranks, 2 and more, that divide all sizes; empty where nothing is divided."""
        common = gcd(*(d.size for d in self.divided))
        return tuple(n for n in range(2, common + 1) if common % n == 0)

    def insist_on_degree(self, ways: int) -> None:
        """Raise BadOption where so many ranks do not divide a size, with the nearest number that does, and
        where there is nothing to divide.
        """
        if ways > 1 and not self.divided and all(module.style == "whole" for module in self.modules):
            raise BadOption(
                f"tensor parallelism finds nothing to divide, tp={ways}",
                numbers=f"{len(self.modules)} modules with weights, no product of a pair among them",
                next_step="tp=1, and stages or replicas (`--stages`, `--dp-replicate`)",
            )
        wrong = [d for d in self.divided if d.size % ways]
        if not wrong:
            return
        fits = self.degrees
        near = min(fits, key=lambda n: (abs(n - ways), n), default=1)
        raise BadOption(
            f"{', '.join(f'{d.what}={d.size}' for d in wrong)} {_is(wrong)} not divided by tp={ways}",
            numbers=f"{_listed(fits)} divide{'s' * (len(fits) == 1)} all sizes" if fits else "no degree fits",
            next_step=f"tp={near}",
        )

    def table(self) -> str:
        """A line for each module: `column  layers.0.attn.q_proj  added up by layers.0.attn.o_proj`."""
        width = max((len(m.module) for m in self.modules), default=0)
        rows = [f"{m.style:<10}  {m.module:<{width}}  {m.why}" for m in self.modules]
        return "\n".join([*rows, *self.hints])


def _is(wrong: list[Divided]) -> str:
    return "is" if len(wrong) == 1 else "are"


def _listed(numbers: tuple[int, ...]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
