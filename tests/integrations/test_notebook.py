"""A real Jupyter kernel: classes of the notebook are planned, split, checked, trained; results are shown."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from importlib.util import find_spec
from typing import Any
from xml.etree import ElementTree

import pytest
from patience import PATIENCE_S

MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (make test-integrations)"
)

CELLS = (
    """
import torch
import torch.nn.functional as F
from torch import nn
import outsize

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

torch.manual_seed(0)
model = nn.Sequential(Block(8), Block(8), nn.Linear(8, 3))
x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
asked = {"loss_fn": F.cross_entropy, "target": y}
""",
    'outsize.fit(model, (x,), cluster="2x12GB", **asked)',
    'plan = outsize.plan(model, (x,), cluster="2xcpu", stages=2, microbatches=4, **asked)\nplan',
    "outsize.check(model, (x,), plan=plan, **asked)",
    "outsize.check(model, (x,), plan=plan, processes=True, **asked)",
    """
engine = outsize.parallelize(model, (x,), plan=plan, optimizer=lambda w: torch.optim.SGD(w, lr=0.1), **asked)
print(engine)
""",
    "losses = [engine.step(x, target=y).loss.item() for _ in range(5)]\nlosses[0] > losses[-1]",
    "engine.timeline()",
    "engine.report()",
    """
%matplotlib inline
import matplotlib.pyplot as plt
plt.plot(losses)
plt.show()
""",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each cell shows."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()
    json.loads(nbformat.writes(notebook))
    return [cell["outputs"] for cell in notebook["cells"]]


def html(cell: list[dict[str, Any]]) -> str:
    (shown,) = (output["data"] for output in cell if output["output_type"] == "execute_result")
    assert not [output for output in cell if output["output_type"] == "display_data"]
    return shown["text/html"]


def figure(markup: str) -> ElementTree.Element:
    """The picture of a cell, which is well-formed."""
    (code,) = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", markup)
    return ElementTree.fromstring(b64decode(code))


def test_answers_are_tables(outputs: list[list[dict[str, Any]]]) -> None:
    assert "YES" in html(outputs[1])
    assert "fits 2x12GB" in html(outputs[1])
    for cell in outputs[3:5]:
        assert "bit-equal" in html(cell)
        assert "NOT" not in html(cell)


def test_a_plan_has_a_table_and_a_picture_of_its_memory(outputs: list[list[dict[str, Any]]]) -> None:
    shown = html(outputs[2])
    assert "throughput" in shown
    assert "Memory at the peak" in "".join(figure(shown).itertext())


def test_an_engine_says_model_plan_and_devices(outputs: list[list[dict[str, Any]]]) -> None:
    (printed,) = outputs[5]
    assert printed["text"] == "Engine(Sequential: pp 2, 1f1b, 4 microbatches; cpu; step 0)\n"
    (trained,) = outputs[6]
    assert trained["data"]["text/plain"] == "True"


def test_a_measured_step_is_a_picture_and_says_how_devices_spent_it(
    outputs: list[list[dict[str, Any]]],
) -> None:
    assert "rank 1" in "".join(figure(html(outputs[7])).itertext())
    assert "bubble" in html(outputs[8])


def test_plots_are_inline(outputs: list[list[dict[str, Any]]]) -> None:
    (plot,) = (output for output in outputs[9] if output["output_type"] == "display_data")
    assert b64decode(plot["data"]["image/png"]).startswith(b"\x89PNG")
