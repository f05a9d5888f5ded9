"""The check of a trainer over two ranks, and by the command: each rank's first difference is the same one."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_trainers
import pytest
import torch
from forked import in_forks
from patience import free_port

import outsize
from outsize.errors import RankFailed
from outsize.integrations import checked_trainers
from outsize.integrations.transformers import Trainer
from outsize.ir.answers.verdict import Verdict
from outsize.train.check.trainers import RunFiles

pytestmark = pytest.mark.dist
OUTSIZE = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"
PROGRAM = own_trainers.__file__


def split(kind: type) -> type:
    return type(kind.__name__, (Trainer, kind), {})


def checked(folder: Path, name: str, **options: Any) -> list[Verdict]:
    """The verdict of each of two ranks, behind which the trainer goes on."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        own_trainers.DRAWS.seed(number)
        vars(multiprocessing.current_process())["_config"]["daemon"] = False  # It may fork, as a rank may.
        trainer = own_trainers.trainer_of(name, split(own_trainers.KINDS[name]), outsize=options)
        before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
        verdict = outsize.check(trainer=trainer)
        assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())
        (folder / f"{number}.json").write_text(verdict.to_json())

    in_forks(folder, 2, rank)
    return [Verdict.model_validate_json((folder / f"{number}.json").read_text()) for number in (0, 1)]


@pytest.mark.sample("right", "scale", "draws")  # What divides by a count differs as what scales does.
@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("right", None),
        ("scale", "loss of update 1: "),
        ("divides", "loss of update 1: "),
        ("draws", "loss of update 1: "),
    ],
)
def test_each_rank_says_the_same(name: str, begins: str | None, tmp_path: Path) -> None:
    first, second = checked(tmp_path, name, stages=2)
    assert first == second
    assert first.processes == 2
    assert first.bit_equal is (begins is None)
    if begins is not None:
        assert first.first_divergence is not None
        assert first.first_divergence.startswith(begins)
        assert first.first_divergence.endswith("split on rank 1") is (name == "draws")


def test_replicas_agree_but_for_rounding(tmp_path: Path) -> None:
    """Each has batches of its own, so sums have another order."""
    first, second = checked(tmp_path, "right", axes={"dp_replicate": 2}, stages=1)
    assert first == second
    assert first.relative_diff is not None
    assert first.holds
    assert not first.bit_equal


def test_what_one_rank_raises_all_of_them_raise(tmp_path: Path) -> None:
    class Fails(own_trainers.Pairs):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, Trainer) and torch.distributed.get_rank() == 1:
                raise ValueError("not on this rank")
            return super().compute_loss(*args, **kwargs)

    own_trainers.KINDS["fails"] = Fails
    with pytest.raises(AssertionError, match="rank 0:") as told:
        checked(tmp_path, "fails", stages=2)
    assert str(told.value).count(RankFailed.__name__) >= 2


def asked(*words: str) -> tuple[int, str, str]:
    paths = os.pathsep.join([str(Path(PROGRAM).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", OUTSIZE, "check", *words],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("forked_python")
def test_the_command_takes_the_trainer_of_a_program() -> None:
    """One that nobody has split, over processes; it ends at the program's call of train, with 1 if one
    differs.
    """
    code, out, err = asked("--trainer", "-m own_trainers scale", "--processes", "--json")
    verdict = Verdict.model_validate_json(out)
    assert (code, verdict.bit_equal, verdict.processes, len(verdict.stages)) == (1, False, 2, 2), err
    assert verdict.model == "MovingScale of GPT2LMHeadModel"
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.startswith("loss of update 1: ")


def test_where_no_fork_computes_a_program_runs_twice(tmp_path: Path) -> None:
    for how in ("plain", "split"):
        arguments = [str(tmp_path), how, "1", '{"stages": 2}', "-m", "own_trainers", "right"]
        in_forks(tmp_path, 1, lambda _, arguments=arguments: ended(checked_trainers.main, arguments))
    assert RunFiles(tmp_path).verdict(1).bit_equal


def ended(main: Callable[[list[str]], None], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0


def test_a_program_without_a_trainer_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("")
    arguments = [str(tmp_path), "both", "2", "{}", str(tmp_path / "none.py")]
    with pytest.raises(AssertionError, match=r"none\.py has ended, and no trainer of transformers was"):
        in_forks(tmp_path, 1, lambda _: checked_trainers.main(arguments))
