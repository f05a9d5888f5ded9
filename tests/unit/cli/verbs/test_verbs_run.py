"""`outsize run`: which options belong to whom, and how many processes (real ones: tests/dist)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.cli.processes import launch
from outsize.cli.processes.job import RunJob
from outsize.ir.answers.request import PlanRequest
from outsize.ir.answers.utilisation import Idle
from outsize.ops.launch.launch import torchrun_flags
from outsize.ops.launch.spec import LaunchSpec

Outsize = Callable[..., Any]
Calls = list[tuple[list[str], int, dict[str, Any]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What would have been started."""
    calls: Calls = []

    def start(spec: LaunchSpec) -> int:
        rest = {"module": spec.module, "options": spec.options, "shown_as": spec.shown_as}
        passed = {"on_oom": spec.how.on_oom, "peer_copies": spec.how.peer_copies}
        rest |= {name: value for name, value in passed.items() if value is not None}
        calls.append((list(spec.argv), spec.nproc_per_node, rest))
        if spec.argv[0] == "outsize.cli.processes.run_worker":
            rest["job"] = RunJob.model_validate_json((Path(spec.argv[1]) / "job.json").read_text())
        return 7

    monkeypatch.setattr(launch, "launch", start)
    return calls


def test_what_follows_a_script_is_the_scripts(outsize: Outsize, launched: Calls, folder: Path) -> None:
    (folder / "train.py").touch()
    answer = outsize("run", "--nproc_per_node", "3", "train.py", "--steps", "5", "-m", "--json", "rest")
    assert (answer.code, answer.out) == (7, "")
    argv, processes, rest = launched[0]
    assert argv == ["train.py", "--steps", "5", "-m", "--json", "rest"]
    assert (processes, rest["module"]) == (3, False)


def test_a_module_as_torchrun_spells_it(outsize: Outsize, launched: Calls) -> None:
    flags = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "29500"]
    assert outsize("run", *flags, "-m", "package.module", "--lr", "3").code == 7
    assert outsize("run", *(f.replace("_", "-") for f in flags), "--module", "a.b").code == 7
    assert [argv for argv, _, _ in launched] == [["package.module", "--lr", "3"], ["a.b"]]
    said = ("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500")
    for _, processes, rest in launched:
        assert (processes, rest["module"], rest["options"]) == (1, True, said)


# A value for each flag of torchrun that has one; the rest take any number.
VALUES = {"--start-method": "fork", "--numa-binding": "node"}


@pytest.mark.parametrize("separate", [True, False])
def test_every_flag_of_torchrun_passes_through_in_each_spelling(
    outsize: Outsize, launched: Calls, separate: bool
) -> None:
    """Oracle: torchrun's own parser reads the same of the line as typed and of what is handed on."""
    from torch.distributed.run import get_args_parser

    ours = {"-h", "--help", "-m", "--module", "--nproc-per-node", "--nproc_per_node"}
    flags = {flag: takes for flag, (_, takes) in torchrun_flags().items() if flag not in ours}
    assert len(flags) > 40
    for flag, takes_value in flags.items():
        value = VALUES.get(flag.replace("_", "-"), "1")
        typed = ([flag, value] if separate else [f"{flag}={value}"]) if takes_value else [flag]
        assert outsize("run", *typed, "-m", "a.b", flag, "rest").code == 7, flag
        argv, _, rest = launched.pop()
        assert argv == ["a.b", flag, "rest"]
        if flag.replace("_", "-") != "--shutdown-timeout":  # which older parsers do not have
            expected, read = (
                get_args_parser().parse_args([*line, "a.b"]) for line in (typed, rest["options"])
            )
            assert read == expected


def test_streams_to_files_and_restarts(outsize: Outsize, launched: Calls) -> None:
    outsize("run", "-t", "3", "-r", "0:1", "--max-restarts", "2", "--standalone", "-m", "a.b", "--tee", "4")
    assert launched[0][2]["options"] == ("--tee=3", "--redirects=0:1", "--max-restarts=2", "--standalone")
    assert launched[0][0] == ["a.b", "--tee", "4"]


def test_what_follows_an_error_of_memory_is_passed_on(outsize: Outsize, launched: Calls) -> None:
    outsize("run", "--max-restarts", "2", "--ranks", "on_oom=replan", "-m", "a.b")
    assert launched[0][2]["on_oom"] == "replan"


def test_copies_are_passed_on(outsize: Outsize, launched: Calls) -> None:
    outsize("run", "--max-restarts", "2", "--ranks", "peer_copies=30s", "-m", "a.b")
    assert launched[0][2]["peer_copies"] == "30s"


