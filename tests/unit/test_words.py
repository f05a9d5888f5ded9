"""The table of what other tools call things: its options and flags are there, and no word is in two rows."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import typer

from outsize.api.options import CheckOptions, FitOptions, ParallelizeOptions, PlanOptions, TuneOptions
from outsize.cli.app import make_app
from outsize.errors.words import OPTIONS, VALUES, nearest, spoken, value_here
from outsize.ir.answers.request import PlanRequest
from outsize.ops.launch.launch import torchrun_flags
from outsize.train.batch.loss_weights import Counting

ALL_OPTIONS: Any = (CheckOptions, FitOptions, PlanOptions, ParallelizeOptions, TuneOptions)


def test_every_option_and_flag_is_there() -> None:
    known = {"plan", *(name for options in ALL_OPTIONS for name in options.__annotations__)}
    assert {row.option for row in OPTIONS if row.option} <= known
    commands = typer.main.get_command(make_app()).commands.values()  # pyright: ignore
    flags = {flag for command in commands for parameter in command.params for flag in parameter.opts}
    flags |= torchrun_flags().keys()  # which outsize run hands on
    assert {row.flag.split()[0] for row in OPTIONS if row.flag} <= flags


def test_no_word_is_in_two_rows() -> None:
    words = Counter(word for row in OPTIONS for word in row.words)
    assert [word for word, count in words.items() if count > 1] == []
    spelled = Counter((option, word) for option, _, words in VALUES for word in words.split())
    assert [pair for pair, count in spelled.items() if count > 1] == []


def test_every_value_is_one_of_its_option() -> None:
    for option, value, _ in VALUES:
        if option == "counting":
            assert value in get_args(Counting)
        elif option != "cluster":
            more = {"dp_shard": 2} if value == "sharded" else {}
            PlanRequest.model_validate({"batch_size": 8, option: value} | more)


def test_words_are_compared_without_case_and_dashes() -> None:
    row = spoken("Gradient-Accumulation-Steps")
    assert row is not None
    assert row.in_python({"microbatches"}) == "microbatches=4"
    assert row.in_python(()) == "outsize.parallelize(..., microbatches=4)"
    assert row.in_shell({"--microbatches"}) == "--microbatches 4"
    assert value_here("precision", "BF16-true") == "bf16"
    assert value_here("precision", "fp4") is None
    assert spoken("zzzz") is None
    assert nearest("microbatch", ["microbatches", "stages"]) == "microbatches"
    assert nearest("zzzz", ["microbatches", "stages"]) is None
