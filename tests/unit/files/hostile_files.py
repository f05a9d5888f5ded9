"""Files as strangers write them: valid ones of each kind, changed at random. A program for `make fuzz`, too.

    python tests/unit/files/hostile_files.py 1000000        # or COUNT FIRST_SEED

A reader returns a record whose numbers make sense, or raises an OutsizeError, within two seconds.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from outsize.cli.options import schedule_or_file
from outsize.errors import BadPlan, OutsizeError
from outsize.files.sealed_json import seal
from outsize.ir.cluster import parse_cluster
from outsize.ir.cluster_file import load_cluster
from outsize.ir.plan import Axes, Expected, Plan, Stage
from outsize.ir.profile import Profile, ProfileSet, UnitCost
from outsize.ir.units.names import expand
from outsize.run.checkpoint.manifest import Manifest
from outsize.run.weights.safetensors import WeightFiles

LONGEST_S = 2.0
STRANGE: list[Any] = [
    *(-1, 0, 1, 2**31, 2**63, 10**30, -0.5, 1e308, -1e-300, True, False, None, "", "0", "rm -rf"),
    *("../../etc/passwd", "a.0-2000000000", "0-2000000000", "\u202e", "\x1b[2J", "[/x]", "\x00"),
    *([], {}, [[]], {"": {}}, "cuda:99999999999", "1000000xcpu", "9" * 5000, ["0F0"] * 3, [1, 2, 3]),
    *("__import__('os').system('true')", [{}] * 3, "é" * 300),
]
TEXTS = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, '{"a":1,"a":2}', "[" * 5000, "\x00", "'", "//"]


def load_plan(path: Path) -> Any:
    """Reads a plan, and finds its units among those of a model, as everything does that runs it."""
    plan = Plan.load(path)
    units = [f"h.{n}.{part}" for n in range(4) for part in ("a", "b")]
    for stage in plan.stages:
        try:
            expand(stage.units, units)
        except KeyError:
            raise BadPlan("a stage names no unit of the model") from None
    return plan


def load_manifest(path: Path) -> Any:
    return Manifest.load(path.parent)


Loader = Callable[[Path], Any]
KINDS: dict[str, tuple[str, Loader]] = {
    "plan": ("plan.json", load_plan),
    "cluster": ("cluster.json", load_cluster),
    "profile": ("profile.json", ProfileSet.load),
    "schedule": ("rows.csv", lambda path: schedule_or_file(str(path))),
    "manifest": ("manifest.json", load_manifest),
    "weights": ("model.safetensors.index.json", lambda path: WeightFiles(path).names),
    "name": ("", lambda path: parse_cluster(path.read_text(errors="replace"))),
}


def valid(kind: str, draw: Random) -> Any:
    """The document of a valid file: JSON, or text."""
    if kind == "plan":
        stages = tuple(Stage(units=(f"h.{n}",), device=f"cuda:{n}") for n in range(4))
        expected = Expected(step_s=0.5, bubble=0.1, samples_per_s=4.0, stages=(), source="roofline")
        plan = Plan(
            model="m", fingerprint="f", cluster="4xa100-40gb", axes=Axes(pp=4), batch_size=8, microbatches=4,
            schedule=draw.choice(["1f1b", "gpipe"]), stages=stages, expected=expected,
        )  # fmt: skip
        return json.loads(plan.to_json())
    if kind == "cluster":
        whole = json.loads(parse_cluster("2x2xa100-40gb").to_json())
        short = {"devices": ["a100-40gb", {"kind": "t4", "memory_bytes": 1 << 33}], "inner": "pcie4"}
        return draw.choice([whole, short])
    if kind == "profile":
        unit = UnitCost(
            name="h.0", forward_s=1e-3, backward_input_s=1e-3, backward_weight_s=1e-3,
            saved_bytes=10, workspace_bytes=0, flops=5, source="measured",
        )  # fmt: skip
        profile = Profile(fingerprint="f", device="cpu", microbatch_size=2, units=(unit,))
        return json.loads(ProfileSet(model="m", profiles=(profile,)).to_json())
    if kind == "schedule":
        return "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    if kind == "weights":
        return {"metadata": {"total_size": 8}, "weight_map": {"w": "hostile_files.py"}}
    if kind == "name":
        return draw.choice(["2xcpu", "2x8xh100-80gb@4xib400", "4xv100-32gb+4xa100-40gb", "2x12GB"])
    file = "model-00000.safetensors"
    chunks = [{"file": file, "key": "w", "offsets": [n], "sizes": [2], "crc32": 7} for n in (0, 2)]
    return {
        "format": "outsize checkpoint 1",
        "step": 3,
        "files": [{"name": file, "size_bytes": 100}],
        "tensors": {"model/w": {"dtype": "F32", "shape": [4], "chunks": chunks}},
        "values": {"lr": 0.1},
    }


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


def changed(document: Any, draw: Random) -> Any:
    """The document with one value exchanged, removed, doubled or renamed."""
    document = copy.deepcopy(document)
    path = draw.choice(list(places(document)))
    if not path:
        return draw.choice(STRANGE)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    how = draw.randrange(6)
    if how == 0:
        del parent[path[-1]]
    elif how == 1 and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[path[-1]]))
    elif how == 2 and isinstance(parent, dict):
        parent[str(draw.choice(STRANGE))] = parent.pop(path[-1])
    elif how == 3 and isinstance(parent[path[-1]], (int, float)):
        parent[path[-1]] = draw.choice([-1, -1, 10**6, 0.5, 1e-9]) * parent[path[-1]]
    else:
        parent[path[-1]] = draw.choice(STRANGE)
    return document


def damaged(raw: bytes, draw: Random) -> bytes:
    """The bytes with a piece removed, doubled or exchanged."""
    begin = draw.randint(0, len(raw))
    end = draw.randint(begin, min(len(raw), begin + draw.choice([1, 4, 40])))
    strange = draw.choice([*TEXTS, *map(str, STRANGE)]).encode("utf-8", "replace")
    piece = draw.choice([b"", raw[begin:end] * 2, bytes([draw.randrange(256)]), strange])
    return raw[:begin] + piece + raw[end:]


def hostile(kind: str, draw: Random) -> bytes:
    """The bytes of a changed file."""
    document = valid(kind, draw)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 4])):
        document = changed(document, draw) if not isinstance(document, str) else document
    if isinstance(document, str):
        raw = document.encode("utf-8", "replace")
        for _ in range(draw.choice([0, 1, 1, 2, 5])):
            raw = damaged(raw, draw)
        return raw
    if kind == "manifest" and isinstance(document, dict) and draw.random() < 0.8:
        with suppress(ValueError):  # A sealed file has no infinity.
            return seal(document)
    raw = json.dumps(document, indent=draw.choice([None, 2])).encode()
    return damaged(raw, draw) if draw.random() < 0.4 else raw


def nonsense(value: Any) -> str:
    """Says which number of a record makes no sense; empty where all do."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    items = enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, child in value.items() if isinstance(value, dict) else items:
        is_size = isinstance(key, str) and key.endswith(("_s", "_bytes", "_size", "devices", "microbatches"))
        if is_size and isinstance(child, (int, float)) and child < 0:
            return f"{key}: {child}"
        if found := nonsense(child):
            return f"{key}.{found}"
    return ""


