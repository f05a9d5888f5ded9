"""Checks the trainer of a program (`outsize check --trainer`): runs the program up to its training."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import typer

from outsize.cli.screen import Screen, error_document
from outsize.errors import BadOption, RankFailed
from outsize.files.private_folder import private_folder
from outsize.ir.plan import Plan
from outsize.ops.launch.launch import LaunchSpec, launch

if TYPE_CHECKING:
    from outsize.ir.answers.verdict import Verdict

WORKER: Final = "outsize.integrations.checked_trainers"
STAGES: Final = 2


@final
@dataclass(frozen=True)
class CheckedProgram:
    """A program as it is typed, `train.py --lr 1e-4` or `-m package.module ARGS`, and how its trainer is
    split: fields of a Request by their names, or the file of a plan. `processes` are those of the split run.
    """

    line: str
    options: Mapping[str, Any]
    updates: int
    processes: int

    @classmethod
    def of(
        cls, line: str, layout: Mapping[str, Any], plan: Path | None, updates: int, *, over_processes: bool
    ) -> CheckedProgram:
        """Returns the program with a layout or a plan. Raises BadOption for what is no line of a command."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise BadOption(f"--trainer {line!r} is no command line: {error}", next_step=_TYPED) from error
        if not words or words == ["-m"]:
            raise BadOption(f"--trainer {line!r} names no program", next_step=_TYPED)
        if plan is not None:
            ranks = Plan.load(plan).axes.world_size
            return cls(line, {"plan": str(plan)}, updates, ranks if over_processes else 1)
        given = {"stages": STAGES} | {name: value for name, value in layout.items() if value is not None}
        return cls(line, given, updates, given["stages"] if over_processes else 1)

    def verdict(self, screen: Screen) -> Verdict:
        """Runs the program, twice where no fork can compute, and returns the verdict; typer.Exit with the
        code of a run that failed.
        """
        from outsize.train.check.trainers import RunFiles
        from outsize.train.world.local_ranks import can_fork

        with private_folder("outsize-") as folder:
            if can_fork():
                self._run(folder, "both", self.processes, screen)
            else:
                self._run(folder, "plain", 1, screen)
                self._run(folder, "split", self.processes, screen)
            return RunFiles(folder).verdict(self.processes)

    def _run(self, folder: Path, how: str, processes: int, screen: Screen) -> None:
        own = (WORKER, str(folder), how, str(self.updates), json.dumps(self.options), *shlex.split(self.line))
        if processes == 1:  # Under a launcher stages would be those of processes.
            code = subprocess.run([sys.executable, "-P", "-m", *own], check=False).returncode
        else:
            code = launch(LaunchSpec(own, processes, module=True, shown_as=self.line))
        if not code:
            return
        runs = "the program" if how == "both" else f"the {how} run of the program"
        failed = RankFailed(
            f"{runs} failed",
            numbers=f"{self.line}, exit code {code}",
            next_step="see what it says on stderr; a trainer that fails without a split does so here",
        )
        screen.note(str(failed))
        screen.emit({"error": error_document(failed) | {"exit_code": code}})
        raise typer.Exit(code)


_TYPED: Final = 'outsize check --trainer "train.py --lr 1e-4", or --trainer "-m package.module ARGS"'
