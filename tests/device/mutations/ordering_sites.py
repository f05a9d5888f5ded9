"""Every wait, event and `record_stream` of outsize, found in its source, and outsize without one of them.

    sites()          reads the source: the calls that order the work of devices, communicators and the host
    delete(site)     changes this process's outsize, so that the call is not made
    watch(reached)   changes it, so that the name of each call that is made is added to `reached`

A call is left out, not what it is called on: `queue.popleft().wait()` becomes `queue.popleft()`. An event
that is not recorded has always passed. A wait whose result is used is no site: it is no order but a value.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, final

import torch

import outsize
from outsize.device import streams

ROOT: Final = Path(outsize.__file__).parent
PACKAGES: Final = ("device", "run", "train", "capture")
"""What works with devices; the floors above measure and print."""
LAUNCH: Final = ROOT / "train" / "launch"
"""Waits for processes, and for no device."""
ORDERS: Final = frozenset({"after", "wait", "wait_event", "wait_stream", "synchronize", "record_stream"})
EVENTS: Final = frozenset({"record", "record_event"})
NOTE: Final = "# Not simulated:"
"""Begins the comment above a call that the simulated device cannot need; it says why the call stays."""


@final
@dataclass(frozen=True)
class Site:
    """A call: its module, its function, and how many such calls of one name the function has before it."""

    module: str
    function: str
    number: int
    call: str
    note: str

    @property
    def name(self) -> str:
        """For example `run.host.copy_lane CopyLane.fetch after 2`."""
        place = f"{self.module.removeprefix('outsize.')} {self.function} {self.call}"
        return f"{place} {self.number + 1}" if self.number else place


def sites() -> list[Site]:
    """Returns all sites, in the order of modules and lines."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [
        site
        for path in paths
        if LAUNCH not in path.parents
        for site, _ in _sites_of(path, ast.parse(path.read_text()))
    ]


def delete(site: Site) -> None:
    """Leaves out the call."""
    _rewrite(site.module, lambda found, node: _without(node) if found == site else node)


def watch(reached: set[str]) -> None:
    """Adds the name of a site to `reached` whenever the call is made."""

    def marked(site: Site, node: Any) -> ast.AST:
        mark = ast.Call(ast.Name("__reached__", ast.Load()), [ast.Constant(site.name)], [])
        if isinstance(node, ast.Expr):
            return ast.Expr(ast.Tuple([mark, node.value], ast.Load()))
        return ast.Subscript(ast.Tuple([mark, node], ast.Load()), ast.Constant(1), ast.Load())

    for name in dict.fromkeys(site.module for site in sites()):
        vars(import_module(name))["__reached__"] = reached.add
        _rewrite(name, marked)


# -- reading -------------------------------------------------------------------------------------------------


def _sites_of(path: Path, tree: ast.Module) -> Iterator[tuple[Site, ast.AST]]:
    module = ".".join(("outsize", *path.relative_to(ROOT).with_suffix("").parts))
    lines = path.read_text().splitlines()
    for function, body in _functions(tree):
        calls = sorted((node for node in ast.walk(body) if _orders(node)), key=lambda node: node.lineno)
        before = list[str]()
        for node in calls:
            name = _called(node)
            yield Site(module, function, before.count(name), name, _note(lines, node.lineno)), node
            before.append(name)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods; what is defined in one belongs to it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef))


def _call_of(node: Any) -> ast.Call | None:
    """The call that an expression is, or a statement or a lambda that is nothing else."""
    if isinstance(node, ast.Expr):
        node = node.value
    elif isinstance(node, ast.Lambda):
        node = node.body
    return node if isinstance(node, ast.Call) else None


def _called(node: Any) -> str:
    call = _call_of(node)
    return "" if call is None else getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def _orders(node: Any) -> bool:
    """Whether a node is a site. A wait with a limit of time orders nothing, a function records no event."""
    call = _call_of(node)
    if call is None or len(call.args) > 1:
        return False
    is_event = _called(node) in EVENTS and isinstance(call.func, ast.Attribute)
    if isinstance(node, ast.Expr | ast.Lambda):
        return _called(node) in ORDERS or (is_event and bool(call.args))
    return is_event and not call.args


def _note(lines: list[str], line: int) -> str:
    """The comment above a line, where it says why the simulated device cannot need the call."""
    first = line - 1
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
    text = " ".join(each.strip().removeprefix("# ") for each in lines[first : line - 1])
    return text.removeprefix(NOTE.removeprefix("# ")).strip() if f"# {text}".startswith(NOTE) else ""


# -- changing ------------------------------------------------------------------------------------------------


def _without(node: Any) -> ast.AST:
    """What is left of a site when its call is not made."""
    if isinstance(node, ast.Lambda):
        return ast.Lambda(node.args, ast.Constant(None))
    if isinstance(node, ast.Expr):
        call: Any = node.value
        receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        return ast.Expr(ast.Tuple([*receiver, *call.args], ast.Load()))
    passed = ast.Name("__passed__", ast.Load())
    return ast.Call(passed, [node.func.value, ast.Constant(node.func.attr)], [])


def _passed(_: object, call: str) -> Any:
    """An event that was never recorded: of torch, or of outsize's streams."""
    if call == "record_event":
        return torch.Event(torch.accelerator.current_accelerator())
    return streams._Done()


def _rewrite(name: str, change: Callable[[Site, ast.AST], ast.AST]) -> None:
    """Gives functions of a module the code of a changed source."""
    module = import_module(name)
    path = Path(str(module.__file__))
    tree = ast.parse(path.read_text())
    found = list(_sites_of(path, tree))
    new = {id(node): changed for site, node in found if (changed := change(site, node)) is not node}
    changed_functions = dict.fromkeys(site.function for site, node in found if id(node) in new)
    code = compile(ast.fix_missing_locations(_Exchange(new).visit(tree)), str(path), "exec")
    vars(module)["__passed__"] = _passed
    for function in changed_functions:
        scope, inner = module, code
        *owners, last = function.split(".")
        for owner in owners:
            scope, inner = getattr(scope, owner), _code_in(inner, owner)
        _function(vars(scope)[last]).__code__ = _code_in(inner, last)


def _code_in(code: CodeType, name: str) -> CodeType:
    return next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)


def _function(found: Any) -> FunctionType:
    """The function behind a method, whatever decorates it."""
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    found = getattr(found, "__wrapped__", found)
    assert isinstance(found, FunctionType)
    return found


@final
class _Exchange(ast.NodeTransformer):
    """Puts other nodes in the places of some; what is within a node is changed first."""

    def __init__(self, new: dict[int, ast.AST]) -> None:
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        known = id(node)
        super().visit(node)
        return self._new.get(known, node)


def named(name: str) -> Site:
    """Returns the site of this name. Raises LookupError for a name that is none."""
    for site in sites():
        if site.name == name:
            return site
    raise LookupError(f"no site {name}")
