"""Each field of each record refuses what is not of its type, takes its own example, and is explained."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import outsize
from outsize.api.field_types import FieldType, takes
from outsize.api.records import RECORDS, Clip, Compile, Ranks, Request, Watch, field_type, fields_of
from outsize.errors import BadOption, BadPlan
from outsize.integrations.split_options import options_of


def made(record: Any, *values: Any, **fields: Any) -> Any:
    """A record, of values that a type checker would refuse."""
    return record(*values, **fields)


FIELDS = [(record, name) for record in RECORDS for name in fields_of(record)]


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler")
@pytest.mark.parametrize(("record", "name"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
def test_a_field_takes_its_example_and_refuses_what_is_nothing(record: Any, name: str) -> None:
    beside = {"rank": 8} if name == "targets" else {}
    example = eval(field_type(record, name).example, {"torch": torch, "outsize": outsize})
    assert getattr(record(**{name: example, **beside}), name) == example
    with pytest.raises(BadOption) as caught:
        record(**{name: object(), **beside})
    assert caught.value.what.startswith(f"{name}=<object object")
    assert f"{name}=" in caught.value.next_step


@pytest.mark.parametrize(
    ("make", "said", "step"),
    [
        (
            lambda: made(Watch, total_steps="a"),
            "total_steps='a' makes no sense",
            "outsize.Watch(total_",
        ),
        (
            lambda: made(Ranks, own_batches="no"),
            "is a str, no True or False",
            "outsize.Ranks(own_",
        ),
        (
            lambda: made(Compile, device_graphs=1),
            "device_graphs=1 is a int",
            "outsize.Compile(d",
        ),
        (
            lambda: made(Compile, []),
            "compiled=[] is a list, no True or False",
            "outsize.Compile(c",
        ),
        (
            lambda: made(Request, lora="8"),
            "lora='8' makes no sense; it takes a whole",
            "lora=8",
        ),
        (
            lambda: made(Request, recompute=True),
            "recompute=True makes no sense",
            "recompute='full'",
        ),
        (lambda: made(Ranks, seed=True), "seed=True makes no sense", "outsize.Ranks(seed=0)"),
        (
            lambda: made(Ranks, [1, 2]),
            "devices=[1, 2] is a list, no list of text or device",
            "outsize.Ra",
        ),
        (lambda: Clip.of("a", "clip_norm"), "clip_norm='a' makes no sense", "clip_norm=1.0"),
    ],
)
def test_what_a_type_checker_refuses_is_refused(make: Callable[[], Any], said: str, step: str) -> None:
    with pytest.raises(BadOption) as caught:
        make()
    assert said in str(caught.value)
    assert caught.value.next_step.startswith(step)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (int, [1, np.int64(2)], [True, 1.0, "1", None]),
        (float, [1, 0.5, np.float32(2)], [True, "1", 1j]),
        (bool, [True, False], [1, 0, None, "yes"]),
        (str | None, ["", None], [1, b"a"]),
        (str | Path, ["a", Path("a")], [1, None]),
        (Literal["a", "b"], ["a"], ["c", 1]),
        (Literal[1], [1], [True]),
        (Sequence[str], [["a"], (), ("a", "b")], ["ab", [1], {"a"}]),
        (Mapping[str, int], [{}, {"a": 1}], [[], "a"]),
        (Callable[[int], int] | None, [print, None], [3]),
        (Annotated[str, "a word"], ["a"], [1]),
        (torch.device | str, [torch.device("cpu"), "cpu"], [0]),
    ],
)
def test_kinds(kind: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [takes(kind, value) for value in right] == [True] * len(right)
    assert [takes(kind, value) for value in wrong] == [False] * len(wrong)
    FieldType(kind, "a").insist(right[0], "name", "{}")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_help_explains_each_field_with_its_default_and_an_example(record: Any) -> None:
    said = inspect.getdoc(record)
    assert said is not None
    for name in fields_of(record):
        (default,) = (repr(one.default) for one in record.__dataclass_fields__.values() if one.name == name)
        head = next(line for line in said.splitlines() if line.startswith(f"  {name}: "))
        assert head.endswith(f" = {default}")
        assert f"Example: outsize.{record.__name__}({name}={field_type(record, name).example})" in said


def test_the_records_import_no_torch() -> None:
    code = "import sys; from outsize.api.records import Request, Ranks; Request(stages=2, axes={'tp': 2}); "
    code += "Ranks(seed=1, memory_share=0.5); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_what_is_advised_for_an_old_option_of_a_framework_is_taken() -> None:
    """The framework says the norm, and not how it is waited for."""
    clip = outsize.Clip(clipping="speculative")
    assert options_of({"clip_norm": clip}) == {"clip_norm": clip}
    saves = outsize.Checkpoint(saves_in="run")
    assert options_of({"resume": saves}) == {"resume": saves}
    for given in ({"clip_norm": outsize.Clip(1.0)}, {"resume": "run"}, {"loss_fn": outsize.Loss()}):
        with pytest.raises(BadOption, match="is what the training framework says itself"):
            options_of(given)


def test_a_plan_made_by_hand_says_what_it_lacks() -> None:
    made_plan: Any = outsize.Plan
    with pytest.raises(BadPlan) as caught:
        made_plan()
    assert caught.value.what.startswith("a plan cannot be made of these fields: model: Field required")
    assert caught.value.next_step.startswith("outsize.plan(")
