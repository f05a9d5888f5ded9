"""Nobody sets attributes of another's objects: they change by a method of their class, or were arguments.

So whoever reads a class sees all that can happen to its objects. A record may be written by what is beside it
in its file, which is one idea. Objects of Python and torch are none of ours: anybody sets a gradient.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from house import PACKAGE, parse, sources

# Tensors are torch's, and `ctx` is the context of one of its autograd functions.
OF_TENSORS = {"grad", "data", "requires_grad"}
CONTEXT = "ctx"
# Attributes of others' objects that are named like some of ours, by the file that sets them.
OF_OTHERS = {
    # Functions and modules of Python, and what runs a script.
    "capture/models/torchvision_operators.py": {"loader"},
    "ops/launch/worker.py": {"argv"},
    "program/generate.py": {"source"},
    "train/world/local_ranks.py": {"argv"},
    # The program's own record of a thread, and generators of NumPy.
    "capture/guards/consumed.py": {"state"},
    "capture/recording/intercept.py": {"function"},
    "train/checkpoint/loop/generators.py": {"state"},
    # Modules, graphs and optimizers of torch.
    "capture/graph/shortened.py": {"_modules"},
    "capture/recording/python_random.py": {"seed"},
    "capture/recording/weight_cache.py": {"_cache"},
    "ops/doctor/models.py": {"weight"},
    "run/stage/batchnorm.py": {"forward"},
    "run/stage/seeded_draws.py": {"meta"},
    "run/weights/freed.py": {"__class__"},
    "train/checkpoint/optimizers/optimizer_states.py": {"param_groups", "state"},
    "train/optimizers/owned_step.py": {"step"},
    "train/split/optimizers.py": {"param_groups"},
    "train/tensor_parallel.py": {"forward"},
    "train/world/world.py": {"_world"},
    # Elements of XML, Lightning's rank and the configuration of torchrun.
    "integrations/lightning_parts/processes.py": {"rank"},
    # What a Trainer of transformers has: its Accelerator, its callbacks, and its class.
    "integrations/trainer_parts/observed.py": {"callbacks"},
    "integrations/transformers.py": {"__class__"},
    "ops/launch/launch.py": {"nproc_per_node"},
    "report/html/cells.py": {"text"},
    "report/html/svg.py": {"text"},
}


@cache
def attributes_of_classes(tree: ast.Module) -> set[str]:
    """Returns the names of the attributes that objects of a file's classes have."""
    found = set[str]()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for line in kind.body:
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
            decorators = line.decorator_list if isinstance(line, ast.FunctionDef) else []
            found |= {
                ast.unparse(one).partition(".setter")[0]
                for one in decorators
                if ".setter" in ast.unparse(one)
            }
        found |= {node.attr for node in sets_in(kind) if ast.unparse(node.value) == "self"}
    return found


def sets_in(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yields each attribute that is assigned or deleted in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def set_from_outside(paths: Iterable[Path], of_others: Mapping[str, set[str]]) -> list[str]:
    """Returns `file:line target` of each attribute of an object of ours that another file sets."""
    trees = {path: parse(path) for path in paths}
    owned = {path: attributes_of_classes(tree) for path, tree in trees.items()}
    known = set[str]().union(*owned.values()) - OF_TENSORS
    others = {path: known - own - of_others.get(relative(path), set()) for path, own in owned.items()}
    return [
        f"{relative(path)}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in sets_in(tree)
        if node.attr in others[path]
        if ast.unparse(node.value) not in {"self", "cls", CONTEXT}
    ]


def relative(path: Path) -> str:
    """`run/progress.py`."""
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def test_nobody_sets_anothers_attributes() -> None:
    assert set_from_outside(sources(), OF_OTHERS) == []


def test_each_attribute_of_others_is_set() -> None:
    found = {
        line.partition(":")[0] + " " + line.rpartition(".")[2] for line in set_from_outside(sources(), {})
    }
    assert found == {f"{file} {name}" for file, names in OF_OTHERS.items() for name in names}


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("def f(progress):\n    progress.runner = None", True),
        ("def f(engine):\n    engine.progress.step += 1", True),
        ("def f(one):\n    one.step, other = 1, 2", True),
        ("def f(one):\n    del one.absent", True),
        ("class A:\n    def f(self):\n        self.runner = None", False),
        ("class A:\n    runner = None\ndef f(a):\n    a.runner = 1", False),
        ("def f(ctx):\n    ctx.runner = 1", False),
        ("def f(p):\n    p.grad = None", False),
        ("def f(progress):\n    progress.runs(None)", False),
    ],
)
def test_a_plant_is_found(tmp_path: Path, text: str, is_wrong: bool) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(text, encoding="utf-8")
    found = set_from_outside([PACKAGE / "run" / "progress.py", planted], {})
    assert bool(found) is is_wrong
