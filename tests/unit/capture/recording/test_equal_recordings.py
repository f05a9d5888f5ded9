"""Processes that record one model find the same program, whatever the order of sets of texts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.graph.build import build_graph
from outsize.capture.graph.unit_key import unit_keys
from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.errors import NotCapturable
from outsize.program.tree import map_leaves
from outsize.train.engine.agreed_programs import _by_place
from outsize.train.world.model_facts import digest_of, facts_of


class Gate(nn.Module):
    """A layer of the user's with attributes that others set."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale, self.shift, self.power = nn.Parameter(torch.ones(4)), 1.0, 0.0, 1
        self.modes = {"scaled", "shifted", "squared"}

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight * self.scale if "scaled" in self.modes else x
        return (x + self.shift) ** self.power


class Setting(nn.Module):
    """Sets several attributes of a layer, which is therefore recorded op by op."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.rates = Gate(), {"shift": 0.5, "scale": 2.0, "power": 2}

    def forward(self, x: Tensor) -> Tensor:
        for name, rate in self.rates.items():
            setattr(self.gate, name, rate)
        return self.gate(x)


class Deciding(nn.Module):
    """Decides on activations, counts its calls, and keeps what it has seen by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.calls = nn.Linear(4, 4), set[str](), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen |= {"rows", "columns", str(x.shape)}
        return self.layer(x) if x.sum() > 0 else x


class Mixed(nn.Module):
    """Repeated blocks, a tied weight, dropout, and several kinds of reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(4))
        self.setting, self.deciding = Setting(), Deciding()
        self.options = {"residual", "normalised"}
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)
        for block in self.blocks:
            y = block(y) + y if "residual" in self.options else block(y)
        y = F.layer_norm(y, (4,)) if "normalised" in self.options else y
        return self.head(self.deciding(self.setting(y)))


class SettingTwo(nn.Module):
    """Its own forward sets several attributes of a layer of torch; the first that matters is named."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rest = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eps, self.norm.normalized_shape = 1e-3, [4]
        return self.rest(self.norm(x))


def of_tokens(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    return getattr(value, "__qualname__", None) or repr(value)


def digests() -> dict[str, str]:
    """Returns digests of all that ranks compare or cut by."""
    torch.manual_seed(0)
    model, ids = Mixed(), torch.zeros(2, 3, dtype=torch.long)
    facts = facts_of(model, of_tokens)
    tape = record(model, (ids,), {}, of_tokens, (ids,), TapeOptions(live=()))
    found = build_graph(tape, model)
    lines = [
        (i.name, map_leaves(_leaf, (i.args, i.kwargs, i.out)), i.frame, i.weights, i.written_weights, i.where)
        for i in tape.instructions
    ]
    parts = {
        "facts": digest_of(facts),
        "fingerprint": found.graph.fingerprint,
        "graph": found.graph.model_dump_json(),
        "units": "".join(unit_keys(found, model)),
        "instructions": "\n".join(map(repr, lines)),
        "reads": "\n".join(map(repr, _by_place((read, read.value) for read in tape.reads).items())),
        "refusal": refusal(),
    }
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in parts.items()}


def refusal() -> str:
    """Returns the message of a model that cannot be recorded, or the notes on it."""
    model = SettingTwo()
    try:
        return repr(record(model, (torch.ones(2, 4),), {}).opaque)
    except NotCapturable as error:
        return str(error)


@pytest.mark.interpreters
@pytest.mark.parametrize("seeds", ["12", pytest.param("34567", marks=pytest.mark.full)])
def test_digests_are_equal_whatever_the_order_of_sets(seeds: str) -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['digests']())"
    found = list[str]()
    for seed in seeds:
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(run.stdout)
    assert found == found[:1] * len(seeds)
