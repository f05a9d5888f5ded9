"""What the demo needs beside outsize's own dependencies, and which extra brings it."""

from __future__ import annotations

from importlib.util import find_spec

from outsize.errors import ModelNotImportable

# module -> extra of pyproject.toml
NEEDS = {
    "transformers": "hf",
    "torchvision": "vision",
    "PIL": "vision",
    "matplotlib": "plot",
    "sklearn": "test",
}


def check_needs(needs: dict[str, str] = NEEDS) -> None:
    """Raise ModelNotImportable that names every missing module and the one command that installs them."""
    missing = [module for module in needs if find_spec(module) is None]
    if missing:
        extras = ",".join(dict.fromkeys(needs[module] for module in missing))
        raise ModelNotImportable(
            "the demo's models and images need more packages",
            numbers=f"not installed: {', '.join(missing)}",
            next_step=f"pip install 'outsize[{extras}]', or make demo",
        )
