"""Splits every trainer that derives from transformers' Trainer, whatever framework makes it.

    from outsize.integrations.trainers import split_trainers
    split_trainers(stages=2)      # from here on; `with split_trainers(stages=2):` up to the end of the block

LLaMA-Factory, Axolotl and the like choose the class of their trainer deep in their own code, so there is no
place for a base class. An instance is made in one place for all of them, `Trainer.__new__`, and it makes one
of a class that has this package's Trainer before the one that was asked for:

    CustomSeq2SeqTrainer(...)     ->  class CustomSeq2SeqTrainer(outsize's Trainer, theirs)

Its name, its signature and `isinstance` are theirs. A program that is started by a command is left as it is:

    python -m outsize.integrations.trainers stages=2 -m llamafactory.launcher train.yaml
    outsize run --nproc-per-node 2 -m outsize.integrations.trainers stages=2 train.py
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outsize.api.records import Request
from outsize.capture.models.imports import import_package
from outsize.errors import BadOption
from outsize.integrations.split_options import Split, insist_on_one_split, named_options, options_of
from outsize.integrations.transformers import Trainer
from outsize.ir.plan import Plan
from outsize.ops.launch.worker import execute

if TYPE_CHECKING:
    import transformers
else:
    transformers = import_package("transformers", extra="hf")

_USAGE: Final = "outsize run --nproc-per-node 2 -m outsize.integrations.trainers stages=2 train.py"


def split_trainers(plan: Plan | Request | str | Path | None = None, **options: Any) -> ExitStack:
    """Splits all trainers that are made from here on, by a plan, its file, or options of `parallelize`.

    Returns a context that undoes it where it ends; a trainer that was made before that stays split. One
    whose class has outsize's Trainer already says itself how it is split. Arguments that split a model by
    another library are refused where they are made, before a framework loads the model. Raises BadOption,
    BadPlan.
    """
    asked = options_of(plan) | options_of(options)

    @functools.cache
    def composed(kind: type) -> type:
        return split_class(kind, asked)

    def make(kind: type, *_: Any, **__: Any) -> Any:
        return object.__new__(kind if issubclass(kind, Trainer) else composed(kind))

    base: Any = transformers.Trainer
    before = base.__new__
    base.__new__ = make
    undo = ExitStack()
    _refuse_other_splits(transformers.TrainingArguments, undo)
    # CPython does not let a class take arguments again once its __new__ has been deleted.
    undo.callback(setattr, base, "__new__", _make if before is object.__new__ else before)
    return undo


def split_class(kind: type, split: Split | None = None) -> type:
    """Returns a trainer's class with outsize's Trainer before it; `split` is its `outsize=` by default."""
    theirs: Any = kind.__init__

    @functools.wraps(theirs)
    def start(self: Any, *args: Any, outsize: Split | None = split, **kwargs: Any) -> None:
        Trainer.__init__(self, *args, outsize=outsize, **kwargs)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (Trainer, kind), names | {"__init__": start})


def _refuse_other_splits(arguments: Any, undo: ExitStack) -> None:
    """Lets the class of a trainer's arguments refuse other libraries that split."""
    before = arguments.__post_init__

    @functools.wraps(before)
    def checked(self: Any) -> None:
        insist_on_one_split(vars(self))
        before(self)

    arguments.__post_init__ = checked
    undo.callback(setattr, arguments, "__post_init__", before)


def _make(kind: type, *_: Any, **__: Any) -> Any:
    return object.__new__(kind)


def main(arguments: Sequence[str]) -> None:
    """Runs `OPTIONS [-m] TARGET ARGS...` as Python runs TARGET, with its trainers split.

    OPTIONS are KEY=VALUE,... or a JSON object: fields of a Request and options of `parallelize`, or the file
    of a plan as `plan`. Raises BadOption, BadPlan.
    """
    if len(arguments) < (3 if arguments[1:2] == ["-m"] else 2):
        raise BadOption("there is no program whose trainers are split", next_step=_USAGE)
    text, *program = arguments
    split_trainers(**named_options(_options_in(text)))
    is_module = program[0] == "-m"
    execute("module" if is_module else "script", program[is_module:])


def _options_in(text: str) -> dict[str, Any]:
    """Returns `stages=2,schedule=1f1b`, or a JSON object, as options. Raises BadOption."""
    try:
        if text.startswith("{"):
            return json.loads(text)
        pairs = [part.partition("=") for part in text.split(",")]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError("each option is KEY=VALUE")
    except ValueError as error:
        raise BadOption(f"{text!r} does not say how trainers are split: {error}", next_step=_USAGE) from error
    return {name: int(value) if value.isdecimal() else value for name, _, value in pairs}


if __name__ == "__main__":
    main(sys.argv[1:])
