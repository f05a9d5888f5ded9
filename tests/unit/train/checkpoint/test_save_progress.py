"""What is said of a save that a thread writes."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import outsize
from outsize.train.checkpoint.progress import LOGGER, SaveProgress, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(written: int = 0, **how: bool) -> SaveProgress:
    return SaveProgress(Path("run/step-00000500"), 500, 2_000_000_000, lambda _: None, written, **how)


def test_a_terminal_has_one_line_that_goes() -> None:
    screen = Terminal()
    shown(progress(800_000_000), screen)
    assert screen.getvalue() == "\r\x1b[Koutsize: saving step 500: 40 % of 2.00 GB"
    shown(progress(2_000_000_000, is_done=True), screen)
    assert screen.getvalue().endswith("\r\x1b[K")


def test_elsewhere_the_log_has_its_beginning_and_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER.name):
        for one in (progress(), progress(8), progress(9, is_done=True), progress(9, failed=True)):
            shown(one, io.StringIO())
    begun, ended, failed = caplog.messages
    assert begun == "saving step 500: 2.00 GB, run/step-00000500"
    assert ended.startswith("saved step 500 in 0.0 s: 2.00 GB")
    assert failed == "step 500 is not saved: run/step-00000500"


def test_an_engine_tells_how_far_its_save_is(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.zeros(4, 64)
    engine = outsize.parallelize(
        model, (x,), loss_fn=nn.functional.mse_loss, target=x, stages=2, microbatches=1
    )
    assert engine.state.saving is None
    told: list[tuple[float, bool]] = []
    engine.state.on_saving = lambda one: told.append((one.share, one.is_done))
    engine.save(tmp_path, wait=False)
    engine.state.finish_saving()
    assert engine.state.saving is not None
    assert (engine.state.saving.share, engine.state.saving.is_done, engine.state.saving.step) == (
        1.0,
        True,
        0,
    )
    assert engine.state.saving.total_bytes > 2 * 64 * 64 * 4
    assert told[0] == (0.0, False)
    assert told[-1] == (1.0, True)
    assert [share for share, _ in told] == sorted(share for share, _ in told)
