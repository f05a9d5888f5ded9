"""Problem: which kernels does a step launch, and what does its host do for each of them?

A forward is recorded op by op, as PyTorch runs it. What runs in the end depends on the stack of kernels:

    eager            a kernel for each op, launched from Python and autograd
    flash-3          the same, with the attention that torch is told to take: FlashAttention-3
    graphs           the same kernels, replayed as a graph of the device (`device_graphs=`)
    compiled         inductor's kernels, launched by its wrapper (`compiled=`)
    compiled-graphs  inductor's kernels, replayed as a graph
    fused            the layers of a transformer engine: norm with residual, rotary embedding, gated
                     activation and loss are a kernel each, and images have their channels last; launched from
                     Python
    fused-graphs     the same kernels, replayed as a graph

A stack is one record, which changes recorded works (`of_graph`) and the host's seconds for an op (`on`).
Whoever prices sees a graph and a cluster, and knows of no stack. outsize runs those before `fused`; the last
two are those of other systems. They are asked for (`Request(kernels=...)`), as is what a user tells torch.

    of all ops by elements and reductions in one pass of a unit one kernel is left, and of their bytes those
    that cross its border:    forward    what the unit takes and gives
                              gradient   the gradients of both, and again what it takes, which was saved
    but at most the share `single` of them, which is what is left of an op that a neighbour's kernel takes in

Products, attention, normalisations and convolutions stay what they are, but that images whose channels are
last are not copied, and their convolutions of single pixels reach what other convolutions do, and that a
transformer engine's products sum the gradients of their biases. A chain saves what crosses its border, and no
copies of it. A transformer engine's kernels save what they read, as they read it: operands that they cast to
a byte as such, frozen weights among them, and of a gated activation what it takes. Casts to few bits with
scales are the kernels that the record of their precision names (policies/precisions.py). A transformer engine
(`library_scales`) has cast the weights already, and casts what several products take once: in the kernel that
writes it, by scales of steps before, which no ranks ask each other for, or in one of its own, by those of
blocks. Weights with a
side below `least_side`, as of adapters, are multiplied as they are. Deviations: a kernel ends with its unit,
and what its product takes counts as if it took it; casts of trained weights, once a step, are free.
Complexity: O(units + users of all values). Oracle: tests/unit/planner/costs/test_kernel_stacks.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple, final

from outsize.ir.answers.request import PlanRequest
from outsize.ir.base import Record
from outsize.ir.cluster import Cluster
from outsize.ir.graph import MATMULS, ModelGraph, OpFamily, Parameter, ShardedFraction, Unit, Value, Work
from outsize.ir.hardware.constants import DataFile
from outsize.ir.hardware.devices import Device, figure_of, reached_by
from outsize.ir.plan import Kernels, Plan

_MERGED: Final[frozenset[OpFamily]] = frozenset({"elementwise", "reduction", "other"})
# A chain of so many ops writes copies that it saves, which a kernel for all of it does not.
_COPIES: Final = 3
_MATRIX: Final = 2
_OF_A_BYTE: Final = "float8_e4m3fn"


@final
class _KernelsRow(NamedTuple):
    """Says what is left of a chain of ops by elements, whether attention is a library's for its device, and
    not torch's, whether kernels save what they read, as they read it, and whether products follow each other
    so closely that the device runs into its limit of power. Gradients of so many bytes are summed together.
    """

    kernels: str
    single: float
    channels_last: bool
    sums_in_products: bool
    library_attention: bool
    saves_as_read: bool
    library_scales: bool
    least_side: int
    saturates: bool
    bucket_mb: int
    bucket_mb_per_rank: int
    origin: str


@final
class _RelayedRow(NamedTuple):
    """Says as which family works count where images have their channels last; "" where they are gone."""

    family: OpFamily
    becomes: str
    origin: str


@final
class _HostRow(NamedTuple):
    """Holds the share of the host's seconds for an op that is left."""

    host: str
    share: float
    origin: str


@final
class _StackRow(NamedTuple):
    """Says of which kernels and host a stack is, and which options of a run give it: none for those of other
    systems.
    """

    name: Kernels
    kernels: str
    host: str
    runs: bool
    is_compiled: bool
    is_replayed: bool
    origin: str


