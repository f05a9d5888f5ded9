"""What is shipped: the wheel where its base dependencies alone are, the image, the recipe, and the CI file.

The environment is a new venv whose packages are links to those that the wheel asks for, and that these ask
for, so that torch is not installed a second time, and what is not asked for cannot be imported. The judges
of the other files are in `.venv-clusters` (make test-integrations).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
JUDGES = ROOT / ".venv-clusters" / "bin"
BASE = ["numpy", "psutil", "pydantic", "rich", "safetensors", "torch", "typer"]
MODEL = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))
"""

needs_hatchling = pytest.mark.skipif(
    find_spec("hatchling") is None, reason="not installed: hatchling (make test-integrations)"
)
needs_judges = pytest.mark.skipif(
    not (JUDGES / "hadolint").exists(), reason="the judges of files are not here: make test-integrations"
)


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Returns what a command printed."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", "-q", *offline, "--wheel-dir", folder, ".")
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> Distribution:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return type("Metadata", (Distribution,), {"read_text": lambda self, _: text, "locate_file": None})()


def asked_for(package: Distribution) -> Iterator[str]:
    """Yields the names of the packages that one asks for here, without extras."""
    for text in package.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name.lower().replace("_", "-")


def installed(names: Iterator[str]) -> dict[str, Distribution]:
    """Returns these packages and all that they ask for; one that is not installed here is left out."""
    found = dict[str, Distribution]()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            if name not in found:
                found[name] = distribution(name)
                waiting += asked_for(found[name])
        except PackageNotFoundError:
            continue  # torch's CUDA packages, where its build for the CPU is installed
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a venv with the wheel and links to its base dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for package in installed(asked_for(metadata(wheel))).values():
        for name in {Path(file).parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            here = Path(str(package.locate_file(name)))
            if here.exists() and not (packages / name).exists():
                (packages / name).symlink_to(here.resolve())
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    run(*pip, "install", "-q", "--no-index", wheel)  # fails if a dependency is not here
    return folder / "bin"


@needs_hatchling
def test_the_wheel_asks_for_the_base_packages_and_nothing_else(wheel: Path) -> None:
    assert sorted(asked_for(metadata(wheel))) == BASE
    assert wheel.name.endswith("-py3-none-any.whl")


@needs_hatchling
def test_the_wheel_holds_the_package_with_its_data(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("outsize/")}
    tracked = run("git", "ls-files", "src/outsize").splitlines()
    assert held == {name.removeprefix("src/") for name in tracked}


@needs_hatchling
def test_nothing_else_can_be_imported(clean: Path) -> None:
    names = ("transformers", "matplotlib", "yaml", "torchvision", "pytest")
    code = f"from importlib.util import find_spec; print(*[n for n in {names!r} if find_spec(n)])"
    assert run(clean / "python", "-c", code).split() == []


@needs_hatchling
def test_the_wheel_plans_runs_and_trains(clean: Path, tmp_path: Path) -> None:
    where = "import outsize; print(outsize.__file__)"
    assert run(clean / "python", "-c", where, folder=tmp_path).startswith(str(clean.parent))
    assert run(clean / "outsize", "--version", folder=tmp_path).strip() == "outsize 0.1.0"
    (tmp_path / "mine.py").write_text(MODEL, encoding="utf-8")
    asked = ("mine:model", "--input", "8", "--batch", "8")
    fits = json.loads(run(clean / "outsize", "fit", *asked, "--cluster", "2x12GB", "--json", folder=tmp_path))
    assert fits["answer"] == "YES"
    split = ("--cluster", "2xcpu", "--stages", "2", "--report", "page.html")
    run(clean / "outsize", "plan", *asked, *split, folder=tmp_path)
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")
    script = ROOT / "examples" / "05_train_script.py"
    two = run(clean / "outsize", "run", "--nproc-per-node", "2", script, folder=tmp_path)
    assert script.with_suffix(".out").read_text(encoding="utf-8").strip() in two


@needs_hatchling
def test_a_shell_can_complete(clean: Path) -> None:
    code = run("env", "_OUTSIZE_COMPLETE=source_bash", clean / "outsize")
    assert "complete" in code
    words = ("env", "_OUTSIZE_COMPLETE=complete_bash", "COMP_WORDS=outsize f", "COMP_CWORD=1")
    assert "fit" in run(*words, clean / "outsize").split()


def judged(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stderr == ""
    return done.stdout


def changed(path: Path, right: str, wrong: str, folder: Path) -> Path:
    """Returns a copy of a file in which a text stands in place of another."""
    text = path.read_text(encoding="utf-8")
    assert right in text
    (folder / path.name).write_text(text.replace(right, wrong), encoding="utf-8")
    return folder / path.name


@needs_judges
def test_the_dockerfile_has_no_finding_of_hadolint(tmp_path: Path) -> None:
    path = ROOT / "Dockerfile"
    assert judged(JUDGES / "hadolint", path) == ""
    for right, wrong in (("COPY --from", "COPY --form"), ("install --no-cache-dir", "install")):
        assert judged(JUDGES / "hadolint", changed(path, right, wrong, tmp_path)) != ""


def recipe(path: Path) -> str:
    return judged(JUDGES / "python", Path(__file__).with_name("package_judge.py"), "recipe", path).strip()


@needs_judges
def test_rattler_build_reads_the_recipe_and_it_says_what_pyproject_says() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rendered = json.loads(recipe(ROOT / "conda" / "recipe.yaml"))
    assert rendered["package"] == {"name": project["name"], "version": project["version"]}
    assert rendered["build"]["python"]["entry_points"] == [f"outsize = {project['scripts']['outsize']}"]
    python, *run_needs = [need.replace(" ", "") for need in rendered["requirements"]["run"]]
    assert python == f"python{project['requires-python']}"
    assert [need.replace("pytorch", "torch") for need in run_needs] == project["dependencies"]


@needs_judges
@pytest.mark.parametrize(
    ("right", "wrong"), [("noarch:", "noarc:"), ("  host:", "  hosts:"), ("${{ version }}", "${{ versio }}")]
)
def test_a_wrong_recipe_is_refused(right: str, wrong: str, tmp_path: Path) -> None:
    path = changed(ROOT / "conda" / "recipe.yaml", right, wrong, tmp_path)
    assert recipe(path).startswith("wrong: ")


def workflow(path: Path) -> str:
    return judged(JUDGES / "python", Path(__file__).with_name("package_judge.py"), "workflow", path)


@needs_judges
def test_the_ci_file_is_one_by_the_published_schema() -> None:
    assert workflow(ROOT / ".github" / "workflows" / "ci.yml") == ""


@needs_judges
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("runs-on: ubuntu-latest", "run-on: ubuntu-latest"), ("- uses:", "- use:"), ("fail-fast", "fails-fast")],
)
def test_a_wrong_ci_file_is_refused(right: str, wrong: str, tmp_path: Path) -> None:
    assert workflow(changed(ROOT / ".github" / "workflows" / "ci.yml", right, wrong, tmp_path)) != ""