def try_one(kind: str, raw: bytes, folder: Path) -> bool:
    """Reads a file; True when it is accepted. Raises AssertionError for what must not happen."""
    name, load = KINDS[kind]
    path = folder / (name or "name")
    path.write_bytes(raw)
    for again in (True, False):
        start = time.process_time()
        try:
            found = load(path)
        except OutsizeError:
            found = None
        seconds = time.process_time() - start
        if seconds < LONGEST_S:
            break
        # A virtual machine counts seconds that other machines have had. A file that hangs does so twice.
        assert again, f"{seconds:.1f} s"
    if found is not None and hasattr(found, "model_dump"):
        trouble = nonsense(found.model_dump())
        assert not trouble, trouble
    return found is not None


def main(cases: int, first: int = 0) -> None:
    """Tries so many files, from a seed on, says which seeds fail, and ends with 1 if one does."""
    accepted = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + cases):
            draw = Random(seed)
            kind = draw.choice(list(KINDS))
            raw = hostile(kind, draw)
            try:
                accepted += try_one(kind, raw, Path(folder))
            except Exception as error:
                failed += 1
                print(f"seed {seed}: {kind}: {type(error).__name__}: {error}; {raw[:200]!r}", flush=True)
            if seed % 50_000 == 49_999:
                print(f"{seed + 1} files, {accepted} accepted, {failed} failures", flush=True)
    print(f"{cases} files, {accepted} accepted, {failed} failures")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