@final
class KernelStack(Record):
    """Is one stack: how its kernels merge ops, what is left of the host's seconds for one, and whether a run
    has it by compiled stages, by graphs of its devices, or both. Products of eight bits on its devices read
    weights in so many orders.
    """

    name: Kernels
    kernels: _KernelsRow
    host_share: float
    is_compiled: bool
    is_replayed: bool
    operand_orders: int

    @property
    def takes_turns(self) -> bool:
        """Returns whether a stage that waits for other ranks gives way to another microbatch: compiled and
        replayed ones do not.
        """
        return not (self.is_compiled or self.is_replayed)

    def of_graph(self, graph: ModelGraph) -> ModelGraph:
        """Returns the graph with the works of this stack's kernels; itself where they are those of ops."""
        if self.kernels.single == 1:
            return _with_flash_attention(graph) if self.kernels.library_attention else graph
        if self.kernels.saves_as_read:
            graph = _frozen_as_read(_saved_as_read(graph), self.operand_orders)
        if self.kernels.library_scales:
            graph = _with_library_scales(graph, self.kernels.least_side)
        taken, given, kept = _borders(graph)
        known = dict[tuple[Any, ...], dict[str, tuple[Work, ...]]]()

        def of_unit(unit: Unit) -> Unit:
            takes, gives = taken[unit.index], given[unit.index]
            passes = unit.forward, unit.backward_input, unit.backward_weight, takes, gives
            if passes not in known:
                gradients = [*unit.backward_input, *unit.backward_weight]
                gradients = self._merged(gradients, 2 * takes + gives)
                count = len(unit.backward_input)
                known[passes] = {
                    "forward": tuple(_present(self._merged(unit.forward, takes + gives))),
                    "backward_input": tuple(_present(gradients[:count])),
                    "backward_weight": tuple(_present(gradients[count:])),
                }
            held = _held(unit, takes if _is_chain(unit) else takes + gives, kept[unit.index])
            return unit.model_copy(update=known[passes] | held)

        buckets = tuple(10**6 * mb for mb in (self.kernels.bucket_mb, self.kernels.bucket_mb_per_rank))
        return graph.model_copy(update={"units": tuple(map(of_unit, graph.units)), "bucket_bytes": buckets})

    def on(self, cluster: Cluster) -> Cluster:
        """Returns the cluster whose hosts launch this stack's kernels, and whose devices reach with its
        attention and its products what those of a library do.
        """
        if self.host_share == 1 and not self.kernels.library_attention:
            return cluster
        return cluster.model_copy(update={"devices": tuple(map(self._launched, cluster.devices))})

    def _merged(self, works: Sequence[Work], border_bytes: int) -> list[Work | None]:
        """Returns each work as its kernel has it: the first that is merged is launched; None for what is
        gone.
        """
        moved_bytes = sum(work.moved_bytes for work in works if work.family in _MERGED)
        left = min(self.kernels.single, border_bytes / max(1, moved_bytes))
        launched, found = False, list[Work | None]()
        sums = self.kernels.sums_in_products and any(work.family in MATMULS for work in works)
        for work in works:
            if work.family == "reduction" and sums:
                found.append(None)
            elif work.family == "attention" and self.kernels.library_attention:
                # Its softmax is computed while the products of other rows are (arXiv 2407.08608, sec. 3).
                found.append(work.model_copy(update={"instructions": 0}))
            elif _is_cast(work) and self.kernels.library_scales and not work.library_dtype:
                found.append(_cast_by_library(work))
            elif work.fused_launches and (self.kernels.library_attention or not work.library_dtype):
                found.append(_written_anew(work))
            elif work.family in _MERGED:
                found.append(_shrunk(work, left, launches=0 if launched else 1))
                launched = True
            else:
                found.append(_relayed(work) if self.kernels.channels_last else work)
        return found

    def _launched(self, device: Device) -> Device:
        if not device.is_accelerator:
            return device
        own_s = reached_by(device.kind).host_s if device.host_s is None else device.host_s
        update = {"host_s": device.host_s if self.host_share == 1 else own_s * self.host_share}
        if self.kernels.library_attention:
            update["attention_share"] = figure_of("library_attention", device.kind)
        if self.kernels.saturates:
            reached = figure_of("matmul", device.kind)
            update["product_share"] = reached * figure_of("sustained_matmul", device.kind)
        return device.model_copy(update=update)


