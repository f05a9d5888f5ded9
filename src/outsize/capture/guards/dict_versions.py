"""Tells in which dicts something was set since the last look, without looking at their items.

    versions = DictVersions([vars(module), module._parameters])
    versions.written()   # []: whatever was found in them before is still there
    module.scale = 2.0
    versions.written()   # [vars(module)]: its items have to be compared

A model of 80 layers has 2,000 guarded items in 600 dicts, and comparing each before each step takes three
times as long as asking each dict for its version. Python numbers every change of a dict (PEP 509); torch's
compiled guards read that number, and from Python 3.12 on count changes by a watcher of their own
(torch/csrc/dynamo/guards.cpp). Where this version of torch or Python has no such number, or one that does not
follow the ways of setting an item that are tried here, every dict counts as written: all items are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final


@final
class DictVersions:
    """The dicts that are asked, each once, and their versions at the last `renew`."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts = list({id(each): each for each in dicts}.values())
        self._versions: list[int] = []
        self.renew()

    def renew(self) -> None:
        """Counts from now on."""
        if _version_of is not None:
            self._versions = list(map(_version_of, self._dicts))

    def written(self) -> list[dict[Any, Any]]:
        """Returns the dicts in which something may have been set since `renew`."""
        if _version_of is None:
            return self._dicts
        now = list(map(_version_of, self._dicts))
        if now == self._versions:
            return []
        rows = zip(self._dicts, self._versions, now, strict=True)
        return [each for each, before, version in rows if before != version]


@final
class _Probe:
    """An object whose attributes are set in every way that there is."""

    first: Any = None


def _follows_writes(version_of: Callable[[dict[Any, Any]], int]) -> bool:
    """Returns whether the number changes with each way of setting an item, and with nothing else."""
    probe = _Probe()
    held: dict[str, Any] = vars(probe)
    held["other"] = probe

    def by_statement() -> None:
        probe.first = object()

    ways: list[Callable[[], Any]] = [
        *[by_statement] * 32,  # Python compiles a statement anew that runs often.
        lambda: setattr(probe, "first", 1),
        lambda: object.__setattr__(probe, "first", 2),
        lambda: held.update(first=3),
        lambda: held.__setitem__("first", 4),
        lambda: held.pop("first"),
        lambda: held.setdefault("first", 5),
        lambda: delattr(probe, "first"),
        lambda: held.clear(),
    ]
    for way in ways:
        before = version_of(held)
        if before != version_of(held):
            return False
        way()
        if before == version_of(held):
            return False
    return True


def _usable_version() -> Callable[[dict[Any, Any]], int] | None:
    """Returns torch's look at the version of a dict; None where there is none that can be relied on."""
    try:
        from torch._C._dynamo.guards import dict_version  # private: another version may lack it

        return dict_version if _follows_writes(dict_version) else None
    except (ImportError, TypeError, ValueError, RuntimeError):
        return None


_version_of = _usable_version()
