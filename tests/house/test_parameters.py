"""A function has at most six parameters besides self: more is a noun that is missing (HOUSE.md, rule 4)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from house import PACKAGE, parse, sources

MOST = 6
# A verb's parameters are its options, which typer reads.
VERBS = PACKAGE / "cli" / "verbs"
# These have the signature of a class or function of torch, which users know.
AS_IN_TORCH = {
    "ColumnParallelLinear.__init__",  # nn.Linear
    "RowParallelLinear.__init__",  # nn.Linear
    "ContextParallelGroup.attention",  # functional.scaled_dot_product_attention
    "TensorParallelGroup.attention",  # functional.scaled_dot_product_attention
    "ReplicaBatches.__init__",  # utils.data.DistributedSampler
}


def crowded(path: Path) -> Iterator[str]:
    """Yields the functions of a file that have more parameters, as `Class.function`."""
    return _crowded(parse(path), "")


def _crowded(node: ast.AST, inside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        name = f"{inside}{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef) else ""
        if isinstance(child, ast.FunctionDef):
            every = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
            own = [argument for argument in every if argument.arg not in ("self", "cls")]
            if len(own) > MOST:
                yield name
        yield from _crowded(child, f"{name}." if name else inside)


def test_six_parameters_are_enough() -> None:
    names = [name for path in sources(PACKAGE) if VERBS not in path.parents for name in crowded(path)]
    assert sorted(names) == sorted(AS_IN_TORCH)


def test_the_law_can_be_broken(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    six, seven = "a, b, c, d, e, f", "a, b, c, *, d, e, f, g"
    path.write_text(
        f"class A:\n    def f(self, {six}): ...\n    def g(self, {seven}): ...\n", encoding="utf-8"
    )
    assert list(crowded(path)) == ["A.g"]
