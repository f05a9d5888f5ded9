"""Measures the figures of docs/house.md on one tree or several, side by side, as a Markdown table.

    python benchmarks/house/run.py                                   # this tree
    python benchmarks/house/run.py before=/tmp/old today=.           # two trees, a column for each
    python benchmarks/house/run.py --write before=/tmp/old today=.   # and writes them into docs/house.md

All counts are of the text: by `ast`, by tokens, by regular expressions, by the graph of imports. Two rows run
something of each tree: a training step, of which the files are counted that it passes (step_files.py), and
the help of the command line. README.md beside this file says how each row is counted.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, final

HERE: Final = Path(__file__).resolve().parent
PAGE: Final = HERE.parents[1] / "docs" / "house.md"
BEGIN: Final = "<!-- figures -->"
END: Final = "<!-- end of figures -->"
AXES: Final = {
    "tp": r"\btp\b|tensor_parallel",
    "cp": r"\bcp\b|context_parallel",
    "ep": r"\bep\b|expert",
    "dp_shard": r"\bdp_shard\b|\bshards?\b",
}
AXIS_NAMES: Final = frozenset({"dp_replicate", "dp_shard", "tp", "cp", "ep"})
RECOMPUTE: Final = frozenset({"none", "selective", "full", "offload"})
WEIGHTS: Final = frozenset({"resident", "sharded", "host", "host-optimizer", "host-activations"})
FORM: Final = frozenset({"tape", "modules"})
GOING: Final = [
    *("Pipeline", "PricedModel", "StagePrices", "ChainPartition", "_Listing", "HostedStages", "_Choice"),
    *("_Judge", "_Improved", "SearchProblem", "CostSource", "RankInstruction", "RowStep", "Collectives"),
    *("RowCollectives", "ExpertCollectives", "DividedWeights", "TensorRanks", "ExpertRanks"),
    *("TensorAndExpertRanks", "ContextRanks", "CrewOptions", "ProcessPlace"),
]
# A policy of a stage came as two records, of its activations and of its weights.
COMING: Final = [
    *("Axis", "StagePolicy|ActivationPolicy", "Candidate", "Pricing", "AxisGroup", "RankStep", "RunContext")
]
HARDEST: Final = 20
MOST_METHODS: Final = 25
SLIVER_LINES: Final = 90
BRANCHES: Final = (
    ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.BoolOp, ast.comprehension, ast.match_case
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef
Row = tuple[str, str]


@final
@dataclass(frozen=True)
class Tree:
    """A checkout, whose sources are read and parsed once."""

    root: Path

    @cached_property
    def package(self) -> Path:
        return self.root / "src" / "outsize"

    @cached_property
    def texts(self) -> dict[Path, str]:
        return {path: path.read_text(encoding="utf-8") for path in sorted(self.package.rglob("*.py"))}

    @cached_property
    def parsed(self) -> dict[Path, ast.Module]:
        return {path: ast.parse(text) for path, text in self.texts.items()}

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Module name -> its file."""
        return {self._module(path): path for path in self.texts}

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.root / "src").with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imported(self, tree: ast.Module) -> set[str]:
        """The modules of the package that a file imports, wherever in it."""
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found & set(self.modules)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
        """Every node of these kinds, with its file."""
        for path, tree in self.parsed.items():
            for node in ast.walk(tree):
                if isinstance(node, kinds):
                    yield path, node

    def functions(self) -> Iterator[tuple[Path, Function]]:
        for path, node in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            assert isinstance(node, Function)
            yield path, node

    def classes(self) -> Iterator[ast.ClassDef]:
        for _, node in self.nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            yield node


# -- size ---------------------------------------------------------------------------------------------------


