"""A plan that this version only plans: refused wherever it would run, with or without its mark, and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize as package
from outsize.errors import WhatIfPlan
from outsize.ir.plan import Axes, Plan
from outsize.train.parallel import make_engine

Outsize = Callable[..., Any]
MARKED = {"what_if": True}
UNMARKED = {"axes": {"pp": 2, "tp": 2, "dp_shard": 4}}


@pytest.fixture
def edited(outsize: Outsize, folder: Path) -> Callable[[dict[str, Any]], Plan]:
    """plan.json of toy:build over two processes with other fields."""

    def edit(fields: dict[str, Any]) -> Plan:
        assert outsize("plan", "toy:build", "--cluster", "2xcpu", "--out", "plan.json").code == 0
        document = json.loads((folder / "plan.json").read_text()) | fields
        (folder / "plan.json").write_text(json.dumps(document))
        return Plan.load(folder / "plan.json")

    return edit


@pytest.mark.parametrize("verb", ["run", "check", "trace"])
@pytest.mark.parametrize(("fields", "numbers"), [(MARKED, "pp 2"), (UNMARKED, "dp_shard 4, tp 2")])
def test_it_is_refused_before_the_model_is_built(
    edited: Callable[[dict[str, Any]], Plan], outsize: Outsize, verb: str, fields: Any, numbers: str
) -> None:
    edited(fields)
    answer = outsize(verb, "nowhere:build", "--plan", "plan.json")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err.startswith("WhatIfPlan [E206]: ")
    assert numbers in answer.err
    assert "Next: outsize plan MODEL --cluster 2xcpu --out plan.json, without --what-if" in answer.err


def test_as_functions(edited: Callable[[dict[str, Any]], Plan]) -> None:
    plan, model = edited(UNMARKED), nn.Linear(3, 3)
    with pytest.raises(WhatIfPlan, match="dp_shard 4, tp 2"):
        make_engine(model, plan, None)
    with pytest.raises(WhatIfPlan):
        package.parallelize(model, (torch.zeros(2, 3),), plan=plan)
    with pytest.raises(WhatIfPlan):
        package.check(model, (torch.zeros(2, 3),), plan=plan)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp", "cp"])
def test_every_axis_beside_pp(edited: Callable[[dict[str, Any]], Plan], axis: str) -> None:
    plan = edited({})
    plan.check_runs()
    with pytest.raises(WhatIfPlan, match=f"{axis} 2"):
        plan.model_copy(update={"axes": Axes.model_validate({"pp": 2, axis: 2})}).check_runs()
