"""Finds the dim of each input along which the samples lie, when the shapes alone do not say it.

    lstm(x [length, batch, width]) with target [batch]         x: 1, target: 0
    model(image [batch, 3, h, w], anchors [k, 4])              image: 0, anchors: none
    model(ids [batch, t], patches [n, w], grid [batch, 3])     patches: as many rows as each row's product

Where all tensors agree in dim 0 and no other dim has that size, samples lie along dim 0. Otherwise the
candidates that the shapes allow are tried in turn, beginning with those that assign a batch dim to most
tensors: the batch is grown from b to b + 1 samples along the candidate's dims and recorded on fake tensors;
the first candidate that the model accepts is used. A dim in the user's `batch_dims` is used as given. Where
the rows of a tensor are as many as an integer tensor of the batch says (packed.py), that is tried as soon as
the model has refused such a tensor whole. A list of texts, numbers or objects that is as long as there are
samples is tried in the same way: it has an item for each sample if the model takes another number of them.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any, Protocol, final

from torch import Tensor, nn

from outsize.capture.recording.fallbacks import LossFn, TapeOptions, record
from outsize.errors import BadOption, ExampleRejected
from outsize.errors.arguments import shown
from outsize.errors.interruptions import raise_interruption
from outsize.program.source_line import warn_user
from outsize.program.tree import Steps, tensors_in
from outsize.run.stage.to_device import TapeHome
from outsize.train.batch.batch import Batch, Dims, evaluating_loss
from outsize.train.batch.packed import CountRows, PackedBy, PackedRows, insist_on_rows, packed_by_one_of
from outsize.train.batch.samples import MICROBATCHES, lists_in, samples_in

Asked = Mapping[str | int, int | str | CountRows | None]
Rule = int | PackedBy | None
Rules = tuple[Rule, ...]  # batch dims, and how to count rows, for all batches of a kind
_KNOWN, _TRIES = 4096, 32  # how many candidates are ranked, and how many are tried


class Rejection(Protocol):
    """Gives the error with which a model rejects a batch, or None; of a trial alone whether there is one."""

    @abstractmethod
    def __call__(self, batch: Batch, *, is_trial: bool = True) -> Exception | None:
        """Returns the error for a batch."""


@final
class BatchDims:
    """Finds the batch dims, once for all batches of equal ranks and dtypes.

    `rejection` gives the error with which the model rejects the batch, if it does. `asked` maps an
    argument's name or position, or "target", to the batch dim of all its tensors; for a tensor whose rows
    belong to samples, to the name of the argument that counts them, or to a function of the model's arguments
    that does. For a list, 0 says that it has an item for each sample, and None that it goes to each
    microbatch.
    """

    def __init__(self, rejection: Rejection, asked: Asked | None = None) -> None:
        self._rejection, self._asked = rejection, dict(asked or {})
        self._found: dict[Hashable, tuple[Rules, tuple[Steps, ...]]] = {}

    def of(self, batch: Batch, *, divides: bool = True) -> Batch:
        """Returns the batch with its dims; unless it `divides`, it is a microbatch, whose lists stay whole.

        Raises BadOption for parts that disagree about the number of samples, ExampleRejected where several
        candidates are possible and the model rejects all of them, and the batch as it is.
        """
        if batch.dims is not None and _agree(batch, batch.dims):
            self._keep(_kind_of(batch), batch, batch.dims)
            return batch
        batch = replace(batch, dims=None, listed=_listed(batch, self._asked))
        kind = _kind_of(batch)
        known = self._of_kind(batch, kind)
        if known is not None:
            return known
        batch = self._find(batch, _fixed(batch, self._asked))
        if divides:
            batch = self._with_lists(batch)
            self._keep(kind, batch, batch.batch_dims())
        return batch

    def _keep(self, kind: Hashable, batch: Batch, dims: Dims) -> None:
        """Keeps the rules of the tensors outside of lists, which are as many in each batch of the kind."""
        pairs = zip(dims, batch.is_inside(), strict=True)
        rules = (dim.by if isinstance(dim, PackedRows) else dim for dim, inside in pairs if not inside)
        self._found[kind] = tuple(rules), batch.in_lists()

    def _of_kind(self, batch: Batch, kind: Hashable) -> Batch | None:
        """Returns the batch as one of its kind was read before; None where that does not fit."""
        if kind not in self._found:
            return None
        rules, listed = self._found[kind]
        batch = replace(batch, listed=listed)
        inside = batch.is_inside()
        if inside.count(False) != len(rules):
            return None
        left = iter(rules)
        dims = _counted(batch, tuple(None if is_inside else next(left) for is_inside in inside))
        return replace(batch, dims=dims) if _agree(batch, dims) else None

    def _find(self, batch: Batch, fixed: Mapping[int, Rule]) -> Batch:
        candidates = _candidates(batch, fixed)
        if not candidates:
            dims = (None if isinstance(dim, PackedRows) else dim for dim in batch.batch_dims())
            return replace(batch, dims=tuple(dims), listed=batch.in_lists())
        candidates = _with_samples_on_both_sides(batch, candidates, fixed)
        is_given = len(candidates) == 1 and all(
            dim == 0 or dim is None or place in fixed for place, dim in enumerate(candidates[0])
        )
        is_listed = bool(batch.in_lists()) and not self._asked
        if is_given or is_listed or _only_dim_0(batch, candidates[0]):
            return replace(batch, dims=_counted(batch, candidates[0]))
        # Rows of samples come behind the first reading only: where dim 0 fits as it is, nothing is packed.
        packed = _packed(batch, candidates[0], fixed)
        candidates = [candidates[0], *packed, *candidates[1:]]
        for dims in candidates:
            sized = replace(batch, dims=_counted(batch, dims))
            if any(self._takes_more(other) for other in (*_with_all_lists(sized, self._asked), sized)):
                return sized
        # The shapes of a microbatch would explain nothing where the batch itself is wrong.
        error = self._rejection(batch, is_trial=False)
        if isinstance(error, ExampleRejected):
            raise error
        return replace(batch, dims=_counted(batch, (packed or candidates)[0]))

    def _with_lists(self, batch: Batch) -> Batch:
        """Returns the batch with the lists that have an item for each sample, where the model takes more
        samples with more items; all of them are taken for such where it takes no others.
        """
        for with_all in _with_all_lists(batch, self._asked):
            known = batch.in_lists()
            lists = [steps for steps in with_all.in_lists() if steps not in known]
            alone = [replace(batch, listed=(*known, steps)) for steps in lists if len(lists) > 1]
            tried = (with_all, *alone, batch)
            return next((reading for reading in tried if self._takes_more(reading)), with_all)
        return batch

    def _takes_more(self, batch: Batch) -> bool:
        # With one sample more a dim that was read as samples and is none disagrees with what the model has
        # fixed (a table, a sequence's length), and the model says so.
        return self._rejection(_grown(batch)) is None


def _with_all_lists(batch: Batch, asked: Asked) -> list[Batch]:
    """Returns the reading in which every list that is as long as there are samples has an item for each; none
    where there is no such list.
    """
    known = batch.in_lists()
    found = _lists_without_tensors(batch)
    if not found:
        return []
    count = batch.size
    more = tuple(steps for steps, v in found if len(v) == count and batch.owner(steps) not in asked)
    return [replace(batch, dims=batch.batch_dims(), listed=(*known, *more))] if more else []


def _lists_without_tensors(batch: Batch) -> list[tuple[Steps, Any]]:
    """Returns the lists and tuples that are not yet taken apart, and hold anything but tensors."""
    if batch.plain() is not None:
        return []
    found = lists_in(batch.tree(), batch.in_lists())
    return [(steps, value) for steps, value in found if not tensors_in(value)]


def _listed(batch: Batch, asked: Asked) -> tuple[Steps, ...]:
    """Returns the steps to the parts that are taken apart as a whole: those that are recognised, but for the
    user's word.
    """
    lists = [steps for steps, _ in _lists_without_tensors(batch) if asked.get(batch.owner(steps)) == 0]
    recognised = [s for s in batch.in_lists() if asked.get(batch.owner(s), 0) is not None]
    return (*recognised, *lists)


def _kind_of(batch: Batch) -> Hashable:
    """Returns what is equal for batches whose samples lie in the same places."""
    pairs = zip(batch.tensors(), batch.is_inside(), strict=True)
    ranks_and_dtypes = tuple((t.ndim, t.dtype) for t, inside in pairs if not inside)
    walked = lists_in(batch.tree()) if batch.plain() is None else []
    lists = tuple(steps for steps, v in walked if not tensors_in(v))
    return ranks_and_dtypes, lists, tuple(steps for steps in batch.in_lists() if steps not in lists)


@final
class SplitTable(UserWarning):
    """Says that an argument is split by samples which the model takes whole as well."""


def warn_of_tables(batch: Batch, rejection: Rejection, asked: Asked) -> None:
    """Warns of a tensor that is split because it has as many rows as there are samples, and may be a table.

    The model takes it whole next to another number of samples, so nothing but its size speaks for samples.
    Asked are floating-point inputs after the first tensor with samples, where the user has not said it.
    """
    dims, owners = batch.batch_dims(), batch.owners()
    _warn_of_lists(batch, rejection, asked)
    if batch.in_lists():
        return
    split = [place for place, dim in enumerate(dims) if dim is not None and owners[place] != "target"]
    # The first tensor with samples is the input itself: no table stands before it.
    for place in split[1:]:
        tensor, owner = batch.tensors()[place], owners[place]
        # The others get one sample more. If this one is samples, too, the model sees that one is missing.
        whole = (*dims[:place], None, *dims[place + 1 :])
        is_asked = owner not in asked and tensor.is_floating_point()
        if is_asked and rejection(_grown(replace(batch, dims=whole))) is None:
            warn_user(
                f"argument {owner!r} {tuple(tensor.shape)} is split along dim {dims[place]}, because it has "
                "as many rows as there are samples; the model takes it whole as well. Say which: "
                f"batch_dims={{{owner!r}: None}} for a table, {{{owner!r}: {dims[place]}}} for samples",
                SplitTable,
            )


def _warn_of_lists(batch: Batch, rejection: Rejection, asked: Asked) -> None:
    """Warns of numbers that are split as one for each sample, and may be a setting of the model."""
    listed = batch.in_lists()
    for steps, value in lists_in(batch.tree()):
        owner = batch.owner(steps)
        is_asked = steps in listed and owner not in asked and all(isinstance(n, int | float) for n in value)
        whole = replace(batch, listed=tuple(other for other in listed if other != steps))
        if is_asked and rejection(_grown(whole)) is None:
            warn_user(
                f"argument {owner!r}, {len(value)} numbers, is split, because there are as many samples; the "
                f"model takes it whole as well. Say which: batch_dims={{{owner!r}: None}} for a setting, "
                f"{{{owner!r}: 0}} for a number of each sample",
                SplitTable,
            )


def insist_on_names(batch: Batch, asked: Asked) -> None:
    """Raises BadOption when `asked` names arguments that the batch does not have, or dims that they lack."""
    example = "batch_dims={'argument name or position': dim}"
    if not isinstance(asked, Mapping):
        raise BadOption(f"batch_dims={shown(asked)} names no argument", next_step=example)
    lists = (batch.owner(steps) for steps, _ in lists_in(batch.tree()))
    arguments = dict.fromkeys((*batch.owners(), *lists))
    unknown = [key for key in asked if key not in arguments]
    if unknown:
        raise BadOption(
            f"batch_dims names {', '.join(map(repr, unknown))}, which is no tensor or list of the batch",
            numbers=f"there are {', '.join(map(repr, arguments))}",
            next_step=example,
        )
    for owner, tensor in zip(batch.owners(), batch.tensors(), strict=True):
        dim = asked.get(owner)
        if isinstance(dim, int) and not -tensor.ndim <= dim < tensor.ndim:
            raise BadOption(
                f"batch_dims gives {owner!r} dim {dim}, which it does not have",
                numbers=f"shape {tuple(tensor.shape)}",
                next_step=example,
            )


def _fixed(batch: Batch, asked: Asked) -> dict[int, Rule]:
    """Returns the dims that the user gave, by position among the batch's tensors.

    Raises BadOption for counts that are not those of a tensor's rows.
    """
    owners, tensors, inside = batch.owners(), batch.tensors(), batch.is_inside()
    fixed: dict[int, Rule] = {}
    for place, owner in enumerate(owners):
        if inside[place]:
            fixed[place] = None
        elif owner in asked:
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


def _agree(batch: Batch, dims: Dims) -> bool:
    """Whether these dims are of the batch's tensors, and all parts have one number of samples."""
    tensors = batch.tensors()
    sizes = {samples_in(part) for _, part in batch.listed_parts()}
    for tensor, dim in zip(tensors, dims, strict=False):
        if isinstance(dim, PackedRows):
            # Two sizes that no tensor has: counts of other rows than these agree with nothing.
            sizes |= {len(dim.counts)} if sum(dim.counts) == tensor.shape[0] else {-1, -2}
        elif dim is not None:
            sizes.add(tensor.shape[dim])
    return len(dims) == len(tensors) and len(sizes) == 1


