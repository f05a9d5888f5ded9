"""benchmarks/foresight on small made-up files: what is read, left out and why, and printed."""

from __future__ import annotations

import csv
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "foresight"
MODULES = ("runs", "steptime", "golden")
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


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules, which live beside the package."""
    monkeypatch.syspath_prepend(str(HERE))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    """A CSV file of rows with equal columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The benchmark as a person runs it."""
    command = [sys.executable, str(HERE / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_row_becomes_a_job(bench: dict[str, ModuleType]) -> None:
    run = bench["runs"].read({**RUN, "tp": "2", "dp": "1"})
    assert (run.job.pp, run.job.dp, run.job.sharding.tp, run.job.microbatches) == (2, 1, 2, 8)
    assert run.job.model.vocabulary == 50432  # 50,257 to a multiple of 256
    assert (run.seconds, run.nodes, run.vtrain, run.calculon) == (0.1, 1, True, False)


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
        ({"num_layers": "1"}, "more stages than layers"),
        ({"n_gpus": "4000000", "dp": "2000000"}, "more than"),
    ],
)
def test_a_row_that_cannot_be_timed_says_why(
    bench: dict[str, ModuleType], change: dict[str, str], reason: str
) -> None:
    with pytest.raises(bench["runs"].Skip, match=reason):
        bench["runs"].read({**RUN, **change})


def test_a_step_time_may_be_given_as_rates(bench: dict[str, ModuleType]) -> None:
    other = {**RUN, "iter_time_s": ""}
    assert bench["runs"].read({**other, "samples_per_s": "32"}).seconds == 0.5
    inner = 1 + 256 / (6 * 512) + 50304 / (16 * 4 * 512)
    flops = 96 * 16 * 256 * 4 * 512**2 * inner
    assert bench["runs"].read({**other, "tflops_per_gpu": "2"}).seconds == pytest.approx(flops / 8e12)


def test_rows_of_one_choice_are_in_one_half(bench: dict[str, ModuleType]) -> None:
    read, half_of = bench["runs"].read, bench["runs"].half_of
    alike = ({"row_id": "2"}, {"iter_time_s": "9"}, {"micro_batch": "4"}, {"tp": "2", "pp": "1"})
    assert {read({**RUN, **change}).half for change in alike} == {read(RUN).half}
    assert {read({**RUN, "num_layers": str(n)}).half for n in range(4, 13)} == {0, 1}
    assert {half_of(["model"], str(salt)) for salt in range(9)} == {0, 1}


@pytest.mark.parametrize(("gpus", "read_as"), [("4", "none"), ("16", "full")])
def test_second_hand_labels_are_read_as_the_prior_was_tuned(
    bench: dict[str, ModuleType], gpus: str, read_as: str
) -> None:
    label = "full (in the repo's config files)"
    run = bench["runs"].read({**RUN, "recompute": label, "n_gpus": gpus, "dp": str(int(gpus) // 2)})
    assert bench["steptime"].as_tuned(run).job.sharding.recompute == read_as
    certain = bench["runs"].read({**RUN, "recompute": "full"})
    assert bench["steptime"].as_tuned(certain).job.sharding.recompute == "full"


def test_doubt_is_shared_by_runs_alike_of_one_site(bench: dict[str, ModuleType]) -> None:
    steptime, read = bench["steptime"], bench["runs"].read
    changes = ({}, {"num_layers": "8"}, {"micro_batch": "4"}, {"hardware": "A100 elsewhere"})
    deeper, wider, elsewhere = steptime.doubt([read({**RUN, **change}) for change in changes])[0][1:]
    assert deeper > wider > 0
    assert elsewhere == 0
    assert steptime.doubt([]).shape == (0, 0)


def test_what_is_seen_of_a_run_is_told_of_those_alike_and_half_stay_unseen(
    bench: dict[str, ModuleType],
) -> None:
    rows = [{**RUN, "num_layers": n, "micro_batch": b} for b in ("1", "2") for n in ("4", "8", "12")]
    runs = [bench["runs"].read(row) for row in rows]
    believed = [t.predicted for t in bench["steptime"].time_all(runs, 0)]
    slower = [
        bench["runs"].read({**row, "iter_time_s": repr(seconds * (1.2 if row["micro_batch"] == "2" else 1))})
        for row, seconds in zip(rows, believed, strict=True)
    ]
    timed = bench["steptime"].time_all(slower, 99)
    assert sum(t.seen for t in timed) == 3
    assert max(t.error for t in timed) < 0.03


def test_regret_is_the_chosen_plan_over_the_best(bench: dict[str, ModuleType]) -> None:
    read, timed = bench["runs"].read, bench["steptime"].Timed
    fast, slow = (read({**RUN, "iter_time_s": seconds}) for seconds in ("0.1", "0.2"))
    assert bench["steptime"].regrets([timed(fast, 2.0, False), timed(slow, 1.0, False)]) == [2.0]
    assert bench["steptime"].regrets([timed(fast, 1.0, False), timed(slow, 2.0, False)]) == [1.0]
    assert bench["steptime"].regrets([timed(fast, 1.0, False)]) == []


def test_golden_rows_are_predicted_or_refused(bench: dict[str, ModuleType]) -> None:
    golden = bench["golden"]
    fused = golden.peak_bytes(golden.read(GOLDEN))
    unfused = golden.peak_bytes(golden.read({**GOLDEN, "notes": GOLDEN["notes"].replace("flash", "unfused")}))
    scores = 6 * 4 * 4 * 1024**2 * 5  # layers x microbatch x heads of a rank x s x s x (2 + 1 + 2) bytes
    assert unfused - fused == pytest.approx(scores, rel=0.01)
    shared = golden.peak_bytes(golden.read({**GOLDEN, "parallelism": "TP2 PP2 dist-opt"}))
    assert shared < fused
    with pytest.raises(golden.Skip, match="layout"):
        golden.read({**GOLDEN, "parallelism": "TP2 PP2 layout=Et|tL"})
    with pytest.raises(golden.Skip, match="layers"):
        golden.read({**GOLDEN, "notes": ""})


def test_interleaved_golden_rows_hold_more_chunks(bench: dict[str, ModuleType]) -> None:
    golden = bench["golden"]
    deep = {**GOLDEN, "parallelism": "TP1 PP4"}
    plain, chunked = (
        golden.peak_bytes(golden.read(row)) for row in (deep, {**deep, "parallelism": "TP1 PP4 vstages=3"})
    )
    tokens = 4 * 1024
    layer = 34 * tokens * 512 + 4 * tokens * 8 + 2 * 8 * tokens
    assert chunked - plain == pytest.approx((9 - 3) * layer, rel=1e-6)


def test_the_whole_benchmark_on_small_files(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """Measured is what the prior predicts: no error and no regret; everything else is counted by reason."""
    rows = [{**RUN, "micro_batch": b, "num_layers": n} for b in ("1", "2", "4") for n in ("4", "8")]
    for row in rows:
        run = bench["runs"].read(row)
        prior = bench["steptime"].PRIORS[bench["steptime"].kind(run)]
        row["iter_time_s"] = repr(float(bench["steptime"].step_s(run.job, run.cluster, prior)))
    runs = write(tmp_path / "runs.csv", [*rows, {**RUN, "tp": ""}])
    memory = write(tmp_path / "memory.csv", [GOLDEN, {**GOLDEN, "id": "other"}, {**GOLDEN, "family": "mimo"}])
    done = launch("--runs", str(runs), "--memory", str(memory), "--calibrate", "2", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["step_time_mape_single"] < 1e-3
    assert found["step_time_mape_multi"] is None
    assert found["choice_regret_worst"] == 1.0
    assert (found["runs"]["used"], found["runs"]["calibrated_on"]) == (6, 2)
    assert found["runs"]["skipped"] == {"tp not given": 1}
    assert found["memory"]["used"] == 1
    assert len(found["memory"]["skipped"]) == 2
    assert found["memory_median"] < 0.1
    text = launch("--runs", str(runs), "--memory", str(memory), "--calibrate", "2").stdout
    assert "step_time_mape_single" in text
    assert "tp not given" in text


ODD = [
    {**RUN, "iter_time_s": "soon"},
    {**RUN, "tp": "0", "n_gpus": "0"},
    {**RUN, "heads": "0"},
    {**RUN, "micro_batch": "0"},
    {**RUN, "samples_per_s": "0", "iter_time_s": ""},
    {**RUN, "hardware": "", "model": "a model that nobody knows", "source": ""},
    {**RUN, "hardware": "A100 of a cloud", "model": "a model that nobody knows", "source": "elsewhere"},
    {**RUN, "vpp": "0"},
]
ODD_MEMORY = [
    {**GOLDEN, "mem_value": "lots"},
    {**GOLDEN, "mem_value": "0"},
    {**GOLDEN, "parallelism": "TP0"},
    {**GOLDEN, "batch_per_device": "mbs 0 gbs 0"},
    {**GOLDEN, "precision": ""},
    {**GOLDEN, "notes": GOLDEN["notes"].replace("num-layers=12", "num-layers=twelve")},
]


def told(runs: Path, memory: Path, calibrate: str = "2") -> dict[str, Any]:
    """What the benchmark prints about the files, which must not be a traceback."""
    done = launch("--runs", str(runs), "--memory", str(memory), "--calibrate", calibrate, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_odd_rows_are_left_out_with_a_reason(tmp_path: Path) -> None:
    found = told(write(tmp_path / "r.csv", [RUN, *ODD]), write(tmp_path / "m.csv", [GOLDEN, *ODD_MEMORY]))
    assert found["runs"]["used"] == 2  # the good one, and one of a model and a source that nobody knows
    assert sum(found["runs"]["skipped"].values()) == len(ODD) - 1
    assert found["choices"] == 0
    assert found["choice_regret_mean"] is found["choice_regret_worst"] is None
    assert found["memory"]["used"] + sum(found["memory"]["skipped"].values()) == 1 + len(ODD_MEMORY)
    assert sum(found["memory"]["skipped"].values()) >= 4


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
    found = told(path, path, "0")
    assert found["runs"]["used"] == (1 if "row_id" in text and "too" in text else 0)
    assert found["memory"]["used"] == 0


def test_missing_files_end_with_a_clear_word(tmp_path: Path) -> None:
    done = launch("--runs", str(tmp_path / "none.csv"), "--memory", str(tmp_path / "none.csv"))
    assert done.returncode == 2
    assert "no file" in done.stderr
    assert "Traceback" not in done.stderr
