"""benchmarks/foresight on small made-up rows: what is read, built, left out and why, and printed."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measured_pipeline as pipelines
import peaks
import priced
import pytest
import recent_peaks
import rows
import step_times
from priced import Division, Shape

from outsize.errors import BadOption
from outsize.ir.schedule import COMPUTE, Action, Kind

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "foresight"
RUN = {
    "row_id": "1", "source": "vTrain, made up", "system": "Megatron-DeepSpeed",
    "hardware": "A100 single node", "model": "GPT", "num_layers": "4", "hidden": "512", "heads": "8",
    "seq_len": "256", "n_gpus": "4", "tp": "1", "pp": "2", "vpp": "", "dp": "2", "cp": "", "ep": "",
    "shard": "", "micro_batch": "2", "global_batch": "16", "recompute": "none", "precision": "",
    "tflops_per_gpu": "", "samples_per_s": "", "iter_time_s": "0.1", "pp_schedule": "1f1b", "notes": "",
}  # fmt: skip
GOLDEN = {
    "id": "megatron-golden", "source": "golden dev_dgx_h100", "model": "gpt3_mcore_te_tp2_pp2",
    "family": "gpt", "hardware": "H100 DGX", "num_devices": "8", "parallelism": "TP2 PP2",
    "precision": "bf16", "batch_per_device": "mbs 4 gbs 32", "seq_or_input": "seq 1024", "act_ckpt": "none",
    "mem_value": "1428000000",
    "notes": "num-layers=12 hidden-size=512 num-attention-heads=8 attention-backend=flash "
    "deterministic-mode=True",
}  # fmt: skip


SMALL = Shape(layers=4, hidden=64, heads=4, length=32, vocabulary=256)
DIVISION = Division(
    tp=1,
    pp=2,
    chunks=1,
    dp=1,
    microbatch=2,
    microbatches=4,
    sequence_parallel=False,
    recompute="none",
    cluster="2xa100-80gb",
)


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """What the command returns; the module's name is that of many benchmarks."""
    spec = importlib.util.spec_from_file_location("foresight_run", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return module.main()


def write(path: Path, table: list[dict[str, str]]) -> None:
    """A CSV file of rows with equal columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def read(**changes: str) -> rows.Run:
    return rows.read(defaultdict(str, RUN | changes))


def test_a_row_becomes_a_shape_and_a_division() -> None:
    run = read(tp="2", dp="1")
    division = run.division
    assert (division.pp, division.dp, division.tp, division.microbatches) == (2, 1, 2, 8)
    assert run.shape.vocabulary == 50432  # 50,257 to a multiple of 256
    assert (run.seconds, run.kind, division.cluster) == (0.1, "single node", "1x4xa100-80gb")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"iter_time_s": ""}, "no step time"),
        ({"tp": ""}, "tp not given"),
        ({"system": "torchgpipe"}, "torchgpipe"),
        ({"hardware": "abacus"}, "abacus"),
        ({"shard": "FSDP"}, "FSDP"),
        ({"ep": "8"}, "experts"),
        ({"pp_schedule": "ZB-2p"}, "ZB-2p"),
        ({"dp": "4"}, "tp x pp x dp"),
        ({"iter_time_s": "0"}, "not positive"),
        ({"iter_time_s": "nan"}, "not positive"),
        ({"iter_time_s": "", "samples_per_s": "inf"}, "not positive"),
        ({"num_layers": "²"}, "num_layers not given"),
        ({"seq_len": "-1"}, "seq_len not given"),
        ({"num_layers": "1", "pp": "4", "dp": "1"}, "more stages than layers"),
        ({"n_gpus": "4000000", "dp": "2000000"}, "more than"),
    ],
)
def test_a_row_that_cannot_be_timed_says_why(change: dict[str, str], reason: str) -> None:
    with pytest.raises(rows.Skip, match=reason):
        read(**change)


def test_a_step_time_may_be_given_as_rates() -> None:
    assert read(iter_time_s="", samples_per_s="32").seconds == 0.5
    inner = 1 + 256 / (6 * 512) + 50257 / (16 * 4 * 512)
    flops = 96 * 16 * 256 * 4 * 512**2 * inner
    assert read(iter_time_s="", tflops_per_gpu="2").seconds == pytest.approx(flops / 8e12)


def test_rows_of_one_choice_are_in_one_half() -> None:
    alike = ({"row_id": "2"}, {"iter_time_s": "9"}, {"micro_batch": "4"}, {"tp": "2", "pp": "1"})
    assert {read(**change).half for change in alike} == {read().half}
    assert {read(num_layers=str(n)).half for n in range(4, 13)} == {0, 1}
    assert {rows.half_of(["model"], str(salt)) for salt in range(9)} == {0, 1}


@pytest.mark.parametrize(("gpus", "read_as"), [("4", "none"), ("16", "full")])
def test_second_hand_labels_of_one_node_are_read_as_none(gpus: str, read_as: str) -> None:
    label = "full (in the repo's config files)"
    run = read(recompute=label, n_gpus=gpus, dp=str(int(gpus) // 2))
    assert run.division.recompute == read_as
    assert read(recompute="full").division.recompute == "full"


def layers_in(units: str) -> set[int]:
    """Layers that patterns such as `transformer.h.0-3` name."""
    spans = re.findall(r"\.h\.(\d+)(?:-(\d+))?", units)
    return {n for low, high in spans for n in range(int(low), int(high or low) + 1)}


def test_stages_have_equally_many_layers_or_ends_one_less() -> None:
    graph, _ = priced._costs(SMALL, 2, "a100-80gb", None)

    def layers(pp: int) -> list[int]:
        division = replace(DIVISION, pp=pp)
        stages = priced.stages_of(graph, SMALL.layers, division)
        return [len(layers_in(" ".join(stage.units))) for stage in stages]

    assert layers(2) == [2, 2]
    assert layers(3) == [1, 2, 1]
    with pytest.raises(BadOption, match="multiple"):
        layers(5)


def test_a_layout_costs_what_the_product_says() -> None:
    whole = priced.priced(SMALL, DIVISION)
    again = priced.priced(SMALL, replace(DIVISION, recompute="full"))
    some = priced.priced(SMALL, replace(DIVISION, recompute="selective"))
    assert whole.step_s < some.step_s < again.step_s
    assert [stage.recomputed for stage in whole.stages] == [0, 0]
    assert 0 < some.stages[0].recomputed < again.stages[0].recomputed


def test_systems_that_wait_for_collectives_are_priced_so() -> None:
    assert read().division.waits
    assert not read(system="Megatron-LM (2022)").division.waits
    shape = replace(SMALL, hidden=1024, length=512)
    alike = {"tp": 2, "pp": 1, "cluster": "2xa100-80gb", "microbatch": 8}
    begun, waited = (
        priced.priced(shape, replace(DIVISION, **alike, waits=waits)).step_s for waits in (False, True)
    )
    assert begun < waited


def test_the_fork_with_zero_bubbles_has_weights_of_its_own_behind_its_layers() -> None:
    assert not read(system="Megatron-LM (zero-bubble fork)").shape.tied
    assert read().shape.tied


def test_regret_is_the_chosen_layout_over_the_best() -> None:
    run = step_times.row_of(read(num_layers="2", hidden="64", heads="4", seq_len="32"))
    assert run["predicted_s"] > 0
    fast, slow = run | {"measured_s": 1.0}, run | {"measured_s": 2.0, "predicted_s": run["predicted_s"] / 2}
    (choice,) = step_times.choices([fast, slow, run | {"group": "alone"}])
    assert (choice["regret"], choice["layouts"]) == (2.0, 2)
    (choice,) = step_times.choices([fast, slow | {"predicted_s": 9.0}])
    assert choice["regret"] == 1.0
    found = step_times.regrets_of([choice, choice | {"regret": 1.5}])
    assert found["all"] == {"choices": 2, "mean": 1.25, "worst": 1.5}


def test_the_whole_benchmark_on_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = RUN | {"num_layers": "2", "hidden": "64", "heads": "4", "seq_len": "32"}
    write(tmp_path / "published_runs.csv", [small, small | {"micro_batch": "4"}, RUN | {"tp": ""}])
    where = ("--data", str(tmp_path))
    assert told(monkeypatch, *where, "--only", "steps", "--json") == 0
    found = json.loads(capsys.readouterr().out)["steps"]
    assert len(found["rows"]) == 2
    assert found["skipped"] == {"tp not given": 1}
    assert found["regrets"]["all"]["choices"] == 1
    write(tmp_path / "published_memory.csv", [GOLDEN, GOLDEN | {"id": "other"}, GOLDEN | {"family": "mimo"}])
    assert told(monkeypatch, *where, "--only", "memory") == 0
    text = capsys.readouterr().out
    assert "Megatron-LM, all" in text
    assert "golden: family mimo is not built" in text


ODD = [
    RUN | {"iter_time_s": "soon"},
    RUN | {"tp": "0", "n_gpus": "0"},
    RUN | {"heads": "0"},
    RUN | {"micro_batch": "0"},
    RUN | {"samples_per_s": "0", "iter_time_s": ""},
    RUN | {"hardware": "", "model": "a model that nobody knows", "source": ""},
    RUN | {"vpp": "0"},
]
ODD_MEMORY = [
    GOLDEN | {"mem_value": "lots"},
    GOLDEN | {"mem_value": "0"},
    GOLDEN | {"parallelism": "TP0"},
    GOLDEN | {"batch_per_device": "mbs 0 gbs 0"},
    GOLDEN | {"precision": ""},
    GOLDEN | {"notes": GOLDEN["notes"].replace("num-layers=12", "num-layers=twelve")},
]


@pytest.mark.parametrize("row", ODD)
def test_odd_rows_are_left_out_with_a_reason(row: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "odd.csv", [row])
    found, skipped = rows.read_all(tmp_path / "odd.csv")
    assert (found, sum(skipped.values())) == ([], 1)


@pytest.mark.parametrize("row", ODD_MEMORY)
def test_odd_peaks_are_left_out_with_a_reason(row: dict[str, str]) -> None:
    results, skipped = peaks.judged([defaultdict(str, row)])
    assert (results, sum(skipped.values())) == ([], 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "row_id,system\n1,Megatron-LM\n",
        "\ufeff"
        + ",".join(RUN)
        + "\n"
        + ",".join(f'"{value}"' for value in RUN.values())
        + ",too,many\n1,2\n\n",
        "no,columns,that\nanyone,knows\n\udcff\n",
    ],
)
def test_files_that_are_hardly_tables_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    found, _ = rows.read_all(path)
    assert len(found) == (1 if "row_id" in text and "too" in text else 0)
    assert peaks.judged(rows.read_rows(path))[0] == []


def test_parts_without_a_file_are_skipped_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, "--data", str(tmp_path), "--only", "steps") == 0
    assert "steps: skipped, as there is no file" in capsys.readouterr().err


def test_a_sample_takes_all_rows_of_some_models() -> None:
    models = [f"model {number}" for number in range(400)]
    assert all(rows.in_sample(model, 1) for model in models)
    taken = sum(rows.in_sample(model, 4) for model in models)
    assert 60 < taken < 140


def test_a_simulated_pipeline_is_played_again_as_it_is(tmp_path: Path) -> None:
    """A table written from a simulated step is read back, and played into the same step."""
    schedule, path = pipelines.schedule_of(), tmp_path / "primus_timeline.csv"
    seconds = {
        a: 2.0 if a.kind is Kind.B else 1.0 for row in schedule.actions for a in row if a.kind in COMPUTE
    }
    simulated = pipelines.played(schedule, seconds, lambda _: 0.5)
    spans = [(Action.parse(s.action), s) for s in simulated.spans if s.lane == "compute"]
    table = [
        {
            "rank": str(a.stage), "iteration": "3", "kind": a.kind.value, "microbatch": str(a.microbatch),
            "start_ms": str(1e3 * s.start_s), "end_ms": str(1e3 * s.end_s),
        }
        for a, s in spans
    ]  # fmt: skip
    write(path, table)
    found = pipelines.compared(3, pipelines.read_timeline(path)[3], schedule, 0.5)
    assert found.same_order
    assert found.played_s == pytest.approx(found.measured_s)
    assert found.played_bubble == pytest.approx(found.measured_bubble)
    assert found.same_places == pytest.approx(1)
    slower = pipelines.compared(3, pipelines.read_timeline(path)[3], schedule, 2.5)
    assert slower.played_bubble > found.played_bubble
    assert slower.same_places < 1


def test_waiting_for_messages_is_idle_time() -> None:
    stage = SimpleNamespace(forward_s=1.0, backward_s=2.0)
    expected: Any = SimpleNamespace(stages=[stage] * pipelines.STAGES)
    schedule = pipelines.schedule_of()
    # Equal stages are idle for stages - 1 of so many and microbatches; and for half a second in each three.
    at_once = pipelines.waiting_bubble(expected, schedule, 0.0)
    assert at_once == pytest.approx(7 / 23)
    assert pipelines.waiting_bubble(expected, schedule, 0.25) == pytest.approx(1 - 16 * 3 / (23 * 3.5))


PEAK = {
    "row_id": "1", "source": "a page", "system": "Megatron-LM", "hardware": "H100-80GB, 8 per node",
    "model": "Llama of two layers", "num_layers": "2", "hidden": "64", "heads": "4", "seq_len": "32",
    "n_gpus": "2", "tp": "1", "pp": "1", "vpp": "", "dp": "2", "cp": "1", "ep": "", "shard": "distributed",
    "micro_batch": "1", "global_batch": "2", "recompute": "none", "precision": "bf16", "iter_time_s": "",
    "peak_mem_gib": "0.1", "mem_kind": "allocated", "notes": "ffn 128, vocab 256",
}  # fmt: skip


def test_peaks_are_those_of_the_plan_and_of_what_its_software_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = PEAK | {"row_id": "2", "model": "a model that nobody knows"}
    write(tmp_path / "published_runs_3.csv", [PEAK, PEAK | {"peak_mem_gib": ""}, odd])
    assert told(monkeypatch, "--data", str(tmp_path), "--only", "peaks", "--json") == 0
    found = json.loads(capsys.readouterr().out)["peaks"]
    (row,) = found["rows"]
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 2 * 256 * 64
    assert row["beside_gib"] == pytest.approx(weights * 6 / 2**30, abs=0.001)
    assert row["covered"] == (row["p95_gib"] >= 0.1)
    assert sum(found["skipped"].values()) == 1
    assert told(monkeypatch, "--data", str(tmp_path), "--only", "peaks") == 0
    assert "dense LM, all" in capsys.readouterr().out


def test_a_peak_that_microbatches_do_not_move_is_of_no_step() -> None:
    sizes = {"a": ("4", "13.4"), "b": ("16", "13.5"), "c": ("32", "19.5"), "d": ("32", "19.6")}
    given = [
        PEAK | {"row_id": row, "micro_batch": size, "peak_mem_gib": peak}
        for row, (size, peak) in sizes.items()
    ]
    assert recent_peaks.of_no_step(given) == {"a", "b"}


def test_what_a_microbatch_in_flight_costs_leaves_out_both_ends() -> None:
    held = [99.0, 61.0, 51.0, 41.0, 31.0, 98.0]
    assert pipelines.in_flight_gib(held) == 10
