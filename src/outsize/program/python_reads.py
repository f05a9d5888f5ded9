"""A Python value that code read while it was recorded, and where that value can be read again.

    self.temperature     item       the instance's dict, "temperature"      1.0
    self.rates[2]        item       the instance's dict, "rates"            the whole list, by content
    SCALE                item       the globals of a file, "SCALE"          0.5
    self.slope           class      the class that has it, "slope"          0.1
    beta in a closure    cell       the cell                                4.0
    self.width (slots)   attribute  the object, "width"                     8

A tape is valid only while all of them are unchanged (capture/guards/check.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from outsize.program.objects import ABSENT

ReadKind = Literal["item", "element", "class", "cell", "attribute"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class PythonRead:
    """Describes one read: `holder` is where `key` was looked up, by the way that `kind` says.

    `value` is what was there, or ABSENT. `parent` is the number of the read whose value is the holder, a
    container: where another container takes its place, the key is looked up there. `content`: code looked
    into the value, a container, so that what is in it counts as well. `is_live`: it is a tensor that the
    program itself reads again at each call. `frames` are the modules whose code read it: FQNs, or LOSS.
    """

    kind: ReadKind
    holder: Any
    key: Any
    value: Any
    parent: int | None
    content: bool
    is_live: bool
    label: str  # The expression, as the user wrote it.
    where: str  # file:line
    frames: frozenset[str]


LOSS: Final = "loss_fn"  # The frame of a read by the loss function.


def _item(holder: Any, key: Any) -> Any:
    return dict.get(holder, key, ABSENT)


def _element(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except IndexError:
        return ABSENT


def _class(holder: Any, key: Any) -> Any:
    return holder.__dict__.get(key, ABSENT)


def _cell(holder: Any, _key: Any) -> Any:
    try:
        return holder.cell_contents
    except ValueError:
        return ABSENT


def _attribute(holder: Any, key: Any) -> Any:
    return getattr(holder, key, ABSENT)


LOOK_UP: Final[Mapping[ReadKind, Callable[[Any, Any], Any]]] = {
    "item": _item,
    "element": _element,
    "class": _class,
    "cell": _cell,
    "attribute": _attribute,
}
