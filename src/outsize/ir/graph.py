"""Describes a model as data: units in execution order, the values between them, the parameters.

Every boundary between two neighbouring units is a legal cut: capture merges instructions that must stay
together (in-place writes, two writers of one buffer) into one unit, so a planner may cut anywhere without
asking. Values that any stage can compute from the inputs are not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Final, Literal, Self, final

from outsize.ir.base import Record
from outsize.ir.units.recompute_segments import numbered
from outsize.ir.units.tensor_styles import TensorStyles

Form = Literal["tape", "modules"]
OpFamily = Literal[
    "matmul",
    "unaligned_matmul",
    "attention",
    "convolution",
    "direct_convolution",
    "layout_copy",
    "elementwise",
    "normalisation",
    "reduction",
    "embedding",
    "cast",
    "other",
]
MATMULS: Final[frozenset[OpFamily]] = frozenset({"matmul", "unaligned_matmul"})
CONVOLUTIONS: Final[frozenset[OpFamily]] = frozenset({"convolution", "direct_convolution"})
# Smaller storages are not worth a separate copy: they stay on the device where activations are offloaded.
SMALL_BYTES: Final = 1 << 20
# The kind of a unit that is put together of several, so that fewer cuts are tried.
PIECE: Final = "Piece"


@final
class Work(Record):
    """Describes the work of one op family in one pass of a unit, for the graph's batch as one microbatch.

    `moved_bytes` are read and written; `launches` ops (kernels) do it; `dtype` is the one they compute in.
    `block_elements` are read and written by each block of threads of a kernel that has one for each channel;
    0 for kernels that fill a device. `instructions` are those that all threads of an accelerator's kernels
    issue, where they are what takes longest (capture/costs/thread_instructions.py); 0 where they are not.
    `fused_flops`, `fused_bytes` and `fused_launches` are what is left of casts, and of products of which a
    result is thrown away, where a compiler or a library writes their kernels; 0 for other work, of which a
    stack of kernels finds that out itself. Where there is a `library_dtype`, they are those of a library
    alone, which computes in this type. `library_bytes` and `library_launches` are what is left of casts where
    a transformer engine writes them, which has its weights cast already.
    """

    family: OpFamily
    dtype: str
    flops: int
    moved_bytes: int
    launches: int = 1
    block_elements: int = 0
    instructions: int = 0
    fused_flops: int = 0
    fused_bytes: int = 0
    fused_launches: int = 0
    library_dtype: str = ""
    library_bytes: int = 0
    library_launches: int = 0


@final
class Parameter(Record):
    """Describes one trainable or frozen tensor; `names` are all its FQNs (more than one when tied).

    `experts` is the number of experts along its first dim, which ranks can divide; 0 for any other tensor.
    `whole` is the shape of the tensor of which a tensor-parallel rank has this part; () where it has all of
    it. An `outer` tensor is looked up by index, or is of the last layer with weights. `size_bytes` are of all
    that is stored, scales too; `numbers` are how many numbers codes stand for, 0 where each element is one.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    trainable: bool
    experts: int = 0
    whole: tuple[int, ...] = ()
    outer: bool = False
    numbers: int = 0

    @property
    def name(self) -> str:
        """Returns the first FQN, under which the optimizer state is stored."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def count(self) -> int:
        """Returns how many numbers it has, also where these are stored as codes."""
        return self.numbers or self.numel

    @property
    def is_hidden_matrix(self) -> bool:
        """Tells whether it is a matrix (or one for each expert) between the first and the last layer, which
        is what optimizers such as Muon are for.
        """
        dims = len(self.whole or self.shape)
        return not self.outer and (dims == 2 or (dims == 3 and self.experts > 0))


@final
class ShardedFraction(Record):
    """Describes what tensor parallelism shards of a unit: a share of its work and saved bytes, and its
    weights.

    Sums (all-reduces) and gathers (and reduce-scatters) of its passes are in bytes of whole tensors.
    `again_bytes` are those that its backward gathers again, which no forward has kept whole. Of the
    backward's, `begun_sum` and `begun_gather` have only begun when the gradients of the parameters `beside`
    are computed. `forward_maxima` and `backward_maxima` are reductions of a few numbers: the largest elements
    of operands whose scales are of whole tensors.
    """

    work: float = 0.0
    saved_bytes: int = 0
    parameters: tuple[str, ...] = ()
    forward_sum: int = 0
    forward_gather: int = 0
    backward_sum: int = 0
    backward_gather: int = 0
    again_bytes: int = 0
    begun_sum: int = 0
    begun_gather: int = 0
    forward_maxima: int = 0
    backward_maxima: int = 0
    beside: tuple[str, ...] = ()


@final
class Value(Record):
    """Describes a tensor that crosses at least one unit boundary.

    Values with the same `storage` are views of one memory of `storage_bytes`; -1 means unknown. `saved_by` is
    the unit whose `saved_bytes` count this memory; -1 where autograd does not save it. `also_saved_by` are
    later units that save it as well. `divided` says that tensor-parallel ranks have shards of it;
    `in_sequence` that they have shards under sequence parallelism.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    requires_grad: bool
    producer: int
    consumers: tuple[int, ...]
    storage: int = -1
    storage_bytes: int = 0
    saved_by: int = -1
    also_saved_by: tuple[int, ...] = ()
    divided: bool = False
    in_sequence: bool = False


