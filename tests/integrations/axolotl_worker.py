"""Axolotl's own training: `axolotl_worker.py FILE LOGS`, where the trainer's logs are written to LOGS.

It runs in Axolotl's environment. The class is a plug-in that makes two plain runs of one file equal.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from axolotl.cli.train import do_cli  # pyright: ignore[reportMissingImports]
from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]


class Seed(BasePlugin):
    """Draws new weights and adapters by the file's seed, which Axolotl sets later."""

    def pre_model_load(self, cfg: Any) -> None:
        torch.manual_seed(cfg.seed)

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(cfg.seed)

    post_model_load = pre_lora_load  # for those that a trainer of TRL adds


if __name__ == "__main__":
    plain = transformers.Trainer.train

    def train(self: Any, *arguments: Any, **options: Any) -> Any:
        result = plain(self, *arguments, **options)
        if self.is_world_process_zero():
            self.state.save_to_json(sys.argv[2])
        return result

    transformers.Trainer.train = train
    do_cli(sys.argv[1])
