"""Trains by the v1 of LLaMA-Factory over the stages of a plan.

    dist_config:
      name: outsize
      stages: 2
      microbatches: 2

    outsize run --nproc-per-node 2 -m outsize.integrations.llamafactory sft train.yaml

Its loop calls a model, a loss of the outputs, `backward`, torch's own clipping and an optimizer of
`model.parameters()`: what a split model is for. A call has `micro_batch_size` samples, which are divided into
microbatches. (Its older trainers derive from transformers': trainers.py.)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from outsize.errors import BadOption
from outsize.integrations.split_options import named_options
from outsize.ops.launch.worker import execute
from outsize.ops.training import split
from outsize.train.split.module import SplitModule

NAME: Final = "outsize"  # in `dist_config`
_TOKENS: Final = 8  # of the example; other lengths are recorded when they come
_TRAINERS: Final = ("sft", "dpo", "rm")


def shard_model(model: nn.Module, dist_config: Mapping[str, Any], **_: Any) -> SplitModule:
    """Returns the model, split as its file says. Raises BadOption, BadPlan."""
    options = {key: value for key, value in dist_config.items() if key != "name"}
    samples = options.get("microbatches", 1)
    tokens = torch.zeros(samples, _TOKENS, dtype=torch.long)
    example = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens,
        "loss_weights": torch.ones(samples, _TOKENS),
    }
    made = split(model, (), example, **named_options(options))
    if made.engine.crew.world_size > 1:
        vars(model)["save_pretrained"] = partial(_save, made)
    return made


def _save(model: SplitModule, folder: str, **_: Any) -> None:
    """Writes the whole model by all ranks, which all call this."""
    model.engine.weights.save_pretrained(folder)


def main(arguments: Sequence[str]) -> None:
    """Trains as `llamafactory-cli TRAINER FILE ...` does with USE_V1=1, in the processes that are there.

    Raises BadOption.
    """
    if len(arguments) < 2 or arguments[0] not in _TRAINERS:
        raise BadOption(
            "LLaMA-Factory's v1 is started by the name of its trainer and a file",
            numbers=f"trainers: {', '.join(_TRAINERS)}",
            next_step="python -m outsize.integrations.llamafactory sft train.yaml",
        )
    v1 = "llamafactory.v1"
    plugins = import_module(f"{v1}.plugins.trainer_plugins.distributed.hub").DistributedPlugin
    plugins(NAME).register()(shard_model)
    # Ranks have the same batches: all of them are one along its `dp`, whatever the file says later.
    interface = import_module(f"{v1}.accelerator.interface").DistributedInterface
    ranks: int = import_module(f"{v1}.accelerator.helper").get_world_size()
    interface({"dp_size": 1, "cp_size": ranks})
    trainer, *files = arguments
    execute("module", [f"{v1}.trainers.{trainer}_trainer", *files])


if __name__ == "__main__":
    main(sys.argv[1:])