def size(tree: Tree) -> Iterator[Row]:
    """Lines and files of each room, and of all."""
    rooms: dict[str, list[int]] = defaultdict(list)
    for path, text in tree.texts.items():
        parts = path.relative_to(tree.package).parts
        rooms[parts[0] if len(parts) > 1 else "(top)"].append(len(text.splitlines()))
    for room, lines in sorted(rooms.items()):
        yield f"`{room}`: lines in files", f"{sum(lines):,} in {len(lines)}"
    everything = [count for lines in rooms.values() for count in lines]
    yield "**the package**: lines in files", f"{sum(everything):,} in {len(everything)}"
    outside = [path for path in tree.texts if {"ops", "demo"} & set(path.relative_to(tree.package).parts)]
    rest = sum(everything) - sum(len(tree.texts[path].splitlines()) for path in outside)
    yield "... without `ops` and the demo: lines", f"{rest:,}"
    tests = [path.read_text(encoding="utf-8") for path in (tree.root / "tests").rglob("*.py")]
    yield "`tests`: lines", f"{sum(len(text.splitlines()) for text in tests):,}"


# -- choices ------------------------------------------------------------------------------------------------


def choices(tree: Tree) -> Iterator[Row]:
    """How far the choices of a plan are spread: axes by their words, policies by what is compared."""
    for axis, pattern in AXES.items():
        found = sum(bool(re.search(pattern, text)) for text in tree.texts.values())
        yield f"axis `{axis}`: files in which it stands", str(found)
    yield "an axis (but pp) named in a string: lines in files", spread(axis_strings(tree))
    yield "an axis (but pp) read off a mesh, `axes.tp`: lines in files", spread(axis_reads(tree))
    for name, values in (("recompute", RECOMPUTE), ("weights", WEIGHTS), ("form", FORM)):
        lines = compared(tree, values)
        yield f"`{name}` compared with a literal: lines in files", spread(lines)
    yield (
        "policies (recompute and weights) compared: lines in files",
        spread(compared(tree, RECOMPUTE | WEIGHTS)),
    )
    names = {node.name for node in tree.classes()}
    yield "nouns that were to go, and are there", f"{sum(name in names for name in GOING)} of {len(GOING)}"
    came = sum(not names.isdisjoint(name.split("|")) for name in COMING)
    yield "nouns that were to come, and are there", f"{came} of {len(COMING)}"


def axis_strings(tree: Tree) -> set[tuple[Path, int]]:
    """The lines on which a string is the name of an axis, but those of the records and of foreign words."""
    found: set[tuple[Path, int]] = set()
    for path, node in tree.nodes(ast.Constant):
        assert isinstance(node, ast.Constant)
        at_home = path.parent.name == "axes" or path.name in ("words.py", "old_spellings.py")
        if node.value in AXIS_NAMES and not at_home:
            found.add((path, node.lineno))
    return found


