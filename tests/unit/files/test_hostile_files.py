"""Files from strangers are read or refused: with the file and the line or field, at once, and never run."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import hostile_files
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import BadOption, BadPlan, BadWeights, OutsizeError
from outsize.files.strict_json import BadJson, parse
from outsize.ir.cluster import parse_cluster
from outsize.ir.plan import Plan
from outsize.ir.profile import ProfileSet
from outsize.run.weights.safetensors import WeightFiles

PLAN = hostile_files.valid("plan", Random(1))
PROFILE = hostile_files.valid("profile", Random(1))


@given(kind=st.sampled_from(sorted(hostile_files.KINDS)), draw=st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_a_changed_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, kind: str, draw: Random
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    folder.mkdir(exist_ok=True)
    hostile_files.try_one(kind, hostile_files.hostile(kind, draw), folder)


def test_valid_files_are_read(tmp_path: Path) -> None:
    for kind in hostile_files.KINDS:
        document = hostile_files.valid(kind, Random(3))
        raw = document if isinstance(document, str) else json.dumps(document)
        (tmp_path / "hostile_files.py").write_bytes(b"")
        if kind != "manifest":
            assert hostile_files.try_one(kind, raw.encode(), tmp_path), kind


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "rm -rf"}, "optimizer: String should match pattern"),
        ({"microbatches": -1}, "microbatches: Input should be greater than or equal to 1"),
        ({"batch_size": "8"}, "batch_size: Input should be a valid integer"),
        ({"batch_size": True}, "batch_size: Input should be a valid integer"),
        ({"stages": [{"units": ["h"], "device": "two words"}]}, "stages.0.device: String should match"),
    ],
)
def test_nonsense_in_a_plan_is_refused_with_its_field(tmp_path: Path, change: Any, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN, **change}))
    with pytest.raises(BadPlan, match=f"plan.json is no plan; {said}"):
        Plan.load(path)


@pytest.mark.parametrize("seconds", ["-1.0", "NaN", "1e999", "Infinity"])
def test_seconds_of_a_profile_are_finite_and_not_negative(tmp_path: Path, seconds: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE).replace("0.001", seconds, 1))
    with pytest.raises(BadOption, match=r"profile.json is no profile; "):
        ProfileSet.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1,\n "a": 2}', "lines 1, 2: the key 'a' stands twice"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1e999}', "the number 1e999 is too large"),
        ("[" * 70 + "]" * 70, "more than 64 brackets"),
        ("[" * 100_000, "more than 64 brackets"),
        ('{"a":\n oops}', "line 2 column 2: Expecting value"),
        (b'{"a":\n "\xff"}', "line 2: the byte 0xff is no UTF-8"),
        ("9" * 5000, "integer string conversion"),
    ],
    ids=range(8),
)
def test_json_that_no_writer_means_is_refused(text: str | bytes, said: str) -> None:
    with pytest.raises(BadJson, match=said):
        parse(text)


@pytest.mark.parametrize("name", ["1000000xcpu", "99999999999999999999xcpu", "2x" + "9" * 400 + "gb"])
def test_a_cluster_has_a_size_that_exists(name: str) -> None:
    with pytest.raises(OutsizeError):
        parse_cluster(name)


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "..", "", "a/b", "x" * 300])
def test_an_index_names_files_beside_it(tmp_path: Path, file: str) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(BadWeights, match="is no file beside the index"):
        WeightFiles(tmp_path / "index.json")
