"""Finds the dim of each input along which the samples lie, when the shapes alone do not say it.

    lstm(x [length, batch, width]) with target [batch]         x: 1, target: 0
    model(image [batch, 3, h, w], anchors [k, 4])              image: 0, anchors: none
    model(ids [batch, t], patches [n, w], grid [batch, 3])     patches: as many rows as each row's product

Where all tensors agree in dim 0 and no other dim has that size, samples lie along dim 0. Otherwise the
candidates that the shapes allow are tried in turn, beginning with those that assign a batch dim to most
tensors: the batch is grown from b to b + 1 samples along the candidate's dims and recorded on fake tensors;
the first candidate that the model accepts is used. A dim in the user's `batch_dims` is used as given. Where
the rows of a tensor are as many as an integer tensor of the batch says (packed.py), that is tried as soon as
the model has refused such a tensor whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any, final

from torch import Tensor, nn

from outsize.capture.recording.fallbacks import LossFn, TapeOptions, record
from outsize.errors import BadOption, ExampleRejected
from outsize.program.tree import leaves
from outsize.run.stage.to_device import TapeHome
from outsize.train.batch.batch import Batch, Dims, evaluating_loss
from outsize.train.batch.packed import CountRows, PackedBy, PackedRows, insist_on_rows, packed_by_one_of

Asked = Mapping[str | int, int | str | CountRows | None]
Rule = int | PackedBy | None
Rules = tuple[Rule, ...]  # batch dims, and how to count rows, for all batches of a kind
Rejection = Callable[[Batch], Exception | None]
_KNOWN, _TRIES = 4096, 32  # how many candidates are ranked, and how many are tried


@final
class BatchDims:
    """Finds the batch dims, once for all batches of equal ranks and dtypes.

    `rejection(batch)` gives the error with which the model rejects the batch, if it does. `asked` maps an
    argument's name or position, or "target", to the batch dim of all its tensors; for a tensor whose rows
    belong to samples, to the name of the argument that counts them, or to a function of the model's arguments
    that does.
    """

    def __init__(self, rejection: Rejection, asked: Asked | None = None) -> None:
        self._rejection, self._asked = rejection, dict(asked or {})
        self._found: dict[tuple[Any, ...], Rules] = {}

    def of(self, batch: Batch) -> Batch:
        """Returns the batch with its dims.

        Raises ExampleRejected where several candidates are possible and the model rejects all of them, and
        the batch as it is.
        """
        if batch.in_lists() and not self._asked:
            return replace(batch, listed=batch.in_lists())
        ranks_and_dtypes = tuple((t.ndim, t.dtype) for t in batch.tensors())
        if batch.dims is not None and _agree(batch.tensors(), batch.dims):
            rules = (dim.by if isinstance(dim, PackedRows) else dim for dim in batch.dims)
            self._found[ranks_and_dtypes] = tuple(rules)
            return batch
        known = self._found.get(ranks_and_dtypes)
        if known is None or not _agree(batch.tensors(), _counted(batch, known)):
            known = self._find(batch, _fixed(batch, self._asked))
        self._found[ranks_and_dtypes] = known
        return replace(batch, dims=_counted(batch, known))

    def _find(self, batch: Batch, fixed: Mapping[int, Rule]) -> Rules:
        candidates = _candidates(batch, fixed)
        if not candidates:
            return tuple(None if isinstance(dim, PackedRows) else dim for dim in batch.batch_dims())
        candidates = _with_samples_on_both_sides(batch, candidates, fixed)
        is_given = len(candidates) == 1 and all(
            dim == 0 or dim is None or place in fixed for place, dim in enumerate(candidates[0])
        )
        if is_given or _only_dim_0(batch.tensors(), candidates[0]):
            return candidates[0]
        packed = _packed(batch, candidates[0], fixed)
        candidates = [candidates[0], *packed, *candidates[1:]]
        for dims in candidates:
            if self._rejection(_grown(replace(batch, dims=_counted(batch, dims)))) is None:
                return dims
        # The shapes of a microbatch would explain nothing where the batch itself is wrong.
        error = self._rejection(batch)
        if isinstance(error, ExampleRejected):
            raise error
        return (packed or candidates)[0]


@final
class SplitTable(UserWarning):
    """Says that an argument is split by samples which the model takes whole as well."""


def warn_of_tables(batch: Batch, rejection: Rejection, asked: Asked) -> None:
    """Warns of a tensor that is split because it has as many rows as there are samples, and may be a table.

    The model takes it whole next to another number of samples, so nothing but its size speaks for samples.
    Asked are floating-point inputs after the first tensor with samples, where the user has not said it.
    """
    dims, owners = batch.batch_dims(), _owners(batch)
    if batch.in_lists():
        return
    split = [place for place, dim in enumerate(dims) if dim is not None and owners[place] != "target"]
    for place in split[1:]:
        tensor, owner = batch.tensors()[place], owners[place]
        whole = (*dims[:place], None, *dims[place + 1 :])
        is_asked = owner not in asked and tensor.is_floating_point()
        if is_asked and rejection(_grown(replace(batch, dims=whole))) is None:
            warnings.warn(
                f"argument {owner!r} {tuple(tensor.shape)} is split along dim {dims[place]}, because it has "
                "as many rows as there are samples; the model takes it whole as well. Say which: "
                f"batch_dims={{{owner!r}: None}} for a table, {{{owner!r}: {dims[place]}}} for samples",
                SplitTable,
                stacklevel=2,
            )


def insist_on_names(batch: Batch, asked: Asked) -> None:
    """Raises BadOption when `asked` names arguments that the batch does not have."""
    arguments = dict.fromkeys(_owners(batch))
    unknown = [key for key in asked if key not in arguments]
    if unknown:
        raise BadOption(
            f"batch_dims names {', '.join(map(repr, unknown))}, which is no tensor of the batch",
            numbers=f"there are {', '.join(map(repr, arguments))}",
            next_step="batch_dims={'argument name or position': dim}",
        )


def _owners(batch: Batch) -> list[str | int]:
    """Returns, for each of the batch's tensors, the argument that it came in."""
    owners: list[str | int] = []
    for key, value in (*enumerate(batch.args), *batch.kwargs.items(), ("target", batch.target)):
        owners += [key for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return owners


def _fixed(batch: Batch, asked: Asked) -> dict[int, Rule]:
    """Returns the dims that the user gave, by position among the batch's tensors.

    Raises BadOption for counts that are not those of a tensor's rows.
    """
    owners, tensors = _owners(batch), batch.tensors()
    fixed: dict[int, Rule] = {}
    for place, owner in enumerate(owners):
        if owner in asked:
            how = asked[owner]
            fixed[place] = how if how is None or isinstance(how, int) else _rule(how, owners)
        rule = fixed.get(place)
        if isinstance(rule, PackedBy):
            insist_on_rows(owner, tensors[place], rule.counts(tensors, batch.args, batch.kwargs))
    return fixed


def _rule(how: str | CountRows, owners: Sequence[str | int]) -> PackedBy:
    """Returns the rule for an argument's name, or for a function."""
    if not isinstance(how, str):
        return PackedBy(how)
    if how not in owners:
        raise BadOption(
            f"batch_dims counts rows by {how!r}, which is no tensor of the batch",
            numbers=f"there are {', '.join(map(repr, dict.fromkeys(owners)))}",
            next_step="batch_dims={'pixel_values': 'image_grid_thw'}, or a function of the model's arguments",
        )
    return PackedBy(owners.index(how))


def _counted(batch: Batch, rules: Rules) -> Dims:
    """Returns the dims of a batch, with the rows that belong to its samples."""
    tensors = batch.tensors()
    counted = (
        rule.counts(tensors, batch.args, batch.kwargs) if isinstance(rule, PackedBy) else rule
        for rule in rules
    )
    return tuple(counted)


def _packed(batch: Batch, rules: Rules, fixed: Mapping[int, Rule]) -> list[Rules]:
    """Returns the reading in which tensors that would go whole to each microbatch have rows of samples."""
    tensors, samples = batch.tensors(), replace(batch, dims=_counted(batch, rules)).size
    found = list(rules)
    for place, rule in enumerate(rules):
        by = packed_by_one_of(tensors, place) if rule is None and place not in fixed else None
        if by is not None and len(by.counts(tensors, (), {}).counts) == samples:
            found[place] = by
    return [tuple(found)] if tuple(found) != rules else []


def _agree(tensors: Sequence[Tensor], dims: Dims) -> bool:
    sizes = set[int]()
    for tensor, dim in zip(tensors, dims, strict=True):
        if isinstance(dim, PackedRows):
            sizes |= {len(dim.counts)} if sum(dim.counts) == tensor.shape[0] else {-1, -2}
        elif dim is not None:
            sizes.add(tensor.shape[dim])
    return len(sizes) == 1


def _candidates(batch: Batch, fixed: Mapping[int, Rule]) -> list[Rules]:
    """Returns the candidate dims: those with most batch dims first, then those with most dims 0.

    Ties keep the order of the sizes, so the first tensor's dims come first.
    """
    tensors = batch.tensors()
    fixed_sizes = [tensors[place].shape[dim] for place, dim in fixed.items() if isinstance(dim, int)]
    sizes = fixed_sizes[:1] or list(dict.fromkeys(t.shape[0] for t in tensors if t.ndim))
    tables = ([_options(t, p, size, fixed) for p, t in enumerate(tensors)] for size in sizes)
    candidates = list(islice((dims for table in tables for dims in product(*table)), _KNOWN))
    candidates = [dims for dims in candidates if any(d is not None for d in dims)]
    return sorted(candidates, key=lambda dims: (dims.count(None), -dims.count(0)))[:_TRIES]


def _with_samples_on_both_sides(
    batch: Batch, readings: Sequence[Rules], fixed: Mapping[int, Rule]
) -> list[Rules]:
    """The readings in which inputs and target both have samples, where the user has not said which dims.

    Raises BadOption when there are none: a target that every microbatch gets whole is one of another batch.
    """
    is_target = [owner == "target" for owner in _owners(batch)]
    tensors = batch.tensors()
    for side in (False, True):
        places = [p for p, t in enumerate(tensors) if is_target[p] is side and t.ndim]
        if places and not any(place in fixed for place in places):
            readings = [dims for dims in readings if any(dims[place] is not None for place in places)]
    if not readings:
        inputs = [t.shape[0] for t, side in zip(tensors, is_target, strict=True) if not side and t.ndim]
        targets = [t.shape[0] for t, side in zip(tensors, is_target, strict=True) if side and t.ndim]
        raise BadOption(
            "the target has another number of samples than the inputs",
            numbers=f"along dim 0 the inputs have {inputs}, the target {targets}",
            next_step="pass a target for each sample; batch_dims={'target': None} shares one without samples",
        )
    return list(readings)


def _options(tensor: Tensor, place: int, size: int, fixed: Mapping[int, Rule]) -> list[Rule]:
    if place in fixed:
        return [fixed[place]]
    dims: list[Rule] = [dim for dim, n in enumerate(tensor.shape) if n == size]
    return [*dims, None]


def _only_dim_0(tensors: Sequence[Tensor], dims: Rules) -> bool:
    """Tells whether samples lie along dim 0 of every tensor and no other dim has that size."""
    size = tensors[0].shape[0] if tensors and tensors[0].ndim else 0
    return all(d == 0 or not t.ndim for t, d in zip(tensors, dims, strict=True)) and not any(
        size in t.shape[1:] for t in tensors
    )


def _grown(batch: Batch) -> Batch:
    """Returns the batch with one more sample."""
    return batch.resized(batch.size + 1)


def rejection(model: nn.Module, loss_fn: LossFn | None, home: TapeHome | None = None) -> Rejection:
    """Returns a function that gives the error with which the model rejects a batch, or None.

    Where the batch has targets, the model runs with its loss. `home` says which device it is recorded for,
    where stages have others than the model's.
    """

    def error_of(batch: Batch) -> Exception | None:
        try:
            options = TapeOptions(None if home is None else home.now())
            loss = evaluating_loss(loss_fn, batch)
            with warnings.catch_warnings():  # Batches that are tried may not fit their targets.
                warnings.filterwarnings("ignore", message="Using a target size")
                record(model, batch.args, batch.kwargs, loss, batch.target, options)
        except Exception as error:
            return error
        return None

    return error_of