@final
class Unit(Record):
    """Describes the smallest piece a stage can be made of: one leaf call (or heavy op) with its glue.

    `flops` and `moved_bytes` (read + written) are of the forward. `saved_bytes` is what autograd saves until
    the backward, each storage counted once, without parameters; `saved_small_bytes` of it are in storages
    below SMALL_BYTES, `saved_input_bytes` of it are inputs of the model. `workspace_bytes` is the most that
    its ops hold in addition to arguments, results and saved tensors. `backward_workspace_bytes` is the most
    that gradients inside a unit of several ops hold in addition to what it has saved; `waiting_bytes` are the
    gradients that a backward in two halves stores for its weights. `weight_sum_bytes` of the workspace of the
    backward are float32 sums of gradients of weights, as long as the weights however few rows a device has.
    `cast_bytes` are the copies of its weights
    in autocast's dtype, which a stage makes once per step; they are in no other figure. `lasting_bytes` stay
    for each microbatch until the batch is over: what inference returns or caches. The three tuples give
    work by family of ops and pass; they are empty where it was not counted. `divided` is set where the graph
    has `tensor`; `in_sequence` replaces it under sequence parallelism. `row_gather_bytes` is set where the
    graph has `rows`: bytes of whole tensors that ranks with rows of each sequence gather, in pieces of these
    heads (`row_heads`) where that is not 0; so is `row_maxima`, in how many operands of a pass they ask each
    other for the largest element. `routed_bytes` are
    the tokens that it gives to experts, each with `choices` of them.
    """

    index: int
    name: str
    kind: str
    parameters: tuple[str, ...]
    buffer_bytes: int
    flops: int
    moved_bytes: int
    saved_bytes: int
    workspace_bytes: int = 0
    saved_input_bytes: int = 0
    saved_small_bytes: int = 0
    backward_workspace_bytes: int = 0
    waiting_bytes: int = 0
    weight_sum_bytes: int = 0
    cast_bytes: int = 0
    lasting_bytes: int = 0
    row_gather_bytes: int = 0
    row_heads: int = 0
    row_maxima: int = 0
    forward: tuple[Work, ...] = ()
    backward_input: tuple[Work, ...] = ()
    backward_weight: tuple[Work, ...] = ()
    divided: ShardedFraction = ShardedFraction()
    in_sequence: ShardedFraction = ShardedFraction()
    routed_bytes: int = 0
    choices: int = 0


# In a loop of the user's own a device holds so many times the outputs of the batch when the loss begins its
# backward: the outputs, or what the loss keeps in their place (cross entropy: logarithms of chances), the
# gradient that it makes of that, and the one that enters the model.
OUTPUT_COPIES: Final = 3