def test_options_may_follow_a_model(outsize: Outsize, launched: Calls) -> None:
    outsize("run", "toy:build", "--steps", "5", "--train", "lr=0.1", "--stages", "3", "--schedule", "1f1b")
    (_, processes, rest) = launched[0]
    job: RunJob = rest["job"]
    assert (processes, job.model, job.steps, job.lr, job.request.schedule) == (3, "toy:build", 5, 0.1, "1f1b")
    assert (job.request.batch_size, rest["shown_as"]) == (8, "toy:build")


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ([], 2),
        (["--nproc-per-node", "4"], 4),
        (["--stages", "6", "--nnodes", "2", "--master-port", "1", "--master-addr", "h"], 3),
        (["--axes", "tp=4"], 4),
        (["--axes", "tp=2,dp_shard=2", "--stages", "2"], 8),
        (["--axes", "pp"], 2),
    ],
)
def test_processes_of_a_model(outsize: Outsize, launched: Calls, flags: list[str], processes: int) -> None:
    outsize("run", "toy:build", *flags)
    assert launched[0][1] == processes


def test_a_plan_says_how_many_processes(outsize: Outsize, launched: Calls) -> None:
    outsize("plan", "toy:build", "--cluster", "3xcpu", "--batch", "6", "--exact", "--out", "plan.json")
    outsize("run", "toy:build", "--plan", "plan.json")
    assert (launched[0][1], launched[0][2]["job"].request.batch_size) == (3, 6)


def test_a_failed_run_is_an_object_under_json(outsize: Outsize, launched: Calls) -> None:
    answer = outsize("run", "toy:build", "--json")
    assert answer.code == 7
    assert '"exit_code": 7' in answer.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "5", "train.py"], "--steps is an option of a MODEL run"),
        (["--report", "r.html", "-m", "toy"], "--report is an option of a MODEL run"),
        (["toy:build", "more"], "'more' follows the MODEL"),
        (["resnet18"], "'resnet18' is neither a file nor a MODEL"),
        (["gone.py"], "no file 'gone.py'"),
        (["."], "'.' is a folder, and none that Python runs; it has no __main__.py. Next: ls ."),
        (["--nproc-per-node", "some", "-m", "toy"], "--nproc-per-node 'some' is no count"),
        (["--ranks", "peer_copies=1", "-m", "toy"], "starts again, which --max-restarts has to allow"),
        (
            ["--ranks", "peer_copies=often", "--max-restarts", "1", "-m", "toy"],
            "'often' is no interval",
        ),
        (["toy:build", "--checkpoint", "every=500"], "every is for checkpoints, and there is no folder"),
        (["toy:build", "--checkpoint", "run,every=500|10m"], "every '500|10m' is no interval"),
        (["toy:build", "--checkpoint", "run,every=1.5h"], "Next: 500 (steps), 90s, 10m or 2h"),
        (
            ["--ranks", "on_oom=cry", "-m", "toy"],
            "on_oom=cry makes no sense; Input should be 'raise'",
        ),
        (
            ["--ranks", "on_oom=replan", "-m", "toy"],
            "starts the run again, which --max-restarts has to allow",
        ),
        (
            ["--ranks", "on_oom=replan", "--max-restarts", "2", "toy:build"],
            "--ranks on_oom=replan is for scripts",
        ),
    ],
)
def test_what_is_refused(outsize: Outsize, arguments: list[str], text: str) -> None:
    answer = outsize("run", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert text in answer.err


def test_what_to_type_against_idle_devices_is_the_same_run_with_other_options() -> None:
    change = (("batch", "16"), ("schedule", "1f1b"), ("microbatches", "16"))
    figures = {"stages": 4, "microbatches": 4, "part": 0.7, "gain": 2.0, "change": change}
    idle = Idle(share=0.7, cause="sequential", **figures)
    job = RunJob(model="transformers:A?b=1&c=2", input="3x8x8", request=PlanRequest(batch_size=8), steps=1)
    assert job.command(4, idle) == (
        "outsize run 'transformers:A?b=1&c=2' --input 3x8x8 --stages 4 "
        "--batch 16 --schedule 1f1b --microbatches 16"
    )
    assert job.command(2, idle.model_copy(update={"change": change[1:]})).count("--batch 8") == 1
    devices = job.model_copy(update={"devices": ("cuda:0", "cpu")})
    assert " --stages 2 --devices cuda:0,cpu --batch 16" in devices.command(2, idle)
    uneven = idle.model_copy(update={"cause": "uneven-stages", "change": ()})
    assert job.command(2, uneven) == "outsize tune 'transformers:A?b=1&c=2' --input 3x8x8 --batch 8 --nproc 2"
