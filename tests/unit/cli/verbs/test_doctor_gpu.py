"""`outsize doctor --gpu`: its judge, its runner, its file. tests/device runs its checks on devices.

Without an accelerator a check's processes run on the CPU, which is all that the runner's tests need.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from patience import PATIENCE_S

from outsize.cli.app import run
from outsize.cli.processes import device_checks
from outsize.cli.processes.device_checks import run_checks
from outsize.device import accelerators
from outsize.errors import BadOption
from outsize.ir.answers.device_report import CheckResult, DeviceReport
from outsize.ir.cluster_file import load_cluster
from outsize.ir.graph import Work
from outsize.ir.hardware.devices import TABLE
from outsize.ops.doctor import health, numbers, plain_loop
from outsize.ops.doctor import measured_cluster as clusters
from outsize.ops.doctor.check_place import CheckPlace
from outsize.ops.doctor.health import doctor
from outsize.ops.doctor.measured_cluster import measured_cluster
from outsize.ops.doctor.models import MODELS
from outsize.ops.doctor.plain_loop import Trained, Training
from outsize.ops.doctor.table import CHECKS, DeviceCheck
from outsize.ops.training import parallelize
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.roofline import seconds
from outsize.report.tables.device_report import device_report_tables
from outsize.train.world.world import World

WIDTH = 16
HERE = CheckPlace(World(0, 1, 0, None), torch.device("cpu"), WIDTH)
RATES = {
    "product_flops": 1e12,
    "float32_flops_per_s": 2e13,
    "tfloat32_flops_per_s": 5e13,
    "bfloat16_flops_per_s": 1e14,
    "addition_bytes": 2e8,
    "memory_bytes_per_s": 1e12,
}
SHOWN = {name: RATES[name] for name in ("float32_flops_per_s", "bfloat16_flops_per_s", "memory_bytes_per_s")}
LINKS = {"p2p_latency_s": 1e-5, "p2p_bytes_per_s": 2e10}


def named(name: str) -> DeviceCheck:
    return next(check for check in CHECKS if check.name == name)


def result(name: str, **fields: Any) -> CheckResult:
    return CheckResult(
        **{"name": name, "question": f"{name}?", "outcome": "measured", "processes": 1, **fields}
    )


# -- the judge -----------------------------------------------------------------------------------------------


def test_the_judge_names_what_differs() -> None:
    one = Trained((1.0, 0.5), {"a": torch.zeros(2), "b": torch.ones(2)})
    assert one.differences(Trained((1.0, 0.5), {"b": torch.ones(2)})) == ()
    other = Trained((1.0, 0.25), {"a": torch.tensor([0.0, 2.0]), "b": torch.ones(2)})
    assert one.differences(other) == ("losses (1.0, 0.5) and (1.0, 0.25)", "a by 2")
    assert one.relative_difference(Trained((), {"b": torch.tensor([1.0, 1.5])})) == 0.5


def test_features_hold_here_and_a_wrong_step_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbers.features(HERE).wrong == ()

    def wrong(*args: Any, **options: Any) -> Any:
        return parallelize(*args, **{**options, "clip_norm": (options["clip_norm"] or 1.0) / 2})

    monkeypatch.setattr(numbers, "parallelize", wrong)
    found = numbers.features(HERE).wrong
    assert found is not None
    assert any(line.startswith("perceptron with clipping: ") for line in found)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_each_model_is_built_alike_and_trains(case: Any) -> None:
    runs = [
        plain_loop.train(case.build(WIDTH), case.batch(WIDTH), case.loss_fn, Training(steps=3))
        for _ in range(2)
    ]
    assert runs[0].differences(runs[1]) == ()
    assert runs[0].losses[-1] < runs[0].losses[0]


@pytest.mark.full
def test_every_schedule_holds_here() -> None:
    assert numbers.schedules_alone(HERE).wrong == ()


# -- the runner ----------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.usefixtures("forked_python")
def test_a_joint_check_runs_over_processes() -> None:
    shown = list[tuple[int, int]]()
    (found,) = run_checks([named("replicas")], 2, WIDTH, lambda done, count: shown.append((done, count)))
    assert (found.outcome, found.processes, found.detail) == ("holds", 2, "")
    assert found.figures["relative_difference"] < numbers.ROUNDING
    assert shown == [(0, 1), (1, 1)]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("name", ["links", "schedules_together", "shards", "tensor_parallel"])
def test_other_joint_checks_run_over_processes(name: str) -> None:
    (found,) = run_checks([named(name)], 3 if name == "schedules_together" else 2, WIDTH, lambda *_: None)
    assert found.outcome == ("measured" if name == "links" else "holds"), found.detail


def test_one_process_skips_what_needs_two() -> None:
    (found,) = run_checks([named("shards")], 1, WIDTH, lambda *_: None)
    assert (found.outcome, found.detail) == ("skipped", "a second device")


@pytest.mark.dist
@pytest.mark.usefixtures("forked_python")
def test_a_crash_and_a_hang_end_alone() -> None:
    """Page-locked memory needs an accelerator; no check is over in a hundredth of a second."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator, where the check does not fail")
    hangs = dataclasses.replace(named("launches"), limit_s=0.01)
    crash, hang = run_checks([named("host_copies"), hangs], 1, WIDTH, lambda *_: None)
    assert crash.outcome == "fails"
    assert crash.detail.startswith("exit code 1: ")
    assert "RuntimeError" in crash.detail
    assert (hang.outcome, hang.detail) == ("fails", "not over after 0 s")


