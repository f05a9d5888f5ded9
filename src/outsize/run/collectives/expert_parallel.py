"""Implements calls of experts over ranks that each have some of the experts, and tokens of their own.

    gathered     every rank gets all tokens, computes the pairs (token, choice) of its own experts, and gets
                 the sum of all ranks' results for its tokens
                 forward: all-gather, reduce-scatter      backward: all-gather, reduce-scatter
    dispatched   each pair is sent to the rank of its expert, and its result is sent back and added at home
                 forward: all-to-all there and back       backward: all-to-all there and back

A token of C channels is sent (n - 1) times where tokens are gathered over n ranks, and about k (n - 1) / n
times where its k choices are dispatched. So dispatching sends less for k < n, and is what runs then.

Pairs are rows that are selected, never masked by a weight of 0, since 0 x inf is no number. A rank that gets
no row has gradients of zero, as experts have in one process that no token has chosen. The numbers of rows are
exchanged first, in both forms, and the host waits for them once a call. A call that is run again in a
backward has the same routing, since what it is made from is the same to the bit.

Sources: GShard, arXiv 2006.16668; Megatron-LM's all-gather and all-to-all dispatchers. Deviation: rows keep
their own order, and no expert has a capacity; a router that drops tokens has done so before. Oracle:
tests/dist/test_experts.py, the numbers of one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from outsize.device.readback import host_numbers
from outsize.program.sharding.axis_group import AxisGroup
from outsize.program.sharding.expert_parallel.expert_tape import ExpertCall
from outsize.program.sharding.expert_parallel.experts import counting
from outsize.program.sharding.share import Share
from outsize.run.collectives.functions import InFlight, landed
from outsize.run.collectives.tensor_parallel import TensorParallelGroup, named_collective
from outsize.run.transport.rank_collectives import RankCollectives


@final
@dataclass(slots=True)
class RowCounts:
    """Counts the rows that a rank has computed: of all calls, those of the call with most, and the mean of a
    rank's rows in that call.
    """

    calls: int = 0
    rows: int = 0
    expected_rows: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Holds how many rows, pairs of a token and an expert, each rank of the group has computed."""

    rows: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Returns the fullest rank's rows by the mean rank's; 1 where all have as many."""
        return max(self.rows) * len(self.rows) / max(1, sum(self.rows)) if any(self.rows) else 1.0


@final
class ExpertParallelGroup(AxisGroup):
    """Runs the calls over one dim of a mesh; `sent` counts bytes by kind of collective.

    The bytes are counted as in ir/hardware/collectives.py: the input of a reduce_scatter, the output of an
    all_gather, and of an all_to_all what this rank sends, its own part included. `counts` has the rows of
    each module by its name.
    """

    computes_for_others: ClassVar[bool] = True

    def __init__(
        self, mesh: DeviceMesh, alike: TensorParallelGroup | None = None, *, ends_graphs: bool = False
    ) -> None:
        """Joins the ranks of `mesh`; `alike` are those among them that have this rank's tokens (tp): each
        sends its block of these. `ends_graphs`: compiled stages call it outside of their graphs.
        """
        self._ends_graphs = ends_graphs
        self.group, self._alike = TensorParallelGroup(mesh), alike
        self.place, self._ranks = self.group.place, RankCollectives.of(mesh.get_group())
        self.sent: Counter[str] = self.group.collectives.sent
        self.counts: dict[str, RowCounts] = {}
        self._load = [0] * self.place.ranks

    def collective(self, name: str) -> Callable[..., Any]:
        return named_collective(self, name, ends_graph=self._ends_graphs)

    def experts(self, call: ExpertCall, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Returns what the experts of all ranks make of this rank's tokens x (tokens, width).

        `index` and `weight` (tokens, choices) say which experts each token has chosen, and how much each
        counts. A choice that is no expert is dropped. Every rank calls this alike, with tokens of its own.
        """
        if self._alike is None:
            return self._of_rows(call, x, index, weight)
        rows = Share(0, (len(x),))
        x, index, weight = (
            self._alike.cut(x, rows),
            self._alike.collectives.part(index, rows),
            self._alike.cut(weight, rows),
        )
        return self._alike.gather(self._of_rows(call, x, index, weight), rows)

    @property
    def load(self) -> ExpertLoad:
        """Returns the rows of all ranks since `reset_load`, which the host knows without asking a device."""
        return ExpertLoad(tuple(self._load))

    def reset_load(self) -> None:
        """Counts the rows of all ranks anew."""
        self._load = [0] * self.place.ranks

    def _of_rows(self, call: ExpertCall, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        if call.experts.choices < self.place.ranks:
            return self._dispatched(call, x, index, weight)
        return self._gathered(call, x, index, weight)

    # -- gathered ------------------------------------------------------------------------------------

    def _gathered(self, call: ExpertCall, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        tokens = self._of_all(torch.tensor([len(x)], device=x.device))
        most = max(tokens)
        every_x, every_weight, every_index = _Gather.apply(self, most, x, weight, index)
        flat, (owner, counts) = every_index.reshape(-1).long(), self._owners(call, every_index)
        rows = [int(number) for number in host_numbers(list(counts.unbind()))]
        before, rank = sum(rows[: self.place.rank]), self.place.rank
        pairs = owner.argsort(stable=True)[before : before + rows[rank]]
        self._count(call, rows)
        token, own = pairs // index.shape[1], flat[pairs] - self._block(call)[0]
        made = self._apply(call, every_x[token], own, every_weight.reshape(-1)[pairs])
        summed = made.new_zeros(len(every_x), made.shape[1]).index_add(0, token, made)
        return _Scatter.apply(self, len(x), summed)

    def gather(self, x: Tensor, most: int) -> InFlight:
        """Begins to gather all ranks' rows, `most` of each; those that a rank lacks are 0, integers -1."""
        own = x.detach().contiguous()
        if len(x) < most:
            fill = 0 if x.is_floating_point() else -1
            own = torch.cat([own, own.new_full((most - len(x), *x.shape[1:]), fill)])
        out = own.new_empty(self.place.ranks * most, *x.shape[1:])
        self.sent["all_gather"] += out.numel() * out.element_size()
        return InFlight(self._ranks.begin_all_gather(out, own), (own,), out)

    def scatter(self, x: Tensor, own: int) -> InFlight:
        """Begins to add up all ranks' rows of this rank, of which it has `own`."""
        x = x.detach().contiguous()
        out = x.new_empty(len(x) // self.place.ranks, *x.shape[1:])
        self.sent["reduce_scatter"] += x.numel() * x.element_size()
        return InFlight(self._ranks.begin_reduce_scatter(out, x), (x, out), out[:own])

    # -- dispatched ----------------------------------------------------------------------------------

    def _dispatched(self, call: ExpertCall, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        choices, flat = index.shape[1], index.reshape(-1).long()
        owner, counts = self._owners(call, index)
        table = self._table(counts)
        there = table[self.place.rank]
        back = [row[self.place.rank] for row in table]
        pairs = owner.argsort(stable=True)[: sum(there)]
        rows, weights, experts = _Exchange.apply(
            self, there, back, x[pairs // choices], weight.reshape(-1)[pairs], flat[pairs]
        )
        self._count(call, [sum(column) for column in zip(*table, strict=True)])
        made = self._apply(call, rows, experts - self._block(call)[0], weights)
        (made,) = _Exchange.apply(self, back, there, made)
        slots = made.new_zeros(len(flat), made.shape[1]).index_copy(0, pairs, made)
        return slots.unflatten(0, (len(x), choices)).sum(1)

    def exchange(
        self, tensors: Iterable[Tensor], there: Sequence[int], back: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Sends `there[r]` rows of each tensor to each rank r, in the order of ranks; returns the `back[r]`
        that come. All begin before any is waited for.
        """
        flights = list[InFlight]()
        for x in tensors:
            own, out = x.detach().contiguous(), x.new_empty(sum(back), *x.shape[1:])
            flights.append(InFlight(self._ranks.begin_all_to_all(out, own, back, there), (own,), out))
            self.sent["all_to_all"] += own.numel() * own.element_size()
        return landed(flights)

    # -- both ----------------------------------------------------------------------------------------

    def _block(self, call: ExpertCall) -> tuple[int, int]:
        return self.place.block(call.experts.count)

    def _owners(self, call: ExpertCall, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which rank has the expert of each pair, in a row (`ranks` for a dropped one), and how many
        pairs each rank has.
        """
        ranks, flat = self.place.ranks, index.reshape(-1).long()
        is_kept = (flat >= 0) & (flat < call.experts.count)
        owner = torch.where(is_kept, flat // -(-call.experts.count // ranks), ranks)
        return owner, torch.bincount(owner, minlength=ranks + 1)[:ranks]

    def _of_all(self, numbers: Tensor) -> list[int]:
        """Returns all ranks' numbers on the host."""
        every = self.gather(numbers, len(numbers)).end()
        return [int(number) for number in host_numbers(list(every.unbind()))]

    def _table(self, counts: Tensor) -> list[list[int]]:
        """Returns by rank how many rows it sends to each."""
        every = self._of_all(counts)
        return [every[first : first + len(counts)] for first in range(0, len(every), len(counts))]

    def _count(self, call: ExpertCall, rows: Sequence[int]) -> None:
        """Counts the rows of all ranks in one call."""
        counts = self.counts.setdefault(call.experts.name, RowCounts())
        counts.calls += 1
        counts.rows += rows[self.place.rank]
        counts.expected_rows += sum(rows) / self.place.ranks
        self._load = [known + more for known, more in zip(self._load, rows, strict=True)]

    def _apply(self, call: ExpertCall, rows: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Returns what this rank's experts make of rows, each with one expert."""
        start, stop = self._block(call)
        if not len(rows):
            return _NoRows.apply(call.dtype, rows, weight, *_parameters(call.module))
        with counting(call.module, call.experts.counters, stop - start):
            return call.module(rows, index[:, None], weight[:, None])


def _parameters(module: nn.Module) -> list[Tensor]:
    """Returns the parameters in the module's tables, which may be copies in another dtype."""
    return [weight for weight in module._parameters.values() if weight is not None]


@final
class _Gather(torch.autograd.Function):
    """Gathers rows of several tensors; one function, so that all ranks send their gradients in one order."""

    @staticmethod
    def forward(ctx: Any, group: ExpertParallelGroup, most: int, *tensors: Tensor) -> Any:
        ctx.group, ctx.owns = group, [len(t) for t in tensors if t.is_floating_point()]
        made = landed([group.gather(t, most) for t in tensors])
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        ctx.floating = [each.is_floating_point() for each in made]
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent = [grad for grad, is_floating in zip(grads, ctx.floating, strict=True) if is_floating]
        pairs = zip(sent, ctx.owns, strict=True)
        scattered = iter(landed([ctx.group.scatter(grad, own) for grad, own in pairs]))
        return None, None, *(next(scattered) if is_floating else None for is_floating in ctx.floating)


@final
class _Scatter(torch.autograd.Function):
    """Adds up rows of all ranks, of which each gets its own."""

    @staticmethod
    def forward(ctx: Any, group: ExpertParallelGroup, own: int, x: Tensor) -> Any:
        ctx.group, ctx.most = group, len(x) // group.place.ranks
        return group.scatter(x, own).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, ctx.group.gather(grads[0], ctx.most).wait()


@final
class _Exchange(torch.autograd.Function):
    """Exchanges rows of several tensors; their gradients go back, in one order on all ranks."""

    @staticmethod
    def forward(
        ctx: Any, group: ExpertParallelGroup, there: list[int], back: list[int], *tensors: Tensor
    ) -> Any:
        ctx.group, ctx.there, ctx.back = group, there, back
        made = group.exchange(tensors, there, back)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        ctx.floating = [each.is_floating_point() for each in made]
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent = [grad for grad, is_floating in zip(grads, ctx.floating, strict=True) if is_floating]
        returned = iter(ctx.group.exchange(sent, ctx.back, ctx.there))
        return None, None, None, *(next(returned) if is_floating else None for is_floating in ctx.floating)


@final
class _NoRows(torch.autograd.Function):
    """Returns the empty result of no rows; the gradients of all that it is given are zeros."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, rows: Tensor, *others: Tensor) -> Any:
        ctx.tensors = [(t.shape, t.dtype, t.device) for t in (rows, *others)]
        return torch.empty_like(rows, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = zip(ctx.tensors, ctx.needs_input_grad[1:], strict=True)
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for (shape, dtype, device), wanted in needed
        )
        return None, *zeros
