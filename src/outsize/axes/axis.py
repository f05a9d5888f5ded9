"""Defines Axis: everything that the package knows of one axis of the mesh.

    axis           divides                         ranks along it hold alike    add up gradients
    pp             stages                          nothing                      of nothing
    dp_replicate   the batch                       all weights                  of all weights
    dp_shard       the batch, states               all weights                  of all weights
    ep             the batch, experts              all but experts              of all but experts
    cp             tokens of each sequence         all weights                  of all weights
    tp             products of layers, experts     what tp leaves whole         of nothing

What ranks along tp hold alike has equal gradients on each of them, because they have the same tokens. Where
experts are divided over ep and tp, a rank of tp sends its block of the tokens.

Callers ask what they need to know: of an axis here, of a mesh `Axes` in ir/plan.py, which multiplies the
sizes of the axes whose records say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

Divided = Literal["products", "experts"]
"""Says which weights ranks have parts of while they compute: those of products of layers, or experts."""


@final
@dataclass(frozen=True, kw_only=True)
class Axis:
    """Everything that the package knows of one axis of the mesh.

    name             its name in torch's words, in plans and on the command line
    paper            where it comes from
    title            what a sentence calls it
    listed           its place in a plan file and wherever axes are listed; the mesh has an order of its own
    cuts_stages      its ranks have different stages; all others are of the group of devices of one stage
    divides_batch    its ranks have microbatches of their own: they count as replicas
    divides_tokens   its ranks have different tokens of the same microbatch
    divides_weights  of which weights its ranks have parts while they compute; None for none
    divides_states   its ranks divide optimizer states, and weights where the policy says so
    joins_states     where states are divided, its ranks take part, because they hold the same weights
    same_weights     its ranks hold the same weights but for experts, and add up their gradients
    same_experts     its ranks hold the same experts, and add up their gradients
    within_stages    its ranks exchange values while a stage computes
    by_modules       it runs where a model runs by modules, in its own Python
    keeps_bits       results are bit by bit those of one device: nothing is added up in another order
    takes_slices     its ranks run sequences in slices (policies/slices.py)
    is_searched      the search tries its sizes by itself (planner/layout/layout.py); others are given
    option           the keyword that asks for it, where that is not its name
    reads_whole      what a model that runs by modules does, so that this axis cannot divide it
    help             what the command line says of it
    """

    name: str
    paper: str
    title: str
    listed: int
    cuts_stages: bool = False
    divides_batch: bool = False
    divides_tokens: bool = False
    divides_weights: Divided | None = None
    divides_states: bool = False
    joins_states: bool = False
    same_weights: bool = False
    same_experts: bool = False
    within_stages: bool = False
    by_modules: bool = False
    keeps_bits: bool = False
    takes_slices: bool = False
    is_searched: bool = False
    option: str = ""
    reads_whole: str = ""
    help: str

    @property
    def divides_products(self) -> bool:
        """Tells whether its ranks divide the products of layers, and all weights that these have."""
        return self.divides_weights == "products"

    @property
    def divides_experts(self) -> bool:
        """Tells whether its ranks are there to divide experts alone."""
        return self.divides_weights == "experts"

    @property
    def divides_microbatch(self) -> bool:
        """Tells whether its ranks share the work of one microbatch."""
        return self.divides_tokens or self.divides_products

    @property
    def shares_states(self) -> bool:
        """Tells whether its ranks have parts of states where these are divided."""
        return self.divides_states or self.joins_states

    @property
    def copies_weights(self) -> bool:
        """Tells whether its ranks have each weight and each state again, whole as on one device."""
        return self.same_weights and not self.shares_states

    @property
    def has_parts(self) -> bool:
        """Tells whether its ranks may have parts of one weight or of its states."""
        return self.shares_states or self.divides_weights is not None

    @property
    def keyword(self) -> str:
        """Returns the keyword argument that asks for it."""
        return self.option or self.name

    @property
    def old_flag(self) -> str:
        """Returns the flag that asked for it before `--axes`, which works for this release."""
        return f"--{self.keyword.replace('_', '-')}"

    def typed(self, size: int) -> str:
        """Returns what a user types for so many ranks along it: `axes={'tp': 2} (--axes tp=2)`."""
        return f"axes={{{self.name!r}: {size}}} (--axes {self.name}={size})"

    def same(self, *, of_experts: bool) -> bool:
        """Tells whether its ranks hold the same weights, or the same experts."""
        return self.same_experts if of_experts else self.same_weights
