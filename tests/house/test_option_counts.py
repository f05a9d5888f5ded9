"""What a caller has to know stays small: a rare option is a field of a record (decision 218)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import outsize
from house import ROOT
from outsize.api import outlook
from outsize.api.old_spellings import OLD
from outsize.api.records import RECORDS, fields_of
from outsize.cli.verbs.run import run
from outsize.ir.answers.request import RequestOptions
from outsize.ops.renting import rank_clusters

MODEL = ("model", "args", "kwargs", "make", "folder")
MOST = 16
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    outsize.parallelize,
    outsize.plan,
    outsize.fit,
    outsize.check,
    outsize.measure,
    outsize.largest_batch,
)
# An answer about several plans has the keywords of one, and two to four of its own.
MORE = {outlook: 2, rank_clusters: 2, outsize.largest: 3, outsize.tune: 5}


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """The keywords that a signature shows, besides the model and its example batch."""
    return [name for name in inspect.signature(function).parameters if name not in MODEL]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_sixteen_keywords_are_enough(function: Callable[..., Any]) -> None:
    assert len(keywords_of(function)) <= MOST


def test_a_run_has_eighteen_parameters_at_most() -> None:
    """Its options are fields of records, one for each subject (cli/flags.py)."""
    assert len(inspect.signature(inspect.unwrap(run), follow_wrapped=False).parameters) <= 18


@pytest.mark.parametrize("function", MORE, ids=lambda function: function.__name__)
def test_an_answer_about_several_plans_has_a_few_more(function: Callable[..., Any]) -> None:
    assert len(keywords_of(function)) <= MOST + MORE[function]


def test_the_law_can_be_broken() -> None:
    def crowded(model: Any, *, a: int, b: int) -> None: ...

    assert keywords_of(crowded) == ["a", "b"]


def test_every_record_is_exported_and_every_field_explained() -> None:
    for record in RECORDS:
        assert getattr(outsize, record.__name__) is record
        source = inspect.getsource(record)
        for name in fields_of(record):
            after = source.partition(f"\n    {name}: ")[2].splitlines()[1]
            assert after.strip().startswith('"""'), f"{record.__name__}.{name}"


def test_an_old_keyword_is_none_of_the_new() -> None:
    for name, rows in OLD.items():
        function = {"outlook": outlook, "rank_clusters": rank_clusters}.get(
            name, getattr(outsize, name, None)
        )
        if function is not None:
            assert not {row.name for row in rows} & {*keywords_of(function)}


def test_every_field_of_a_request_arrives() -> None:
    """`Request.layout` takes the fields of RequestOptions; the others are read by who makes the case."""
    elsewhere = {
        "cluster",
        "lora",
        "measured",
        "progress",
        "quantize",
        "recordings",
        "time_limit_s",
        "on_better",
    }
    assert {*fields_of(outsize.Request)} - RequestOptions.__annotations__.keys() == elsewhere


def test_the_page_says_each_keyword_and_each_field_in_the_words_of_its_record() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for function in (outsize.parallelize, outsize.plan):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{function.__name__}` |"))
        assert [name for name in keywords_of(function) if f"`{name}`" not in row] == []
    for record in RECORDS:
        assert [name for name in fields_of(record) if f"| `{name}` |" not in page] == []