def axis_reads(tree: Tree) -> set[tuple[Path, int]]:
    """The lines on which the size of an axis is read as an attribute of axes."""
    found: set[tuple[Path, int]] = set()
    for path, node in tree.nodes(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        owner = ast.unparse(node.value)
        if node.attr in AXIS_NAMES and owner.rpartition(".")[2] == "axes":
            found.add((path, node.lineno))
    return found


def compared(tree: Tree, values: frozenset[str]) -> set[tuple[Path, int]]:
    """The lines on which something is compared with one of these strings."""
    found: set[tuple[Path, int]] = set()
    for path, node in tree.nodes(ast.Compare, ast.MatchValue):
        inside = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
        if any(value in values for value in inside if isinstance(value, str)):
            found.add((path, getattr(node, "lineno", 0)))
    return found


def spread(lines: set[tuple[Path, int]]) -> str:
    """`84 in 38`: so many lines in so many files."""
    return f"{len(lines)} in {len({path for path, _ in lines})}"


# -- interfaces ---------------------------------------------------------------------------------------------


def interfaces(tree: Tree) -> Iterator[Row]:
    """What a caller has to know: keywords, options of the command line, methods."""
    options = keys_of_options(tree)
    # With `plan`, which is named. `outsize.parallelize` had those of who observes the run, too.
    yield "keywords of `parallelize`", str(1 + max(options["ParallelizeOptions"], options["RunOptions"]))
    yield "keywords of `plan`", str(options["PlanOptions"])
    run = [
        len(f.args.args)
        for path, f in tree.functions()
        if f.name == "run" and path.parts[-2:] == ("verbs", "run.py")
    ]
    yield "parameters of `outsize run`", str(max(run, default=0))
    methods = {node.name: methods_of(node) for node in tree.classes()}
    yield "`Engine`: public methods", str(sum(not name.startswith("_") for name in methods["Engine"]))
    many = {name: len(found) for name, found in methods.items() if len(found) > MOST_METHODS}
    yield f"classes of more than {MOST_METHODS} methods", str(len(many))
    largest = sorted(many.items(), key=lambda item: -item[1])[:5]
    yield "the largest", ", ".join(f"`{name}` {count}" for name, count in largest)
    yield "calls that unpack a local tuple", str(sum(map(unpacked_tuples, (f for _, f in tree.functions()))))
    yield (
        "parameters that are anonymous tuples",
        str(sum(map(tuple_parameters, (f for _, f in tree.functions())))),
    )


def keys_of_options(tree: Tree) -> dict[str, int]:
    """Class of keyword arguments (`PlanOptions`) -> how many keys it has, with those of its bases."""
    own: dict[str, tuple[int, list[str]]] = {}
    for node in tree.classes():
        if node.name.endswith("Options"):
            fields = sum(isinstance(line, ast.AnnAssign) for line in node.body)
            own[node.name] = fields, [ast.unparse(base) for base in node.bases]

    def every(name: str) -> set[str]:
        return {name}.union(*(every(base) for base in own.get(name, (0, []))[1]))

    found = {name: sum(own[base][0] for base in every(name) if base in own) for name in own}
    return defaultdict(int, found)


def methods_of(node: ast.ClassDef) -> list[str]:
    return [line.name for line in node.body if isinstance(line, Function)]


def unpacked_tuples(function: Function) -> int:
    """`parts = a, b, c` and then `f(*parts)`: arguments that no record names."""
    local = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    starred = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Starred)]
    return sum(isinstance(value, ast.Name) and value.id in local for value in starred)


def tuple_parameters(function: Function) -> int:
    """`pair: tuple[int, str]`: two parameters or more in one."""
    annotations = [arg.annotation for arg in (*function.args.args, *function.args.kwonlyargs)]
    return sum(is_anonymous_tuple(annotation) for annotation in annotations)


def is_anonymous_tuple(annotation: ast.expr | None) -> bool:
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return False
    inside = annotation.slice
    return isinstance(inside, ast.Tuple) and "..." not in map(ast.unparse, inside.elts)


# -- structure ----------------------------------------------------------------------------------------------


def structure(tree: Tree) -> Iterator[Row]:
    """The graph of imports, the owner of CUDA, and the files that a step passes."""
    users: dict[str, int] = defaultdict(int)
    for module in tree.parsed.values():
        for name in tree.imported(module):
            users[name] += 1
    files = [name for name, path in tree.modules.items() if path.name != "__init__.py"]
    single = [name for name in files if users[name] == 1]
    slivers = [name for name in single if len(tree.texts[tree.modules[name]].splitlines()) < SLIVER_LINES]
    yield "files with one importer", str(len(single))
    yield f"... of fewer than {SLIVER_LINES} lines", str(len(slivers))
    tests = [ast.parse(path.read_text(encoding="utf-8")) for path in (tree.root / "tests").rglob("*.py")]
    reached = set[str]().union(*map(tree.imported, tests))
    yield "modules that tests import", str(len(reached.intersection(files)))
    cuda = sum("torch.cuda" in text for text in tree.texts.values())
    yield "files that name `torch.cuda`", str(cuda)
    yield (
        "files that `engine.step` passes (third step, two stages in one process)",
        printed(tree, step_command()),
    )
    for line in ("", "run "):
        helped = printed(tree, [sys.executable, "-c", HELP, *line.split(), "--help"]).split()
        yield f"`outsize {line}--help`: lines of 80 columns", helped[0]
        if line:
            yield f"`outsize {line}--help`: flags that it shows, but `--help`", helped[1]


HELP: Final = """
import io, re, sys, contextlib
from outsize.cli import app
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    app.run(sys.argv[1:])
lines = out.getvalue().splitlines()
flags = {found[1] for line in lines if (found := re.match("│ [*]? *(--?[a-z-]+)", line))}
print(len(lines), len(flags - {"--help"}))
"""


