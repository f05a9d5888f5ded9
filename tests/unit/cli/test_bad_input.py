"""Every kind of bad input: its code, the numbers, the next step, no traceback.

The texts are in tests/golden/messages. Paths are cut down to file names: the folder is new in each run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Outsize = Callable[..., Any]
Golden = Callable[[str, str], None]

# name -> (exit code, command line)
CASES: dict[str, tuple[int, str]] = {
    "model-no-spec": (2, "plan resnet50"),
    "model-torchvision": (2, "plan torchvision:resnet5O"),
    "model-transformers": (2, "plan transformers:LamaConfig"),
    "model-no-builder": (2, "plan toy:biuld"),
    "module-unknown": (2, "plan nowhere:build"),
    "module-broken": (2, "check broken:build"),
    "module-torn": (2, "check torn:build"),
    "batch-plan": (2, "plan toy:build --batch 3 --microbatches 4"),
    "batch-check": (2, "check toy:build --batch 3 --microbatches 4"),
    "device": (2, "plan toy:build --cluster 2xgpx"),
    "device-of-a-plan": (2, "plan toy:build --check moved.json"),
    "plan-of-another-model": (3, "check toy:pair --plan plan.json"),
    "plan-of-another-model-priced": (3, "plan toy:pair --check plan.json"),
    "plan-of-another-world": (3, "run toy:build --plan plan.json --nproc-per-node 3"),
    "plan-not-there": (3, "check toy:build --plan gone.json"),
    "plan-no-json": (3, "run toy:build --plan toy.py"),
    "plan-wrong-field": (3, "check toy:build --plan field.json"),
    "plan-uncovered": (3, "check toy:build --plan uncovered.json"),
    "stages": (3, "plan toy:pair --stages 9 --cluster 9xcpu"),
    "stages-of-a-check": (3, "check toy:pair --stages 9"),
    "fits-nowhere": (3, "plan toy:build?width=8192 --cluster 2x1GB"),
    "example-rejected": (2, "plan toy:build --input 5"),
    "example-no-shape": (2, "plan toy:build --input 3x"),
    "loss": (2, "plan toy:Mute"),
    "out": (2, "plan toy:build --cluster 2xcpu --out gone/plan.json"),
    "fit-device": (2, "fit toy:build --cluster 2xgpx"),
    "fit-negative-memory": (2, "fit toy:build --cluster 2x-12GB"),
    "fit-no-device": (2, "fit toy:build --cluster 0x12GB"),
    "fit-batch": (2, "fit toy:build --batch 3 --microbatches 4"),
    "fit-optimizer": (2, "fit toy:build --optimizer adamx"),
    "fit-precision": (2, "fit toy:build --precision fp4"),
    "fit-stages": (3, "fit toy:pair --stages 9 --cluster 9xcpu"),
    "plan-negative-memory": (2, "plan toy:build --cluster 2x-12GB"),
    "plan-unsupported": (3, "run toy:build --plan unsupported.json"),
    "plan-tp-beside-check": (2, "plan toy:build --check plan.json --axes tp=2"),
    "plan-fits-nowhere-at-all": (3, "plan toy:build?width=512 --cluster 2x0.01GB"),
    "plan-axes-pp": (3, "plan toy:build?width=8192 --cluster 2x2GB --axes pp"),
    "plan-batch": (2, "plan toy:build --cluster 4xh100-80gb --batch 3 --microbatches 4"),
    "explain-plan-no-json": (3, "explain-plan toy.py"),
    "explain-plan-of-another-model": (3, "explain-plan plan.json toy:pair"),
    "option": (2, "plan toy:build --stagse 2"),
    "value": (2, "plan toy:build --batch many"),
    "verb": (2, "pln toy:build"),
}


@pytest.fixture(scope="module")
def planned() -> dict[str, str]:
    """The text of plan.json, which the first test makes."""
    return {}


@pytest.fixture
def plans(outsize: Outsize, folder: Path, planned: dict[str, str]) -> None:
    """plan.json of toy:build over two processes, and copies of it with a mistake."""
    if not planned:
        assert outsize("plan", "toy:build", "--cluster", "2xcpu", "--exact", "--out", "plan.json").code == 0
        planned["text"] = (folder / "plan.json").read_text()
    text = planned["text"]
    (folder / "plan.json").write_text(text)
    other = text.replace('"tp": 1', '"tp": 2').replace('"cp": 1', '"cp": 4')
    (folder / "unsupported.json").write_text(other.replace('"form": "tape"', '"form": "modules"'))
    (folder / "moved.json").write_text(text.replace('"device": "cpu:1"', '"device": "cpu:7"'))
    (folder / "field.json").write_text(re.sub('"schedule": "[^"]*"', '"schedule": "2f2b"', text, count=1))
    assert '"0-' in text
    (folder / "uncovered.json").write_text(re.sub('"0-', '"1-', text, count=1))


def without_folders(text: str) -> str:
    """`(/a/b/torn.py:1)` -> `(torn.py:1)`; torch's own line numbers move from version to version."""
    text = re.sub(r"(?<![\w.])/[\w./-]*/", "", text)
    return re.sub(r"(linear|__init__)\.py:\d+", r"\1.py", text)


@pytest.mark.usefixtures("plans")
@pytest.mark.filterwarnings("ignore:torchvision .* is built for another torch")
@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, outsize: Outsize, golden: Golden) -> None:
    code, line = CASES[name]
    answer = outsize(*line.split())
    assert (answer.code, answer.out) == (code, "")
    assert "Traceback" not in answer.err
    message = re.search(r"^\w+ \[E\d+\]: .*\. Next: .*", answer.err, re.MULTILINE | re.DOTALL)
    assert message, answer.err
    golden(f"messages/error-{name}.txt", f"$ outsize {line}\n{without_folders(message[0])}")