def _candidates(batch: Batch, fixed: Mapping[int, Rule]) -> list[Rules]:
    """Returns the candidate dims: those with most batch dims first, then those with most dims 0.

    Ties keep the order of the sizes, so the first tensor's dims come first.
    """
    tensors = batch.tensors()
    known_sizes = [samples_in(part) for _, part in batch.listed_parts()]
    known_sizes += [tensors[place].shape[dim] for place, dim in fixed.items() if isinstance(dim, int)]
    # One size that is known settles it: a tensor of any other size holds no samples.
    sizes = known_sizes[:1] or list(dict.fromkeys(t.shape[0] for t in tensors if t.ndim))
    tables = ([_options(t, p, size, fixed) for p, t in enumerate(tensors)] for size in sizes)
    # The product grows with the number of tensors as a power; the likely readings come early in it.
    candidates = list(islice((dims for table in tables for dims in product(*table)), _KNOWN))
    candidates = [dims for dims in candidates if known_sizes or any(d is not None for d in dims)]
    return sorted(candidates, key=lambda dims: (dims.count(None), -dims.count(0)))[:_TRIES]


def _with_samples_on_both_sides(
    batch: Batch, readings: Sequence[Rules], fixed: Mapping[int, Rule]
) -> list[Rules]:
    """The readings in which inputs and target both have samples, where the user has not said which dims.

    Raises BadOption when there are none: a target that every microbatch gets whole is one of another batch.
    """
    tensors, owners, inside = batch.tensors(), batch.owners(), batch.is_inside()
    sizes: dict[bool, list[int]] = {}
    for side in (False, True):
        on_side = [p for p, owner in enumerate(owners) if (owner == "target") is side and not inside[p]]
        places = [place for place in on_side if tensors[place].ndim]
        listed = [samples_in(v) for s, v in batch.listed_parts() if (batch.owner(s) == "target") is side]
        sizes[side] = listed + [tensors[place].shape[0] for place in places]
        if places and not listed and not any(place in fixed for place in places):
            readings = [dims for dims in readings if any(dims[place] is not None for place in places)]
    if not readings:
        whole = ", ".join(f"{owner!r}: None" for owner in dict.fromkeys(owners) if owner != "target")
        raise BadOption(
            "the target has another number of samples than the inputs",
            numbers=f"along dim 0 the inputs have {sizes[False]}, the target {sizes[True]}",
            next_step="pass a target for each sample; batch_dims={'target': None} shares one without "
            f"samples; for a target per graph beside nodes microbatches=1, batch_dims={{{whole}}} and "
            f"{MICROBATCHES}",
        )
    return list(readings)


