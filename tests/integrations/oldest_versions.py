"""The oldest version that pyproject.toml promises of each optional package, one requirement a line.

`make test-integrations` installs what this script prints into `.venv-oldest`, a folder that stands before
the newest versions on the path. Linters, the tools of tests and Ray (which is in `.venv-clusters`) stay out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".venv-oldest"
WITHOUT: Final = ("test", "docs", "dev", "ray")
# What these versions import beside torch and what is of any age.
BESIDE: Final = {
    "huggingface_hub": "1.3.0",  # the oldest for transformers 5.0
    "tokenizers": "0.22.0",
    "protobuf": "6.30.0",  # wandb 0.20 and mlflow 3.0 were generated for protobuf before 7
    "sentry_sdk": "2.0.0",
}


def promised() -> Mapping[str, str]:
    """Returns the oldest version under each name of the extras."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    lines = [line for extra, wanted in extras.items() if extra not in WITHOUT for line in wanted]
    pairs = (re.split(r"\[.*\]>=|>=", line) for line in lines)
    return {pair[0]: pair[1] for pair in pairs}


if __name__ == "__main__":
    print(*(f"{name}=={version}" for name, version in {**promised(), **BESIDE}.items()), sep="\n")
