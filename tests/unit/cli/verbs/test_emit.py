"""`outsize emit`: what is planned, what the file says of it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Outsize = Callable[..., Any]
ASKED = ("--model", "toy:build", "--input", "8", "--batch", "16", "--cluster", "2xcpu")


def test_a_script_gets_a_job_with_the_sizes_of_its_model(outsize: Outsize, folder: Path) -> None:
    said = outsize(
        "emit", "slurm", "train.py", *ASKED, "--nodes", "1:3", "--out", "job.sh", "--", "--lr", "1e-3"
    )
    assert (said.code, said.out) == (0, "")
    assert "job.sh: numbers of nodes that have a plan: 1, 2, 3" in said.err
    text = (folder / "job.sh").read_text()
    assert text.startswith("#!/bin/bash\n# Written by outsize ")
    assert "#SBATCH --nodes=1-3\n" in text
    assert "#SBATCH --signal=USR1@120\n" in text
    assert "$meeting train.py --lr 1e-3" in text
    assert "export OUTSIZE_WORLD_SIZES=2,4,6" in text


def test_a_model_trains_itself_with_checkpoints(outsize: Outsize) -> None:
    said = outsize("emit", "dstack", "toy:build", "--input", "8", "--batch", "16", "--cluster", "2xcpu")
    assert said.code == 0
    assert "toy:build --input 8 --batch 16 --checkpoint build" in " ".join(said.out.split())


def test_a_script_without_a_model_has_the_sizes_of_its_plans(outsize: Outsize) -> None:
    assert (
        outsize("plan", "toy:build", "--input", "8", "--cluster", "2x2xcpu", "--out", "plan.json").code == 0
    )
    said = outsize("emit", "ray", "train.py", "--plan", "plan.json", "--nodes", "1:2", "--json")
    document = json.loads(said.out)
    assert [size["nodes"] for size in document["job"]["request"]["sizes"]] == [2]
    assert "NODES = [2]" in document["text"]
    assert "1 node: left out [E106]: no plan is given for 2 devices; plans for 4" in document["text"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("slurm", "train.py"), "nothing says how much memory and time the script's model takes"),
        (("slurm", "train.py", *ASKED, "--nodes", "4:1"), "--nodes 4:1 is no number of nodes"),
        (("slurm", "train.py", *ASKED, "--name", "My Job"), "--name My Job is no name of a job or queue"),
        (("slurm", "train.py", *ASKED, "--share-gpus"), "--share-gpus is for the KAI scheduler"),
        (
            ("kubernetes", "train.py", *ASKED, "--scheduler", "kai", "--share-gpus"),
            "--share-gpus gives parts of a GPU, and the nodes have none",
        ),
        (("lsf", "train.py"), "'lsf' is not one of"),
    ],
)
def test_what_makes_no_sense_is_refused(outsize: Outsize, arguments: tuple[str, ...], error: str) -> None:
    said = outsize("emit", *arguments)
    assert said.code == 2
    assert error in said.err