@pytest.mark.dist
def test_a_check_ends_when_doctor_is_killed() -> None:
    """SIGKILL leaves doctor no time to end it; with layers so wide the check takes minutes."""
    check = named("schedules_alone")
    running = multiprocessing.get_context("fork").Process(
        target=lambda: list(run_checks([check], 1, 4096, lambda *_: None)), daemon=False
    )
    running.start()
    worker = None
    try:
        worker = _computing_worker_of(psutil.Process(running.pid))
    finally:
        running.kill()
        running.join()
    try:
        worker.wait(timeout=60)
    finally:
        if worker.is_running():
            worker.kill()


def _computing_worker_of(doctor: psutil.Process) -> psutil.Process:
    """The process of the check, when it has read its job: importing torch alone takes a second."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for process in doctor.children():
            with suppress(psutil.Error):
                if "device_check_worker" in " ".join(process.cmdline()) and process.cpu_times().user > 1:
                    return process
        time.sleep(0.05)
    raise AssertionError("the check has not started")


# -- the report ----------------------------------------------------------------------------------------------


def test_its_file_is_a_cluster(tmp_path: Path) -> None:
    host = result("host", figures={"op_s": 3e-5})
    results = (result("rates", figures=RATES), result("links", figures=LINKS), host)
    cluster = measured_cluster("lab", results)
    assert cluster is not None
    assert cluster.devices[0].host_s == 3e-5
    assert (cluster.inner.latency_s, cluster.inner.bytes_per_s) == (1e-5, 2e10)
    report = DeviceReport(health=doctor(), device_type="x", processes=1, results=results, cluster=cluster)
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    assert load_cluster(path) == cluster
    assert measured_cluster("lab", (result("rates", outcome="fails"),)) is None
    path.write_text(report.model_copy(update={"cluster": None}).to_json())
    with pytest.raises(BadOption, match="this report has no rates of its devices") as refused:
        load_cluster(path)
    assert f"Next: outsize doctor --gpu --only rates,links --width 32 --out {path}" in str(refused.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_price_of_what_was_measured_is_what_was_measured(dtype: str) -> None:
    """A rate is no peak: prices take only a share of a peak as reached."""
    cluster = measured_cluster("lab", (result("rates", figures=RATES),))
    assert cluster is not None
    product = Work(family="matmul", flops=10**12, moved_bytes=1, dtype=dtype)
    price_s = seconds((product,), cluster.devices[0]) - default_of(cluster.devices[0]).launch_s
    assert price_s == pytest.approx(1e12 / RATES[f"{dtype}_flops_per_s"])
    addition = Work(family="elementwise", flops=1, moved_bytes=int(2e8), dtype=dtype)
    price_s = seconds((addition,), cluster.devices[0]) - default_of(cluster.devices[0]).launch_s
    assert price_s == pytest.approx(2e8 / 1e12)


def test_a_measured_host_is_that_of_prices() -> None:
    a100 = TABLE["a100-80gb"].device("0")
    slow = a100.model_copy(update={"host_s": 1e-3})
    assert default_of(slow).host_s == 1e-3
    assert default_of(slow).compute == default_of(a100).compute


def test_a_person_sees_outcomes_and_figures_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    results = (
        result("rates", figures=SHOWN | {"x_step_s": 2e-3, "y_peak_bytes": 3e9, "ratio": 1.234}),
        result("shards", outcome="fails", detail="weights by 0.5"),
        result("links", outcome="skipped", detail="a second device"),
    )
    report = DeviceReport(health=doctor(), device_type="x", processes=2, results=results)
    Console(width=80).print(device_report_tables(report))
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "measured  rates?",
        "            float32 flops per s  20 TFLOP/s",
        "            bfloat16 flops per s  100 TFLOP/s",
        "            memory bytes per s  1000.00 GB/s",
        "            x step s  2.00 ms",
        "            y peak bytes  2.8 GiB",
        "            ratio  1.23",
        "fails     shards?",
        "            because  weights by 0.5",
        "skipped   links?",
        "            needs  a second device",
        "1 fails, 1 measured, 1 skipped; x, 2 processes",
    ]
    assert report.failed == ("shards",)


# -- the verb ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "accelerator_type", lambda: None)


@pytest.mark.usefixtures("no_accelerator")
def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--gpu", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)["error"]
    assert said["what"] == "this machine has no accelerator to check"


def test_its_options_belong_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--nproc", "2"]) == 2
    assert "outsize doctor --gpu" in capsys.readouterr().err


def test_an_unknown_check_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "accelerator_type", lambda: "x")
    monkeypatch.setattr(accelerators, "device_count", lambda: 2)
    assert run(["doctor", "--gpu", "--only", "rates,speeds"]) == 2
    assert "--only speeds: no such check" in capsys.readouterr().err
    assert run(["doctor", "--gpu", "--nproc", "3"]) == 2
    assert "torch sees 2" in capsys.readouterr().err


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_what_was_found_is_in_the_file_after_each_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    here, cluster = doctor(), measured_cluster("lab", (result("rates", figures=RATES),))

    def checks(*_: object) -> Iterator[CheckResult]:
        yield result("rates", figures=RATES)
        if is_interrupted:
            raise KeyboardInterrupt
        yield result("links", outcome="fails", detail="not over after 120 s")

    monkeypatch.setattr(health, "doctor", lambda _: here)
    monkeypatch.setattr(clusters, "measured_cluster", lambda *_: cluster)
    monkeypatch.setattr(accelerators, "accelerator_type", lambda: "x")
    monkeypatch.setattr(accelerators, "device_count", lambda: 2)
    monkeypatch.setattr(device_checks, "run_checks", checks)
    path = tmp_path / "report.json"
    command = ["doctor", "--gpu", "--only", "rates,links", "--json", "--out", str(path)]
    with suppress(KeyboardInterrupt):
        assert run(command) == (130 if is_interrupted else 1)
    found = DeviceReport.model_validate_json(path.read_text())
    assert [each.name for each in found.results] == ["rates", "links"][: 1 if is_interrupted else 2]
    assert cluster is not None
    assert load_cluster(path).devices == cluster.devices
    if not is_interrupted:
        assert DeviceReport.model_validate_json(capsys.readouterr().out) == found
