"""Axolotl trains split by two keys of its file, and logs and saves what it does in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from framework_runs import HERE, environment_of, logs_in, run, same_weights

from outsize.errors import BadOption
from outsize.integrations.axolotl import AxolotlKey, SplitPlugin
from outsize.integrations.trainers import split_trainers
from outsize.integrations.transformers import Trainer, transformers

OWN = "plugins:\n  - axolotl_worker.Seed\n"
SPLIT = "plugins:\n  - outsize.integrations.axolotl.SplitPlugin\noutsize:\n  stages: 2\n"
LORA = """adapter: lora
lora_r: 4
lora_alpha: 8
lora_dropout: 0.0
lora_target_linear: true
lora_mlp_kernel: false
lora_qkv_kernel: false
lora_o_kernel: false
"""
ROWS = "datasets:\n  - path: {folder}/rows.json\n    ds_type: json\n    type: alpaca\n"
PAIRS = """datasets:
  - path: {folder}/pairs.json
    ds_type: json
    split: train
    type:
      field_prompt: instruction
      field_chosen: chosen
      field_rejected: rejected
"""
TALKS = """datasets:
  - path: {folder}/talks.json
    ds_type: json
    type: bradley_terry.chat_template
reward_model: true
model_type: AutoModelForSequenceClassification
num_labels: 1
chat_template: chatml
"""
METHODS = {
    "lora": ROWS + LORA,
    "full": ROWS,
    "qlora": ROWS + LORA.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true"),
    "dpo": f"{PAIRS}{LORA}rl: dpo\n",
    "reward": TALKS,
    "packed": f"{ROWS}sample_packing: true\n",
}


def written(folder: Path, name: str, more: str) -> str:
    file = folder / f"{name}.yaml"
    packing = "" if "sample_packing" in more else "sample_packing: false\n"
    more = packing + more.replace("{folder}", str(folder))
    file.write_text(
        f"base_model: {folder}/model\noutput_dir: {folder}/{name}\ndataset_prepared_path: {folder}/prepared\n"
        "sequence_len: 64\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 4\nmax_steps: 3\nlearning_rate: 1.0e-2\n"
        "lr_scheduler: constant\noptimizer: adamw_torch\nlogging_steps: 1\nbf16: false\nfp16: false\n"
        "tf32: false\npad_to_sequence_len: false\nsave_strategy: 'no'\nseed: 1\n" + more
    )
    return str(file)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_split_run_is_the_plain_one(method: str, tmp_path: Path) -> None:
    programs = environment_of("axolotl")
    run(programs, "python", str(HERE / "framework_model.py"), str(tmp_path))
    more = METHODS[method]
    worker = str(HERE / "axolotl_worker.py")
    run(programs, "python", worker, written(tmp_path, "plain", OWN + more), str(tmp_path / "plain.json"))
    commands = {"one": ["python"], "two": ["outsize", "run", "--nproc-per-node", "2"]}
    for name, command in commands.items():
        run(programs, *command, worker, written(tmp_path, name, SPLIT + more), f"{tmp_path}/{name}.json")
        assert logs_in(tmp_path / f"{name}.json") == logs_in(tmp_path / "plain.json")
        assert same_weights(tmp_path / "plain", tmp_path / name)


class Config(dict[str, Any]):
    """Axolotl's file as its plug-ins get it."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


def test_the_hooks_split_what_is_made_between_them() -> None:
    """Without Axolotl: the hooks in the order in which it calls them."""
    plugin, config = SplitPlugin(), Config(outsize={"stages": 2}, seed=None)
    plugin.register(config)
    plugin.load_datasets(config)
    assert (config["ddp"], config["device_map"]) == (False, {"": "cpu"})
    assert AxolotlKey(outsize=config["outsize"]).outsize == {"stages": 2}
    plugin.pre_model_load(config)
    assert issubclass(type(transformers.Trainer.__new__(transformers.Trainer)), Trainer)
    plugin.post_trainer_create(config, None)
    assert type(transformers.Trainer.__new__(transformers.Trainer)) is transformers.Trainer
    with split_trainers(stages=2):
        plugin.post_train(config, None)


class Loaded(torch.nn.Linear):
    """A model that says what its `save_pretrained` is given."""

    def save_pretrained(self, folder: str, state_dict: dict[str, Any] | None = None) -> object:
        return folder, state_dict


def test_a_model_inside_the_adapters_is_saved_with_the_weights_of_all_ranks() -> None:
    """Without Axolotl: rank 0 alone saves both after the hook."""
    loaded = Loaded(1, 1)
    model = torch.nn.Sequential(torch.nn.ModuleList([loaded]))
    whole = {"0.0.weight": 1, "0.0.bias": 2, "0.00.weight": 3}
    weights = SimpleNamespace(full_state_dict=lambda: whole)
    engine = SimpleNamespace(weights=weights, crew=SimpleNamespace(world_size=2))
    saved: list[str] = []
    trainer = SimpleNamespace(engine=engine, save_model=saved.append)
    plugin, config = SplitPlugin(), Config(output_dir="out", seed=1)
    plugin.post_model_load(config, loaded)
    plugin.post_trainer_create(config, trainer)
    plugin.post_train(config, model)
    plugin.post_train(config, model)
    assert saved == ["out"]
    assert vars(model)["save_pretrained"]("out") is None
    assert loaded.save_pretrained("out") == ("out", {"weight": 1, "bias": 2})


@pytest.mark.parametrize("key", ["deepspeed", "fsdp_config", "tensor_parallel_size"])
def test_keys_that_split_otherwise_are_refused_when_the_file_is_read(key: str) -> None:
    SplitPlugin().register(Config(outsize={"stages": 2}, tensor_parallel_size=1, fsdp=[]))
    with pytest.raises(BadOption, match=rf"{key} splits .*; {key}='2'\. Next: leave {key} out"):
        SplitPlugin().register(Config(outsize={"stages": 2}) | {key: 2})