def _options(tensor: Tensor, place: int, size: int, fixed: Mapping[int, Rule]) -> list[Rule]:
    if place in fixed:
        return [fixed[place]]
    dims: list[Rule] = [dim for dim, n in enumerate(tensor.shape) if n == size]
    return [*dims, None]


def _only_dim_0(batch: Batch, dims: Rules) -> bool:
    """Tells whether samples lie along dim 0 of every tensor and no other dim has that size."""
    tensors = batch.tensors()
    free = [(t, d) for t, d, inside in zip(tensors, dims, batch.is_inside(), strict=True) if not inside]
    size = free[0][0].shape[0] if free and free[0][0].ndim else 0
    return all(d == 0 or not t.ndim for t, d in free) and not any(size in t.shape[1:] for t, _ in free)


def _grown(batch: Batch) -> Batch:
    """Returns the batch with one more sample."""
    return batch.resized(batch.size + 1)


def rejection(model: nn.Module, loss_fn: LossFn | None, home: TapeHome | None = None) -> Rejection:
    """Returns a function that gives the error with which the model rejects a batch, or None.

    Where the batch has targets, the model runs with its loss. `home` says which device it is recorded for,
    where stages have others than the model's.
    """

    def error_of(batch: Batch, *, is_trial: bool = True) -> Exception | None:
        try:
            options = TapeOptions(None if home is None else home.now(), is_trial=is_trial)
            loss = evaluating_loss(loss_fn, batch)
            with warnings.catch_warnings():  # Batches that are tried may not fit their targets.
                warnings.filterwarnings("ignore", message="Using a target size")
                record(model, batch.args, batch.kwargs, loss, batch.target, options)
        except Exception as error:
            raise_interruption(error)
            return error
        return None

    return error_of
