"""Judges the conda recipe and the CI file by the tools' own packages, which `.venv-clusters` has.

    package_judge.py recipe FILE       prints the rendered recipe as JSON, or what is wrong with it
    package_judge.py workflow FILE     prints what is wrong, a line each

rattler-build reads a recipe as it does for a build, without solving an environment. The schema of workflows
is the published one that check-jsonschema ships.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path


def recipe(text: str) -> Iterator[str]:
    """Renders a recipe of format 1, in which unknown fields are errors."""
    from rattler_build import RattlerBuildError as BuildError
    from rattler_build import RenderConfig, Stage0Recipe, VariantConfig

    try:
        for variant in Stage0Recipe.from_yaml(text).render(VariantConfig(), RenderConfig()):
            yield json.dumps(variant.recipe.to_dict())
    except (BuildError, ValueError) as error:
        yield f"wrong: {error}"


def workflow(text: str) -> Iterator[str]:
    """Judges a workflow by the published schema."""
    import yaml
    from jsonschema import Draft7Validator

    shipped = distribution("check-jsonschema").locate_file("check_jsonschema/builtin_schemas/vendor")
    schema = (
        Path(str(shipped)) / "github-workflows.json"
    )  # as a file: it is installed without what it imports
    document = yaml.safe_load(text)
    document["on"] = document.pop(True)  # in YAML 1.1 `on` is a truth value
    for error in Draft7Validator(json.loads(schema.read_text(encoding="utf-8"))).iter_errors(document):
        yield f"{error.json_path}: {error.message.splitlines()[0][:200]}"


if __name__ == "__main__":
    judge = {"recipe": recipe, "workflow": workflow}[sys.argv[1]]
    for line in judge(Path(sys.argv[2]).read_text(encoding="utf-8")):
        print(line)
