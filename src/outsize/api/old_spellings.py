"""One table of the keyword arguments that have gone, each with the record and the field that has taken
its place.

    outsize.parallelize(..., clipping="speculative")    clip_norm=outsize.Clip(clipping="speculative")
    outsize.plan(..., tp=2)                             axes={"tp": 2}

An old keyword works for one release: it becomes the new one, and a warning at the user's line says what
to type. A plain value of the new keyword was the old spelling of its own subject, and goes into the same
record; a record beside an old keyword of its subject is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final, get_args

from outsize.api.records import (
    AXES,
    Checkpoint,
    Clip,
    Compile,
    Lora,
    Loss,
    OptionRecord,
    Ranks,
    Request,
    Watch,
    mesh_asked,
    unknown_option,
)
from outsize.errors import BadOption
from outsize.errors.arguments import shown
from outsize.errors.words import nearest, spoken
from outsize.ir.answers.request import AxisSearch
from outsize.policies.weights import weight_policies
from outsize.program.source_line import warn_user

Fields = Mapping[str, Any]


@final
class OldSpelling(FutureWarning):
    """Says how a keyword argument or an option is spelled from this release on."""


@final
@dataclass(frozen=True)
class Old:
    """A keyword argument `name` that is now the `field` of what `keyword` takes.

    `joined(plain, fields)` returns what the keyword takes for its plain value and the old fields,
    `typed(fields, plain)` what to type for it.
    """

    name: str
    keyword: str
    field: str
    joined: Callable[[Any, Fields], Any]
    typed: Callable[[Fields, Any], str]

    def new(self, fields: Fields, plain: Any = None) -> str:
        """Returns what to type for the fields of a keyword, beside its plain value."""
        return f"{self.keyword}={self.typed(fields, plain)}"


def _typed_fields(fields: Fields) -> str:
    """Returns fields as they are typed in a record."""
    return ", ".join(f"{name}={_typed(value)}" for name, value in fields.items())


def _moved(names: Mapping[str, str], keyword: str, record: type[OptionRecord]) -> Iterator[Old]:
    """Yields the old names that are now fields of a record."""

    def joined(plain: Any, fields: Fields) -> Any:
        if isinstance(plain, OptionRecord):
            old = {name: fields[field] for name, field in names.items() if field in fields}
            raise _both(old, f"{keyword}=outsize.{type(plain).__name__}(...)")
        made: Any = record.of(plain, keyword)
        return replace(made, **fields)

    def typed(fields: Fields, plain: Any) -> str:
        beside = "" if plain is None else f"{_typed(plain)}, "
        return f"outsize.{record.__name__}({beside}{_typed_fields(fields)})"

    for name, field in names.items():
        yield Old(name, keyword, field, joined, typed)


def _typed(value: Any) -> str:
    """Returns a value as it is typed; dots stand for what is no literal."""
    if isinstance(value, Path):
        return repr(str(value))
    is_literal = value is None or isinstance(value, bool | int | float | str | list)
    name = getattr(value, "__name__", "")
    return shown(value) if is_literal else name if name.isidentifier() else "..."


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _both(fields: Fields, new: str) -> BadOption:
    """Returns the error for an old keyword beside the new spelling of its subject."""
    return BadOption(
        f"{', '.join(fields)} is an old keyword, and cannot be used together with {new}",
        numbers=f"given: {', '.join(f'{name}={shown(value)}' for name, value in fields.items())}",
        next_step=f"say it in {new}",
    )


def _in_plan(plain: Any, fields: Fields) -> Any:
    """Returns the request that takes the place of a plan; what a plan has decided cannot be asked for."""
    if isinstance(plain, Request):
        raise _both(fields, "plan=outsize.Request(...)")
    if plain is not None:
        raise BadOption(
            f"{', '.join(fields)} cannot be used together with plan=, which has decided it",
            next_step="leave them out, or leave out plan=",
        )
    return Request(**fields)


def _in_axes(plain: Any, fields: Fields) -> Any:
    if isinstance(plain, Mapping):
        raise _both(fields, "axes={...}")
    given = {name: size for name, size in fields.items() if size is not None}
    # What is no answer of `axes` is refused by who reads it.
    return mesh_asked(given, plain) if plain is None or plain in get_args(AxisSearch) else plain


def _in_lora(plain: Any, fields: Fields) -> Any:
    """Returns a request with adapters."""
    asked = dict(fields)
    lora = Lora(rank=asked.pop("lora_rank", None), targets=asked.pop("lora_targets", None))
    if lora != Lora():
        asked["lora"] = lora
    if isinstance(plain, Request):
        raise _both(fields, "request=outsize.Request(...)")
    return Request(**asked)


def _in_callbacks(plain: Any, fields: Fields) -> Any:
    if not isinstance(plain, Iterable | None):
        return plain  # what is no list is refused by who reads it
    given: list[Any] = list(() if plain is None else plain)
    if any(isinstance(one, Watch) for one in given):
        raise _both(fields, "callbacks=[..., outsize.Watch(...)]")
    return [*given, Watch(**fields)]


def _renamed(plain: Any, fields: Fields) -> Any:
    """Returns the files of weights; the word is that of a plan's policy, which a run reads from its plan."""
    (value,) = fields.values()
    if plain is not None:
        raise _both(fields, "weight_files=")
    policies = [policy.name for policy in weight_policies()]
    if value in policies and not Path(value).exists():
        raise BadOption(
            f"weights={value!r} is where a plan keeps its weights, and this function reads files",
            numbers=f"policies: {', '.join(policies)}; there is no file {value!r}",
            next_step=f"plan=outsize.Request(weights={value!r}), or weight_files='model.safetensors'",
        )
    return value