def _with_flash_attention(graph: ModelGraph) -> ModelGraph:
    """Returns the graph whose attention computes its softmax while it multiplies other rows."""

    def hidden(works: Sequence[Work]) -> tuple[Work, ...]:
        return tuple(
            work.model_copy(update={"instructions": 0}) if work.family == "attention" else work
            for work in works
        )

    passes = "forward", "backward_input", "backward_weight"
    units = (u.model_copy(update={name: hidden(getattr(u, name)) for name in passes}) for u in graph.units)
    return _changed(graph, units=tuple(units))


def _borders(graph: ModelGraph) -> tuple[list[int], list[int], list[int]]:
    """Returns the bytes of the values that each unit takes and gives, and of those that it is the first to
    save.
    """
    taken, given, kept = ([0] * len(graph.units) for _ in range(3))
    for value in graph.values:
        given[value.producer] += value.size_bytes
        if value.saved_by >= 0:
            kept[value.saved_by] += value.size_bytes
        for consumer in value.consumers:
            taken[consumer] += value.size_bytes
    return taken, given, kept


def _saved_as_read(graph: ModelGraph) -> ModelGraph:
    """Returns the graph whose products save their operands in the bits that they multiply, a copy for all of
    them, and whose gated activations are computed again in the backward from what gate and product gave.
    """
    own, few = _bytes_inside(graph), [_casts_to_a_byte(unit) for unit in graph.units]
    views = Counter(value.storage for value in graph.values if value.storage >= 0)
    units, values = list(graph.units), list[Value]()
    for value in graph.values:
        # Memory of several values stays as long as one of them is saved.
        saved = value.saved_by >= 0 and views[value.storage] <= 1
        savers = (value.saved_by, *value.also_saved_by) if saved else ()
        casting = [saver for saver in savers if few[saver] and _is_operand(graph, saver, value)]
        if casting:
            units[casting[0]] = _saving(units[casting[0]], value, prod(value.shape))
        if (savers and len(casting) == len(savers)) or (saved and _is_gate(graph, own, value)):
            units[value.saved_by] = _saving(units[value.saved_by], value, -value.size_bytes)
            value = value.model_copy(update={"saved_by": -1, "also_saved_by": ()})
        values.append(value)
    return _changed(graph, units=tuple(units), values=tuple(values))


def _frozen_as_read(graph: ModelGraph, orders: int) -> ModelGraph:
    """Returns the graph whose frozen weights are kept as products in a byte read them, in so many orders."""
    casting = {graph.parameter_of[n].name for u in graph.units if _casts_to_a_byte(u) for n in u.parameters}

    def kept(parameter: Parameter) -> Parameter:
        if parameter.trainable or parameter.name not in casting or len(parameter.shape) < 2:
            return parameter
        size_bytes = min(parameter.size_bytes, orders * parameter.numel)
        return parameter.model_copy(update={"size_bytes": size_bytes})

    return _changed(graph, parameters=tuple(map(kept, graph.parameters)))


def _with_library_scales(graph: ModelGraph, least_side: int) -> ModelGraph:
    """Returns the graph with the casts that a transformer engine has, and no largest element that is asked
    for.
    """
    sides = {u.index: _sides(graph, u) for u in graph.units if any(map(_is_cast, u.forward))}
    # Of those whose weights are not known to be narrow, the features that they take.
    casting = {at: each[-1:] for at, each in sides.items() if min(each, default=least_side) >= least_side}
    repeated = set[int]()
    for value in graph.values:
        readers = (at for at in value.consumers if value.shape and casting.get(at) == value.shape[-1:])
        repeated.update(sorted(readers)[1:])

    def of_unit(unit: Unit) -> Unit:
        if unit.index not in sides:
            return unit
        update = dict[str, Any](row_maxima=0)
        for name in ("divided", "in_sequence"):
            update[name] = getattr(unit, name).model_copy(update={"forward_maxima": 0, "backward_maxima": 0})
        passes = ("forward", "backward_input", "backward_weight")
        for name in passes if unit.index not in casting else passes[: unit.index in repeated]:
            update[name] = tuple(work for work in getattr(unit, name) if not _is_cast(work))
        return unit.model_copy(update=update)

    return _changed(graph, units=tuple(map(of_unit, graph.units)))


