"""A policy of activations or weights is named in its record alone; all other files ask the record.

So adding one touches its record and what makes its rows, not every file that ever compared a name.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house import PACKAGE, parse, sources, spot
from outsize.policies import activations, weights
from outsize.policies.activations import ActivationPolicy, activation_policies
from outsize.policies.weights import WeightPolicy, weight_policies

NAMES = frozenset(policy.name for policy in (*activation_policies(), *weight_policies()))
# The variables that hold a record, such as KEEP.
RECORDS = frozenset(
    name
    for room in (activations, weights)
    for name, value in vars(room).items()
    if isinstance(value, (ActivationPolicy, WeightPolicy))
)
# The records, and the table of what other tools call each policy.
OWNERS = {
    PACKAGE / "policies" / "activations.py",
    PACKAGE / "policies" / "weights.py",
    PACKAGE / "errors" / "words.py",
}
# Words that say something else in these files.
OTHER_MEANINGS = {
    # An empty list, a value that is missing, a loss without labels, torch's `reduction`, a value of SVG.
    "none": {
        "capture/models/load.py",
        "capture/models/lora.py",
        "capture/models/transformers_classes.py",
        "cli/options.py",
        "ir/answers/run_state.py",
        "planner/search/search.py",
        "program/sharding/context_parallel/row_sums.py",
        "program/sharding/context_parallel/rules.py",
        "report/html/svg.py",
        "report/tables/plan_tables.py",
        "run/collectives/context_parallel.py",
        "run/collectives/tensor_parallel.py",
        "run/weights/load.py",
        "schedules/offload.py",
        "train/batch/loss_denominators.py",
        "train/checkpoint/loop/attached.py",
        "train/checkpoint/weights.py",
        "train/crew/apply_named.py",
        "train/engine/by_modules.py",
        "train/world/handshake.py",
        "train/ranks/program_agreement.py",
    },
    # How full a device is, as the head of a column; the long form of the demo.
    "full": {
        "cli/demo/trained_job.py",
        "report/tables/fit.py",
        "report/tables/plan_tables.py",
        "report/tables/ranking.py",
    },
    # The host's processor as a cause, its figures, its process group, and a word of a table.
    "host": {
        "ops/doctor/measured_cluster.py",
        "ir/answers/compilation.py",
        "planner/advice/compilation.py",
        "planner/advice/device_graphs.py",
        "report/tables/ranking.py",
        "run/transport/groups.py",
    },
    # By what a plan fits where the pipeline that was asked for does not.
    "offload": {"ir/answers/fit.py", "planner/fit/from_plan.py", "report/wording.py"},
}


def relative(path: Path) -> str:
    """`planner/fit/fit.py`."""
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def named_policies(path: Path) -> list[str]:
    """`file:line name` of each policy that a file names in a string of its own."""
    strings = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Constant))
    return [
        f"{spot(path, node)} {node.value}"
        for node in strings
        if node.value in NAMES and relative(path) not in OTHER_MEANINGS.get(str(node.value), ())
    ]


def compared_policies(path: Path) -> list[str]:
    """`file:line KEEP` of each record whose name a file compares."""
    compares = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Compare))
    return [
        f"{spot(path, node)} {side.value.id}"
        for node in compares
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Attribute) and side.attr == "name"
        if isinstance(side.value, ast.Name) and side.value.id in RECORDS
    ]


def others() -> list[Path]:
    """All files but those that may name policies."""
    return [path for path in sources(PACKAGE) if path not in OWNERS]


def test_a_policy_is_named_in_its_record_alone() -> None:
    assert [found for path in others() for found in named_policies(path)] == []


def test_nobody_compares_the_name_of_a_record() -> None:
    assert [found for path in others() for found in compared_policies(path)] == []


def test_the_owners_name_each_policy() -> None:
    found = {text.split()[-1] for path in OWNERS for text in named_policies(path)}
    assert found == NAMES


def test_each_other_meaning_is_there() -> None:
    missing = [
        f"{file} {name}"
        for name, files in OTHER_MEANINGS.items()
        for file in files
        if not any(isinstance(n, ast.Constant) and n.value == name for n in ast.walk(parse(PACKAGE / file)))
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "names", "records"),
    [
        ("again = 1 if plan.recompute == 'none' else 2", ["none"], []),
        ("options = ('full', 'selective')", ["full", "selective"], []),
        ("why = 'as host does'", [], []),
        ("again = plan.recompute != KEEP.name", [], ["KEEP"]),
        ("update = {'weights': HOST.name}", [], []),
    ],
)
def test_a_name_is_seen(tmp_path: Path, text: str, names: list[str], records: list[str]) -> None:
    path = tmp_path / "some.py"
    path.write_text(text, encoding="utf-8")
    assert [found.split()[-1] for found in named_policies(path)] == names
    assert [found.split()[-1] for found in compared_policies(path)] == records
