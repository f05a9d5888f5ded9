"""Trains by Axolotl over the stages of a plan.

    plugins:
      - outsize.integrations.axolotl.SplitPlugin
    outsize:
      stages: 2

Axolotl makes its trainers in builders of its own, one for each method, between two calls of its plugins: in
that time all trainers are made split. Its file means what it means for one process, in any number of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, final

import torch
from pydantic import BaseModel

from outsize.integrations.split_options import OTHER_SPLITS, insist_on_one_split, named_options
from outsize.integrations.trainers import split_trainers

# Axolotl alone imports this module for use; without it the module can still be read and documented.
_BASE: Any = import_module("axolotl.integrations.base").BasePlugin if find_spec("axolotl") else object
# Keys of Axolotl's file by which it splits the model itself, and those that do so from 2 on.
_SPLITS: Final = (*OTHER_SPLITS, "fsdp_config")
_SIZES: Final = (
    *("dp_shard_size", "dp_replicate_size", "tensor_parallel_size"),
    *("context_parallel_size", "sequence_parallel_degree", "expert_parallel_size"),
)
SEED: Final = 42  # the default of TrainingArguments


@final
class AxolotlKey(BaseModel):
    """The key of Axolotl's file: fields of a Request, options of `parallelize`, or a plan's file."""

    outsize: dict[str, Any] = {}


@final
class SplitPlugin(_BASE):
    """Splits the trainer that Axolotl makes."""

    def __init__(self) -> None:
        super().__init__()
        self._splitting = ExitStack()
        self._trainer: Any = None
        self._loaded: Any = None

    def get_input_args(self) -> str:
        """Returns where the key of Axolotl's file is described."""
        return f"{__name__}.{AxolotlKey.__name__}"

    def register(self, cfg: Any) -> None:
        """Says that processes are no replicas, by which Axolotl would multiply the batch.

        Raises BadOption where its file splits the model otherwise as well.
        """
        insist_on_one_split(cfg, _SPLITS)
        sizes = {name: size for name in _SIZES if (size := cfg.get(name) or 1) > 1}
        insist_on_one_split(sizes, _SIZES)
        cfg["ddp"] = False

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Says, where Axolotl asks first after it has read its file, that the model is loaded on the host:
        each stage moves to its device from there.
        """
        cfg.device_map = {"": "cpu"}

    def pre_model_load(self, cfg: Any) -> None:
        """Splits the trainers that are made from here on, and draws what the model lacks in its folder alike
        on every rank: Axolotl sets its seed when it makes the trainer, and not before.

        Raises BadOption, BadPlan.
        """
        self._splitting = split_trainers(**named_options(cfg.outsize))
        _seed(cfg)

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        """Draws the same adapters on every rank."""
        _seed(cfg)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Does so for adapters that a trainer of TRL adds when it is made, as for DPO."""
        self._loaded = model
        _seed(cfg)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Leaves trainers that are made from here on as they are."""
        self._splitting.close()
        self._trainer = trainer

    def post_train(self, cfg: Any, model: Any) -> None:
        """Saves the model by all ranks; Axolotl would call `save_pretrained` of rank 0 alone next, which has
        a part of the weights. Where the trainer has put adapters around the model that Axolotl loaded, as
        for DPO, Axolotl saves that one too: it is given the weights of all ranks.
        """
        trainer, self._trainer = self._trainer, None  # Axolotl calls this a second time, when it has saved
        loaded, self._loaded = self._loaded, None
        if trainer is not None and trainer.engine.crew.world_size > 1:
            trainer.save_model(cfg.output_dir)
            vars(model)["save_pretrained"] = _saved_already
            for prefix in (name + "." for name, part in model.named_modules() if name and part is loaded):
                state = trainer.engine.weights.full_state_dict()
                part_of_it = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                vars(loaded)["save_pretrained"] = partial(loaded.save_pretrained, state_dict=part_of_it)


def _seed(cfg: Any) -> None:
    torch.manual_seed(SEED if cfg.seed is None else cfg.seed)


def _saved_already(*_: Any, **__: Any) -> None:
    """Writes nothing."""