@final
class RowFacts(Record):
    """Says whether ranks can hold sequences by rows: `tokens` of the longest; 0 where the walk of the program
    `refused`, with the reason. `in_order`: no row reads a later one, so slices of sequences can be computed
    one after the other.
    """

    tokens: int = 0
    refused: str = ""
    in_order: bool = False


@final
class ModelGraph(Record):
    """Describes a model for one input signature, as the planner sees it.

    `form` says how it runs: cut and pipelined as a tape, or in its own Python with whole modules on their
    stages, where nothing overlaps. `input_bytes` are those of all input tensors and targets; in a loop of the
    user's own (`in_loop`) `returned_bytes` of them are outputs, as many times as a device holds them; 0 in a
    step of an engine. `cached_tokens` is the length of the sequences that a generation has in its cache; 0
    where there is none. `tensor` says how tensor parallelism shards the model, or is None where that was not
    derived (capture/graph/tensor_parallel.py); `rows` says the same of context parallelism
    (capture/graph/row_parallel.py). `bucket_bytes` are the gradients that replicas sum together at least, of
    all and for each rank of them; 0 where that is left to outsize.
    """

    model: str
    fingerprint: str
    form: Form = "tape"
    batch_size: int
    units: tuple[Unit, ...]
    values: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    output_bytes: int = 0
    input_bytes: int = 0
    returned_bytes: int = 0
    cached_tokens: int = 0
    notes: tuple[str, ...] = ()
    tensor: TensorStyles | None = None
    rows: RowFacts | None = None
    bucket_bytes: tuple[int, int] = (0, 0)

    def with_lasting(self, per_sample: Mapping[str, int], tokens: int = 0) -> Self:
        """Returns the graph of inference: its outputs last until the batch is over, and so do these bytes
        for each sample, the cache of `tokens` tokens. A generation runs in the model's own Python.

        They are given by the names of units; a name that no unit has counts for the unit whose name is most
        alike from the left.
        """
        lasting = [0] * len(self.units)
        lasting[-1] = self.output_bytes
        at = {unit.name: unit.index for unit in self.units}
        for name, size in per_sample.items():
            near = name if name in at else max(at, key=lambda other: _alike(name, other))
            lasting[at[near]] += size * self.batch_size
        units = (u.model_copy(update={"lasting_bytes": n}) for u, n in zip(self.units, lasting, strict=True))
        if not per_sample:
            return self.model_copy(update={"units": tuple(units), "cached_tokens": 0})
        held = self.input_bytes + self._arguments_bytes()
        return self.model_copy(update={"units": tuple(units), "cached_tokens": tokens, "input_bytes": held})

    @property
    def in_loop(self) -> bool:
        """Returns whether the loop is the user's own (`outsize.split`), whose autograd gets the gradients of
        all weights of a microbatch at once.
        """
        return self.returned_bytes > 0

    def of_loop(self, *, has_loss: bool) -> Self:
        """Returns the graph of a loop of the user's own, in which every device has the outputs of the batch.

        Where the loss begins its backward a device holds their size OUTPUT_COPIES times; where the model
        `has_loss` of its own, whose gradient is a number, once.
        """
        held = self.output_bytes * (1 if has_loss else OUTPUT_COPIES)
        return self.model_copy(
            update={"returned_bytes": held, "input_bytes": self.input_bytes - self.returned_bytes + held}
        )

    def of_step(self) -> Self:
        """Returns the graph of a step of an engine."""
        left = self.input_bytes - self.returned_bytes
        return self.model_copy(update={"returned_bytes": 0, "input_bytes": left})

    def of_replicas(self, count: int) -> Self:
        """Returns the graph of one of several replicas, which in a loop of the user's own has the outputs of
        them all.
        """
        held = self.returned_bytes * count
        more = held - self.returned_bytes
        return self.model_copy(update={"returned_bytes": held, "input_bytes": self.input_bytes + more})

    def _arguments_bytes(self) -> int:
        """Returns what the model's own Python holds on every device while a block runs in a generation: the
        argument of the first block and that of the running one, which no unit reads any more.
        """
        block = numbered([unit.name for unit in self.units])
        between = (
            v.size_bytes for v in self.values if any(block[v.producer] != block[user] for user in v.consumers)
        )
        return 2 * max(between, default=0)

    @property
    def cache_bytes(self) -> tuple[int, ...]:
        """Returns what each unit keeps in a cache for one microbatch."""
        *others, last = (unit.lasting_bytes for unit in self.units)
        return (*others, last - self.output_bytes) if self.cached_tokens else (0,) * len(self.units)

    @cached_property
    def parameter_of(self) -> dict[str, Parameter]:
        """Maps every FQN (tied names too) to its Parameter."""
        return {name: p for p in self.parameters for name in p.names}

    def owned_parameters(self, first: int, last: int) -> tuple[Parameter, ...]:
        """Returns the parameters whose first user is a unit in first..last (both inclusive)."""
        places = (place for unit in range(first, last + 1) for place in self._owned_places.get(unit, ()))
        return tuple(self.parameters[place] for place in sorted(places))

    @cached_property
    def _owned_places(self) -> dict[int, list[int]]:
        """Maps units to the places of the parameters that they use first."""
        owner, places = self.owner_of, dict[int, list[int]]()
        for place, parameter in enumerate(self.parameters):
            if parameter.name in owner:
                places.setdefault(owner[parameter.name], []).append(place)
        return places

    @cached_property
    def owner_of(self) -> dict[str, int]:
        """Maps each canonical parameter name to the index of the unit that uses it first."""
        owner: dict[str, int] = {}
        for unit in self.units:
            for name in unit.parameters:
                owner.setdefault(self.parameter_of[name].name, unit.index)
        return owner

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """Returns the values produced before unit `cut` and consumed by it or later."""
        return tuple(v for v in self.values if v.producer < cut and v.consumers[-1] >= cut)

    def in_order(self, order: Sequence[int]) -> ModelGraph:
        """Returns the model with its units in another order, in which each still comes after what
        it needs.
        """
        if list(order) == sorted(order):
            return self
        place = {unit: at for at, unit in enumerate(order)}
        units = (self.units[unit].model_copy(update={"index": at}) for at, unit in enumerate(order))
        # model_copy is avoided, since it would copy what was cached in the old order.
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        values = tuple(_moved(value, place) for value in self.values)
        return ModelGraph(**{**fields, "units": tuple(units), "values": values})

    @cached_property
    def cast_alone_bytes(self) -> tuple[int, ...]:
        """Returns for each unit those of its `cast_bytes` whose weights no other unit uses: half of the bytes
        of these weights, which a device that is given the casts need not have.
        """
        users = Counter(self.parameter_of[name].name for u in self.units for name in {*u.parameters})
        alone = [p for p in self.parameters if users[p.name] == 1 and p.name in self.owner_of]
        whole = [0] * len(self.units)
        for parameter in alone:
            whole[self.owner_of[parameter.name]] += parameter.size_bytes
        return tuple(min(unit.cast_bytes, size // 2) for unit, size in zip(self.units, whole, strict=True))

    @property
    def parameter_bytes(self) -> int:
        """Returns the bytes of all parameters, tied ones once."""
        return sum(p.size_bytes for p in self.parameters)


def _moved(value: Value, place: Mapping[int, int]) -> Value:
    """Returns a value whose units have moved; the first of those that save its memory counts its bytes."""
    return value.model_copy(
        update={
            "producer": place[value.producer],
            "consumers": tuple(sorted(place[unit] for unit in value.consumers)),
            "saved_by": place.get(value.saved_by, -1),
            "also_saved_by": tuple(sorted(place[unit] for unit in value.also_saved_by)),
        }
    )


def _alike(name: str, other: str) -> int:
    """Returns the number of characters that two names have in common from the left."""
    pairs = zip(name, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
