"""No default path of outsize pickles: what guards the whole suite (unpickled.py) finds what it looks for."""

from __future__ import annotations

import functools
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import unpickled
from forked import on_ranks

ANY_PICKLE = re.compile(
    r"import (c?[pP]ickle|shelve|marshal|dill|cloudpickle)\b"
    r"|(gather|broadcast|scatter|send|recv)_object(_list)?\(|torch\.(save|load)\(|joblib"
)


def as_outsize(file: str, name: str, what: Any, *args: Any) -> Any:
    """Calls `what` from a function of this name in this file of outsize."""
    source = compile(
        f"def {name}(what, args):\n    return what(*args)\n", f"{unpickled.OUTSIZE}/{file}", "exec"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace[name](what, args)


_loaded = functools.partial(torch.load, weights_only=False)  # by default it reads with no Unpickler


def test_pickles_of_outsize_fail_a_test_and_those_of_tests_do_not(tmp_path: Path) -> None:
    data, file = pickle.dumps({1: Path("a")}), tmp_path / "x.pt"
    torch.save([1], file)
    calls = [(pickle.dumps, 1), (pickle.loads, data), (_loaded, file), (torch.save, 1, tmp_path / "y.pt")]
    for what, *arguments in calls[:3]:
        assert what(*arguments)
    for what, *arguments in calls:
        with pytest.raises(unpickled.Pickled, match=r"train/crew/crew.py:gather_spans"):
            as_outsize("train/crew/crew.py", "gather_spans", what, *arguments)


def test_names_taken_before_the_guard_are_watched() -> None:
    import _pickle
    from multiprocessing.reduction import ForkingPickler

    from torch.distributed import distributed_c10d

    data = pickle.dumps(Path("a"))
    readers: list[Any] = [_pickle.loads, getattr(ForkingPickler, "loads"), getattr(pickle, "_loads")]  # noqa: B009
    for loads in readers:
        assert loads(data) == Path("a")
        with pytest.raises(unpickled.Pickled, match=r"is used by run/stage/rng.py:states"):
            as_outsize("run/stage/rng.py", "states", loads, data)
    unpickler: Any = getattr(distributed_c10d, "_unpickler")  # noqa: B009
    with pytest.raises(unpickled.Pickled, match=r"pickle.Unpickler is used by run/stage/rng.py:states"):
        as_outsize("run/stage/rng.py", "states", unpickler, io.BytesIO(data))


def _gathers_objects(group: dist.ProcessGroup) -> str:
    gathered: list[Any] = [None] * group.size()
    try:
        as_outsize("train/crew/crew.py", "gathers", dist.all_gather_object, gathered, Path("a"), group)
    except unpickled.Pickled as error:
        return str(error)
    return "not found"


def test_collectives_of_objects_are_found_in_forks(tmp_path: Path) -> None:
    for said in on_ranks(tmp_path, 2, _gathers_objects):
        assert "is used by train/crew/crew.py:gathers" in said


def test_no_source_names_a_pickle_but_those_allowed() -> None:
    root = Path(unpickled.OUTSIZE)
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if ANY_PICKLE.search(line) and not re.search(r"next_step|^ *#", line)
    }
    assert found == {place.partition(":")[0] for place in unpickled.ALLOWED if place.startswith("train/")}