def _is_cast(work: Work) -> bool:
    return work.library_launches > 0


def _sides(graph: ModelGraph, unit: Unit) -> tuple[int, ...]:
    """Returns the sides of a unit's widest weight, or of each of a stack: what it makes and what it takes."""
    shapes = (graph.parameter_of[name].shape for name in unit.parameters)
    return max((shape[-_MATRIX:] for shape in shapes if len(shape) >= _MATRIX), key=min, default=())


def _changed(graph: ModelGraph, **update: Any) -> ModelGraph:
    """Returns the graph with other fields; a copy by pydantic would keep what was cached of the old ones."""
    return ModelGraph(**{name: getattr(graph, name) for name in type(graph).model_fields} | update)


def _bytes_inside(graph: ModelGraph) -> list[int]:
    """Returns the bytes that each unit saves of what it computes inside, which no other unit sees."""
    inside = [unit.saved_bytes for unit in graph.units]
    for value in {value.storage: value for value in graph.values if value.saved_by >= 0}.values():
        inside[value.saved_by] -= value.size_bytes
    return inside


def _casts_to_a_byte(unit: Unit) -> bool:
    """Tells whether the unit casts what its products multiply to a byte for each element. Where scales are of
    blocks, the forward saves its operand so in any stack (policies/precisions.py).
    """
    multiplied = {work.dtype for work in unit.forward if work.family in MATMULS}
    return any(work.family == "cast" for work in unit.forward) and multiplied == {_OF_A_BYTE}


def _is_operand(graph: ModelGraph, unit: int, value: Value) -> bool:
    """Tells whether a product of the unit multiplies this value with a weight: their features are as many."""
    weights = (graph.parameter_of[name].shape for name in graph.units[unit].parameters)
    return any(len(shape) > 1 and shape[-1] == value.shape[-1] for shape in weights if value.shape)


def _is_gate(graph: ModelGraph, own: Sequence[int], value: Value) -> bool:
    """Tells whether a value was made by elements from a result that its unit has saved, and does nothing but
    scale the result of another product, which has saved that.
    """
    units, reader = graph.units, value.saved_by
    return (
        not value.also_saved_by
        and value.consumers == (reader,)
        and min(own[value.producer], own[reader]) >= value.size_bytes
        and all(any(work.family in MATMULS for work in units[at].forward) for at in (value.producer, reader))
        and not _is_operand(graph, reader, value)
    )


def _saving(unit: Unit, value: Value, more_bytes: int) -> Unit:
    """Returns the unit that saves so many more bytes for a value, and ranks their shares of them.

    Ranks with shards of a sequence save theirs of what a product gathers, which in ops with scales of whole
    tensors they save whole.
    """
    shared = value.divided or (value.in_sequence and more_bytes > 0)

    def part(divided: ShardedFraction, of_ranks: bool) -> ShardedFraction:
        saved_bytes = max(0, divided.saved_bytes + more_bytes * of_ranks)
        return divided.model_copy(update={"saved_bytes": saved_bytes})

    update = {
        "saved_bytes": unit.saved_bytes + more_bytes,
        "divided": part(unit.divided, value.divided),
        "in_sequence": part(unit.in_sequence, shared),
    }
    return unit.model_copy(update=update)


def _is_chain(unit: Unit) -> bool:
    return all(work.family in _MERGED for work in unit.forward)