def step_command() -> list[str]:
    return [sys.executable, str(HERE / "step_files.py")]


def printed(tree: Tree, command: list[str]) -> str:
    """The last line that a program prints with the package of this tree; `?` where it fails."""
    settings = [f"PYTHONPATH={tree.root / 'src'}", "COLUMNS=80", "OMP_NUM_THREADS=1"]
    done = subprocess.run(["env", *settings, *command], capture_output=True, text=True, check=False)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines[-1] if lines and done.returncode == 0 else "?"


# -- prose --------------------------------------------------------------------------------------------------


def prose(tree: Tree) -> Iterator[Row]:
    """Comments by room and in the hardest files, and the papers of the house."""
    comments = {path: comment_lines(text) for path, text in tree.texts.items()}
    rooms: dict[str, list[Path]] = defaultdict(list)
    for path in tree.texts:
        rooms[path.relative_to(tree.package).parts[0]].append(path)
    yield "lines with a comment: the package", share(tree, comments, tree.texts)
    for room in sorted(room for room, paths in rooms.items() if len(paths) > 1):
        yield f"... `{room}`", share(tree, comments, rooms[room])
    hardest = sorted(tree.parsed, key=lambda path: -branches(tree.parsed[path]))[:HARDEST]
    yield f"... the {HARDEST} files of most branches", share(tree, comments, hardest)
    pages = [path for path in (tree.root / "docs" / "decisions").glob("*.md") if path.name[:4].isdigit()]
    index = tree.root / "docs" / "decisions" / "README.md"
    rooms_pages = list((tree.root / "docs" / "rooms").glob("*.md"))
    yield "pages in the archive of decisions", str(len(pages))
    yield "... with a status in an index", "all" if index.exists() else "0"
    yield "pages of rooms", str(len(rooms_pages))
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md"):
        yield f"{name}: lines", lines_of(tree.root / name)
    long = [path for path in (tree.root / "docs").glob("*.md") if int(lines_of(path)) > 250]
    yield "pages of docs above 250 lines", str(len(long))


def comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def share(tree: Tree, comments: dict[Path, int], paths: Iterable[Path]) -> str:
    """`1.2 %`: lines with a comment by all lines of these files."""
    paths = list(paths)
    lines = sum(len(tree.texts[path].splitlines()) for path in paths)
    return f"{100 * sum(comments[path] for path in paths) / lines:.1f} %"


def branches(tree: ast.Module) -> int:
    return sum(isinstance(node, BRANCHES) for node in ast.walk(tree))


def lines_of(path: Path) -> str:
    return str(len(path.read_text(encoding="utf-8").splitlines())) if path.exists() else "0"


# -- the table ----------------------------------------------------------------------------------------------

TABLES: Final[dict[str, Callable[[Tree], Iterator[Row]]]] = {
    "Size": size,
    "Choices": choices,
    "Interfaces": interfaces,
    "Structure": structure,
    "Prose": prose,
}


def table(title: str, names: list[str], columns: list[dict[str, str]]) -> str:
    """A Markdown table with a column for each tree; a figure that a tree has not is a dash."""
    rows = dict.fromkeys(row for column in reversed(columns) for row in column)
    lines = [f"| {title} | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    lines += [f"| {row} | {' | '.join(column.get(row, '-') for column in columns)} |" for row in rows]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    writes = "--write" in arguments
    named = [argument.partition("=") for argument in arguments if argument != "--write"]
    named = named or [("today", "=", str(HERE.parents[1]))]
    trees = [Tree(Path(path).resolve()) for _, _, path in named]
    tables = []
    for title, figures in TABLES.items():
        columns = [dict(figures(tree)) for tree in trees]
        tables.append(table(title, [name for name, _, _ in named], columns))
    print("\n\n".join(tables))
    if writes:
        before, mark, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest[rest.index(END) :]
        PAGE.write_text(before + mark + "\n" + "\n\n".join(tables) + "\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
