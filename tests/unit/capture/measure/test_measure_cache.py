"""The folder of kept unit times: what is saved is found, what is broken is ignored with a warning."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from outsize.capture.measure.cache import Environment, ProfileCache, Timing

HERE = Environment(device="some CPU", torch="2.13", threads=1)


def timing(forward_s: float) -> Timing:
    return Timing(forward_s=forward_s, backward_input_s=2.0, backward_weight_s=3.0, spread_s=0.1)


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "made" / "late", HERE)


def test_an_empty_cache_is_silent_and_makes_no_folder(cache: ProfileCache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load() == {}
    assert not cache.path.parent.exists()


def test_what_is_saved_is_found_and_added_to(cache: ProfileCache) -> None:
    cache.save({"a": timing(1.0), "b": timing(2.0)})
    cache.save({"b": timing(5.0), "c": timing(3.0)})
    assert cache.load() == {"a": timing(1.0), "b": timing(5.0), "c": timing(3.0)}
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]


@pytest.mark.parametrize("change", [{"device": "other CPU"}, {"torch": "2.14"}, {"threads": 2}])
def test_another_environment_sees_nothing(cache: ProfileCache, change: dict[str, object]) -> None:
    cache.save({"a": timing(1.0)})
    assert ProfileCache(cache.path.parent, HERE.model_copy(update=change)).load() == {}


def broken(text: str, **changes: object) -> str:
    return json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "\x00\xff",
        lambda text: broken(text, version=0),
        lambda text: broken(text, timings={"a": {"forward_s": -1}}),
        lambda text: text.replace("2.0", "NaN", 1),
        lambda text: broken(text, environment={"device": "x", "torch": "y", "threads": 1}),
    ],
)
def test_a_broken_file_is_ignored_with_a_warning_and_replaced(
    cache: ProfileCache, change: Callable[[str], str]
) -> None:
    cache.save({"a": timing(1.0)})
    cache.path.write_text(change(cache.path.read_text()))
    with pytest.warns(UserWarning, match="are not used"):
        assert cache.load() == {}
    cache.save({"b": timing(2.0)})
    assert cache.load() == {"b": timing(2.0)}


def test_bytes_that_are_no_text(cache: ProfileCache) -> None:
    cache.save({})
    cache.path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="are not used"):
        assert cache.load() == {}


def test_a_place_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProfileCache(tmp_path / "file" / "folder", HERE)
    with pytest.warns(UserWarning, match="not kept"):
        cache.save({"a": timing(1.0)})
