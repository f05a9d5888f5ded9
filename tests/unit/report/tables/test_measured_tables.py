"""Tables of what was measured: slowest first, sums by size, a word when the machine was busy."""

from __future__ import annotations

import io

import samples
from rich.console import Console, RenderableType

from outsize.ir.answers.tuned import Trial, Tuned
from outsize.ir.cluster import Link
from outsize.ir.findings import Measured, TuningEnd
from outsize.ir.profile import Profile, ProfileSet, UnitCost
from outsize.report.tables.measured import SLOWEST, links_tables, profile_tables, tuned_table, tutorial_table


def lines(table: RenderableType) -> list[str]:
    """What a pipe of 80 columns gets."""
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def unit(number: int, spread: float = 0.1) -> UnitCost:
    total_s = 6e-3 * (number + 1)
    return UnitCost(
        name=f"layer{number}",
        forward_s=total_s / 6,
        backward_input_s=total_s / 3,
        backward_weight_s=total_s / 2,
        saved_bytes=0,
        workspace_bytes=0,
        flops=0,
        source="measured",
        spread_s=spread * total_s,
    )


def profile(size: int, units: int, spread: float = 0.1) -> Profile:
    made = tuple(unit(n, spread) for n in range(units))
    return Profile(
        fingerprint="f", device="cpu", microbatch_size=size, units=made, host="Some CPU", threads=1
    )


def test_the_slowest_units_come_first_and_only_some_are_shown() -> None:
    text = lines(profile_tables(ProfileSet.of("Net", [profile(4, 20)])))
    shown = [line.split() for line in text if line.startswith("layer")]
    assert [row[0] for row in shown] == [f"layer{n}" for n in range(19, 19 - SLOWEST, -1)]
    assert shown[0][1:7] == ["20.0", "ms", "40.0", "ms", "60.0", "ms"]
    assert any("The slowest of 20 units" in line for line in text)
    assert text[0] == "Net: measured on Some CPU, 1 thread"


def test_each_size_has_its_sums_and_its_share_of_a_sample() -> None:
    text = lines(profile_tables(ProfileSet.of("Net", [profile(1, 3), profile(4, 3)])))
    rows = [line.split() for line in text if line.split()[:1] in (["1"], ["4"])]
    assert rows[0] == ["1", "6.00", "ms", "12.0", "ms", "18.0", "ms", "36.0", "ms", "36.0", "ms", "10", "%"]
    assert rows[1][7:11] == ["36.0", "ms", "9.00", "ms"]


def test_laps_that_differ_much_are_said() -> None:
    quiet = ProfileSet.of("Net", [profile(1, 2), profile(2, 2)])
    busy = ProfileSet.of("Net", [profile(1, 2, spread=0.6), profile(2, 2)])
    assert "busy" not in " ".join(lines(profile_tables(quiet)))
    assert "laps of microbatch 1 differ by 60 %: the machine was busy" in " ".join(
        lines(profile_tables(busy))
    )


def test_links_at_80_columns_with_what_a_backend_lacks_left_out() -> None:
    points = [(1024, 1e-4, 1e-5), (1048576, 0.123, 0.456)]
    kinds = {"p2p": points, "all_reduce": points, "all_gather": points[:1], "reduce_scatter": points}
    link = Link(name="x", latency_s=1e-4, bytes_per_s=2e9)
    text = lines(links_tables(kinds, {"p2p": link}))
    assert max(map(len, text)) <= 80
    (large,) = [line.split() for line in text if line.strip().startswith("1.0 MiB")]
    assert large.count("-") == 1
    assert "±371" in large
    assert ["p2p", "100", "us", "1.9", "GiB/s"] in [line.split() for line in text]


def test_the_tutorials_bars_against_the_single_device() -> None:
    bars = {"single device": (2.0, 2.0), "pipelined": (1.6, 1.6), "outsize": (0.9, 1.1)}
    text = lines(tutorial_table("ResNet", bars, {1: (3.0,), 6: (1.6, 1.6)}, samples.plan()))
    assert text[0] == "ResNet"
    assert any(line.split() == ["outsize", "1.00", "s", "±", "141", "ms", "2.00x"] for line in text)
    assert any(line.split() == ["1", "3.00", "s", "±", "-"] for line in text)
    assert "at its best split size, 6. outsize: 1f1b, microbatches: " in " ".join(text)
    assert max(map(len, text)) <= 80


def test_the_points_of_a_tuning_and_how_it_ended() -> None:
    plan = samples.plan().model_copy(
        update={"why": (Measured(step_s=1.0, trials=2), TuningEnd(reason="no-faster-point", trials=2))}
    )
    first = Trial(plan=plan, predicted_s=1.5, step_s=2.0, wall_s=2.5)
    second = first.model_copy(update={"predicted_s": 0.9, "step_s": 1.0})
    text = lines(tuned_table(Tuned(plan=plan, trials=(first, second))))
    assert any("1.50 s" in line and "2.00 s" in line for line in text)
    assert " ".join(text[-2:]) == (
        "tuned: 1.00 s by a real step, the fastest of 2 that ran; no other choice is predicted to be faster."
    )
    assert max(map(len, text)) <= 80


def test_points_with_many_stages_keep_their_numbers_at_80_columns() -> None:
    plan = samples.plan()
    many = tuple(
        plan.stages[0].model_copy(update={"units": (f"encoder.layers.{n}.attention.output",)})
        for n in range(8)
    )
    plan = plan.model_copy(update={"stages": many, "schedule": "zero-bubble-v", "why": ()})
    text = lines(
        tuned_table(Tuned(plan=plan, trials=(Trial(plan=plan, predicted_s=1.5, step_s=2.0, wall_s=2.5),)))
    )
    assert any(line.startswith("zero-bubble-v ") and line.endswith("1.50 s  2.00 s") for line in text)
    assert "encoder.layers.7.attention" in "".join(text)
    assert max(map(len, text)) <= 80
