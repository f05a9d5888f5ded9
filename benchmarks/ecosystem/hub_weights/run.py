"""Question: which classes of transformers does `weight_files=` load as `from_pretrained` does?

    python benchmarks/ecosystem/hub_weights/run.py [--only '^Bert'] [--out results/transformers.json]

For each class: a tiny model with random weights is saved by `save_pretrained`, read by its `from_pretrained`,
and read by outsize into the same class on meta. Every parameter and buffer must be equal. `own names` is the
same for a folder with the names of the class (save_original_format=False), as
`engine.weights.save_pretrained` writes it.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tiny_configs import built, models, transformers
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.run.weights.load import load_weights, source_for
from outsize.run.weights.safetensors import WeightFiles

QUESTION = "Which classes of transformers does `weight_files=` load as `from_pretrained` does?"


def loaded(cls: Any, config: Any, folder: str) -> nn.Module:
    """Returns the class on meta, filled from a folder."""
    with torch.device("meta"):
        model = cls(config)
    load_weights(model, source_for(model, WeightFiles(folder)), torch.device("cpu"), set())
    return model


def differences(one: nn.Module, other: nn.Module) -> list[str]:
    """Returns the names of parameters and buffers that are not equal."""
    left, right = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (one, other))
    names = [name for name in {**left, **right} if name not in left or name not in right]
    return names + [n for n in left if n in right and not _equal(left[n], right[n])]


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype and not other.is_meta
    return same and torch.equal(torch.nan_to_num(one.detach()), torch.nan_to_num(other.detach()))


def result_of(model: nn.Module, cls: Any, own_names: bool) -> str:
    """Returns an outcome as benchmarks/ecosystem/tried.py knows them."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder, save_original_format=not own_names)  # pyright: ignore[reportCallIssue]
            reference = cls.from_pretrained(folder)
        except Exception as error:
            return f"theirs: {type(error).__name__}: {str(error)[:150]}"
        try:
            found = loaded(cls, reference.config, folder)
        except OutsizeError as error:
            return f"refused: {str(error).replace(folder, 'FOLDER')}"
        except Exception as error:
            return f"wrong: {type(error).__name__}: {str(error)[:200]}"
        wrong = differences(reference, found)
        if wrong and not differences(model, found):
            return f"theirs: from_pretrained reads other values than were saved, of {', '.join(wrong[:3])}"
        return f"wrong: {len(wrong)} differ, {', '.join(wrong[:3])}" if wrong else "equal"


def main() -> None:
    """Runs all classes, or those whose names hold `--only`, and writes and counts the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression; other results stay as they are")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "transformers.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results: dict[str, dict[str, str]] = {}
    if options.only and options.out.exists():
        results = json.loads(options.out.read_text())["classes"]
    for name, cls, kind in models():
        if not re.search(options.only, name):
            continue
        model = built(cls, kind)
        if model is None:
            print(f"{name}: not built", flush=True)
            continue
        results[name] = {"saved": result_of(model, cls, False), "own names": result_of(model, cls, True)}
        print(f"{name}: {results[name]}", flush=True)
        write(options.out, results)
    for column in ("saved", "own names"):
        print(column, dict(Counter(row[column].partition(":")[0] for row in results.values())))


def write(path: Path, results: dict[str, dict[str, str]]) -> None:
    """Writes the results so far with the versions that they hold for."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    question = "do classes of transformers load by `weights=` as by `from_pretrained`?"
    document = {"question": question, "versions": versions, "classes": dict(sorted(results.items()))}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