def _held(unit: Unit, most_bytes: int, kept_bytes: int) -> dict[str, Any]:
    """Returns what is left of the bytes that a unit saves and works with: inside a kernel nothing is written,
    so that what crosses its border is saved, and no copy of it in another type.
    """
    if sum(work.launches for work in unit.forward if work.family in _MERGED) < _COPIES:
        return {}
    saved = min(unit.saved_bytes, max(most_bytes, kept_bytes))
    left = saved / unit.saved_bytes if unit.saved_bytes else 1.0

    def part(divided: ShardedFraction) -> ShardedFraction:
        return divided.model_copy(update={"saved_bytes": round(divided.saved_bytes * left)})

    return {
        "saved_bytes": saved,
        "workspace_bytes": min(unit.workspace_bytes, most_bytes),
        "backward_workspace_bytes": min(unit.backward_workspace_bytes, most_bytes),
        "divided": part(unit.divided),
        "in_sequence": part(unit.in_sequence),
    }


def _shrunk(work: Work, left: float, launches: int) -> Work:
    """Returns a share of a work; instructions load and store what the bytes say."""
    moved, issued = round(work.moved_bytes * left), round(work.instructions * left)
    return work.model_copy(update={"launches": launches, "moved_bytes": moved, "instructions": issued})


def _written_anew(work: Work) -> Work:
    """Returns casts, and products beside them, as the record of their precision says that a compiler or a
    library writes them.
    """
    fused = {"flops": work.fused_flops, "moved_bytes": work.fused_bytes, "launches": work.fused_launches}
    return work.model_copy(update={"dtype": work.library_dtype or work.dtype, "library_dtype": "", **fused})


def _cast_by_library(work: Work) -> Work:
    """Returns the cast of a transformer engine, without what the kernel does that writes its operand."""
    return work.model_copy(update={"moved_bytes": work.library_bytes, "launches": work.library_launches})


def _relayed(work: Work) -> Work | None:
    """Returns the work on images whose channels are last; a normalisation of them fills the device."""
    becomes = _RELAYED.get(work.family, work.family)
    if not becomes:
        return None
    if becomes == work.family and not work.block_elements:
        return work
    return work.model_copy(update={"family": becomes, "block_elements": 0})


def _present(works: Sequence[Work | None]) -> Iterator[Work]:
    return (work for work in works if work is not None)


_FILE: Final = DataFile.beside(__file__)
_KERNELS: Final = {row.kernels: row for row in _FILE.rows("kernels", _KernelsRow)}
_HOSTS: Final = {row.host: row.share for row in _FILE.rows("hosts", _HostRow)}
_RELAYED: Final = {row.family: row.becomes for row in _FILE.rows("relayed", _RelayedRow)}
_STACKS: Final = {row.name: row for row in _FILE.rows("stacks", _StackRow)}


_RUN: Final = tuple(row for row in _STACKS.values() if row.runs)
EAGER: Final[Kernels] = "eager"


@cache
def kernel_stack(name: Kernels, device_kind: str = "") -> KernelStack:
    """Returns the record of a stack, on devices of a kind where that is known."""
    row = _STACKS[name]
    return KernelStack(
        name=name,
        kernels=_KERNELS[row.kernels],
        host_share=_HOSTS[row.host],
        is_compiled=row.is_compiled,
        is_replayed=row.is_replayed,
        operand_orders=int(figure_of("operand_orders", device_kind)),
    )


def takes_turns(asked: PlanRequest | Plan) -> bool:
    """Returns whether a stage of such a plan that waits for other ranks gives way to another microbatch:
    statistics of a whole batch are collected before.
    """
    return kernel_stack(asked.kernels).takes_turns and asked.bn != "sync"


def source_of_host(name: Kernels) -> str | None:
    """Returns where the share of its host's seconds is from, as `source (device, date)`."""
    return _FILE.source_of("hosts", host=_STACKS[name].host)


def stack_of_run(*, compiled: bool, device_graphs: bool) -> Kernels:
    """Returns the stack of a run whose stages are compiled, or recorded as graphs of their devices."""
    return next(row.name for row in _RUN if (row.is_compiled, row.is_replayed) == (compiled, device_graphs))


def stacks_of_runs() -> tuple[Kernels, ...]:
    """Returns the stacks that outsize runs."""
    return tuple(row.name for row in _RUN)