def _request_typed(fields: Fields, _: Any) -> str:
    own = {name: value for name, value in fields.items() if name not in _OF_LORA}
    lora = {_OF_LORA[name]: value for name, value in fields.items() if name in _OF_LORA}
    said = [_typed_fields(own)] if own else []
    said += [f"lora=outsize.Lora({_typed_fields(lora)})"] if lora else []
    return f"outsize.Request({', '.join(said)})"


def _axes_typed(fields: Fields, plain: Any) -> str:
    asked = mesh_asked(dict(fields), plain if plain in get_args(AxisSearch) else None)
    assert isinstance(asked, Mapping)
    return f"{{{', '.join(f'{name!r}: {_typed(size)}' for name, size in asked.items())}}}"


def _callbacks_typed(fields: Fields, plain: Any) -> str:
    given: list[Any] = list(plain) if isinstance(plain, Iterable) else []
    own = [f"{type(one).__name__}(...)" for one in given]
    return f"[{', '.join((*own, f'outsize.Watch({_typed_fields(fields)})'))}]"


_OF_LORA: Final = {"lora_rank": "rank", "lora_targets": "targets"}
_MESH: Final = tuple(Old(name, "axes", name, _in_axes, _axes_typed) for name in AXES)
_WEIGHT_FILES: Final = (
    Old("weights", "weight_files", "weights", _renamed, lambda fields, _: _typed(fields["weights"])),
)
_WATCHED: Final = tuple(
    Old(name, "callbacks", name, _in_callbacks, _callbacks_typed)
    for name in ("hang_timeout", "on_hang", "publish", "total_steps")
)
_RARE: Final = ("bn", "sequence_parallel", "loss_pieces", "module_pieces")
_OF_RANKS: Final = ("memory_share", "on_oom", "offload_folder", "backend", "own_batches", "seed")
_ASKED_OF_A_RUN: Final = (*_RARE, "measured", "progress", "batch_size", "precision", "recompute", "exact")
_RUN: Final = (
    *_MESH,
    *_WEIGHT_FILES,
    *_WATCHED,
    *(Old(name, "plan", name, _in_plan, _request_typed) for name in _ASKED_OF_A_RUN),
    *_moved(_same("counting", "scaler"), "loss_fn", Loss),
    *_moved(_same("clipping"), "clip_norm", Clip),
    *_moved({"checkpoint": "saves_in"}, "resume", Checkpoint),
    *_moved(_same("device_graphs", "captures"), "compiled", Compile),
    *_moved(_same(*_OF_RANKS), "devices", Ranks),
)
_QUESTION: Final = (
    *_MESH,
    *(
        Old(name, "request", name, _in_lora, _request_typed)
        for name in (*_RARE, "objective", "inference", "lora_rank", "lora_targets")
    ),
)
_TIMED: Final = (*_QUESTION, Old("progress", "request", "progress", _in_lora, _request_typed))

OLD: Final[Mapping[str, tuple[Old, ...]]] = {
    "parallelize": _RUN,
    "plan": _TIMED,
    "outlook": _TIMED,
    "job_request": _TIMED,
    "fit": _QUESTION,
    "largest_batch": _QUESTION,
    "largest": _QUESTION,
    "rank_clusters": _QUESTION,
    "tune": _QUESTION,
    "check": _WEIGHT_FILES,
}
"""Lists the old keywords of each function."""


def in_new_spelling(function: str, options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns the options in the new spelling, with one warning for all that were old, on rank 0.

    An old name that the function knows in another meaning is left as it is. Raises BadOption for old and
    new together.
    """
    rows = {row.name: row for row in OLD.get(function, ()) if row.name not in known}
    read = {name: value for name, value in options.items() if name not in rows}
    fields, joins = defaultdict[str, dict[str, Any]](dict), dict[str, Old]()
    for name in (name for name in options if name in rows):
        row = rows[name]
        fields[row.keyword][row.field], joins[row.keyword] = options[name], row
    for keyword, row in joins.items():
        read[keyword] = row.joined(read.get(keyword), fields[keyword])
    old = [name for name in options if name in rows]
    if old and _is_first_rank():
        new = [row.new(fields[keyword], options.get(keyword)) for keyword, row in joins.items()]
        are = "is the old spelling" if len(old) == 1 else "are old spellings"
        warn_user(
            f"outsize.{function}({', '.join(f'{name}=' for name in old)}) {are}, which the next release does "
            f"not know. Next: {', '.join(new)}",
            OldSpelling,
        )
    return read


def _is_first_rank() -> bool:
    """Tells whether this process is the one of its run that speaks. Imports torch, with which it runs."""
    from outsize.train.world.join import is_first_rank

    return is_first_rank()


def unknown_keyword(name: str, function: str, known: Collection[str]) -> BadOption:
    """Returns the error for a keyword that a function does not have: the nearest one, which may be the
    field of a record."""
    rows = {row.name: row for row in OLD.get(function, ())}
    near = nearest(name, [*known, *rows])
    if near is None or near in known or spoken(name) is not None:
        return unknown_option(name, f"outsize.{function}", known)
    new = rows[near].new({rows[near].field: ...})
    return BadOption(f"no option `{name}`; did you mean `{near}`?", next_step=new)
