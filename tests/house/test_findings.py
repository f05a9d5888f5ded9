"""What the planner says is data, and only report/ and cli/ make sentences; nothing reads a sentence back."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

import pytest

from house import PACKAGE, parse, sources

# Attributes that hold findings, and functions that word them.
FINDINGS = {"why", "reasons", "rejections", "limited_by", "margins", "effects", "sure", "refused"}
WORDING = {"sentence", "sentences", "advised", "next_step", "refusal_text"}
# What reads a text.
TEXT_METHODS = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition"),
    *("find", "index", "replace", "splitlines", "strip"),
}
# Characters of prose in one f-string: more is a sentence.
MOST_PROSE = 40
# Packages that may import ir/plan.py for what a plan says.
KNOW_PLANS = ("ir", "planner", "report", "train", "api", "cli", "demo")
# The numbers of NoFeasiblePlan are long enough for functions of their own; why devices idled is worded
# beside its figures, since the engine prints it without report/.
ERROR_TEXTS = {"planner/fit/nearest.py", "planner/advice/utilisation.py"}
ERRORS = {
    node.name
    for node in ast.walk(parse(PACKAGE / "errors" / "__init__.py"))
    if isinstance(node, ast.ClassDef)
}


def reads_finding(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is, or is made from, findings or their words."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr in FINDINGS:
            return True
        if isinstance(inner, ast.Name) and inner.id in names | WORDING:
            return True
    return False


def bound_names(tree: ast.AST) -> set[str]:
    """Names that loops, comprehensions and assignments bind to findings or to their words."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.comprehension, ast.For)):
            source, targets = node.iter, [node.target]
        elif isinstance(node, ast.Assign):
            source, targets = node.value, node.targets
        else:
            continue
        if reads_finding(source, set()):
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return names


def parsed_sentences(tree: ast.AST) -> Iterator[int]:
    """Lines in which a sentence is searched, sliced or matched, function by function."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        names = bound_names(function)
        for node in ast.walk(function):
            if _parses(node, names):
                yield node.lineno  # pyright: ignore[reportAttributeAccessIssue]


def _parses(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        by_regex = isinstance(owner, ast.Name) and owner.id == "re"
        if by_regex:
            return any(reads_finding(argument, names) for argument in node.args)
        return node.func.attr in TEXT_METHODS and reads_finding(owner, names)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        text = isinstance(node.left, (ast.Constant, ast.JoinedStr))
        return text and reads_finding(node.comparators[0], names)
    # A place in `why` has no meaning: its kind has.
    sliced = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute)
    return sliced and node.value.attr in FINDINGS  # pyright: ignore[reportAttributeAccessIssue]


def prose(tree: ast.AST) -> Iterator[int]:
    """Lines of f-strings that are sentences and no part of an error."""
    exempt: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _name(node.func) in ERRORS):
            exempt |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in exempt:
            words = "".join(part.value for part in node.values if isinstance(part, ast.Constant))
            if len(words) > MOST_PROSE:
                yield node.lineno


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def spots(folders: Iterable[str], rule: Callable[[ast.AST], Iterator[int]]) -> set[str]:
    """The places below packages that break a rule."""
    paths = [path for folder in folders for path in sources(PACKAGE / folder)]
    lines = ((path.relative_to(PACKAGE).as_posix(), line) for path in paths for line in rule(parse(path)))
    return {f"{name}:{line}" for name, line in lines if name not in ERROR_TEXTS}


def test_nothing_parses_a_sentence() -> None:
    assert spots(KNOW_PLANS, parsed_sentences) == set()


def test_the_planner_makes_no_sentences() -> None:
    assert spots(["planner"], prose) == set()


@pytest.mark.parametrize(
    "code",
    [
        'return any(why.startswith("not ") for why in plan.why)',
        'return [re.search("with (.*) microbatch", reason) for reason in plan.why]',
        'return "gpipe" in plan.expected.limited_by',
        "return plan.why[2:]",
        'told = sentence(plan.expected.limited_by)\n    return told.removeprefix("limited by ")',
        'for text in sentences(plan.reasons):\n        print(text.split(":"))',
    ],
)
def test_a_parsed_sentence_is_seen(code: str) -> None:
    assert list(parsed_sentences(ast.parse(f"def rule(plan):\n    {code}\n")))


def test_data_is_no_sentence() -> None:
    code = "def rule(plan):\n    return [r.stage for r in plan.why if r.code == 'slowest-stage']\n"
    assert list(parsed_sentences(ast.parse(code))) == []


def test_a_sentence_in_the_planner_is_seen() -> None:
    told = 'f"stage {stage} sets the pace, with much more than an even share of the work"'
    assert list(prose(ast.parse(f"reason = {told}"))) == [1]
    assert list(prose(ast.parse(f"raise BadOption({told})"))) == []
    assert list(prose(ast.parse("name = f'{family}:{rank}'"))) == []
