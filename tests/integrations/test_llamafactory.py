"""LLaMA-Factory's own program trains split, and logs and saves what it does in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from framework_runs import HERE, environment_of, logs_in, run, same_weights

SPLIT = ("-m", "outsize.integrations.trainers", "stages=2", "-m", "llamafactory.launcher")


def written(folder: Path, method: str) -> str:
    """The file of a run, whose folder is a word behind it."""
    lora = "lora_rank: 4\nlora_target: all\nlora_dropout: 0.0\n" if method == "lora" else ""
    (folder / "train.yaml").write_text(
        f"model_name_or_path: {folder}/model\nstage: sft\ndo_train: true\nfinetuning_type: {method}\n{lora}"
        f"dataset: rows\ndataset_dir: {folder}\ntemplate: default\ncutoff_len: 64\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nlearning_rate: 1.0e-2\n"
        "max_steps: 3\nlogging_steps: 1\nreport_to: none\nuse_cpu: true\ndisable_tqdm: true\n"
        "save_strategy: 'no'\npreprocessing_num_workers: 1\n"
    )
    return str(folder / "train.yaml")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_split_run_is_the_plain_one(method: str, tmp_path: Path) -> None:
    programs = environment_of("llamafactory")
    run(programs, "python", str(HERE / "framework_model.py"), str(tmp_path))
    file = written(tmp_path, method)
    run(programs, "python", "-m", "llamafactory.launcher", file, f"output_dir={tmp_path}/plain")
    commands = {"one": ["python"], "two": ["outsize", "run", "--nproc-per-node", "2"]}
    for name, command in commands.items():
        run(programs, *command, *SPLIT, file, f"output_dir={tmp_path}/{name}")
        assert logs_in(tmp_path / name / "trainer_state.json") == logs_in(
            tmp_path / "plain" / "trainer_state.json"
        )
        assert same_weights(tmp_path / "plain", tmp_path / name)


def written_for_v1(folder: Path, name: str, more: str) -> str:
    (folder / "data.yaml").write_text(
        f"rows:\n  path: {folder}/rows.json\n  source: local\n  converter: alpaca\n"
    )
    (folder / f"{name}.yaml").write_text(
        f"model: {folder}/model\ntrain_dataset: {folder}/data.yaml\noutput_dir: {folder}/{name}\n"
        "micro_batch_size: 4\nglobal_batch_size: 8\ncutoff_len: 64\nlearning_rate: 1.0e-2\nmax_steps: 3\n"
        f"bf16: false\nbatching_workers: 0\nenable_activation_checkpointing: false\n{more}"
    )
    return str(folder / f"{name}.yaml")


@pytest.mark.dist
@pytest.mark.slow
def test_so_is_one_of_its_v1(tmp_path: Path) -> None:
    """With one microbatch for each call the bits are those of its own calls."""
    programs = environment_of("llamafactory")
    run(programs, "python", str(HERE / "framework_model.py"), str(tmp_path))
    plain = written_for_v1(tmp_path, "plain", "")
    run(programs, "python", "-m", "llamafactory.v1.trainers.sft_trainer", plain)
    split = "dist_config:\n  name: outsize\n  stages: 2\n  microbatches: 1\n"
    commands = {"one": ["python"], "two": ["outsize", "run", "--nproc-per-node", "2"]}
    for name, command in commands.items():
        file = written_for_v1(tmp_path, name, split)
        run(programs, *command, str(HERE / "llamafactory_worker.py"), "sft", file)
        logs = [logged_by_v1(tmp_path / each / "trainer_log.jsonl") for each in (name, "plain")]
        assert logs[0] == logs[1]
        assert same_weights(tmp_path / "plain", tmp_path / name)


def logged_by_v1(file: Path) -> list[list[float]]:
    """Its numbers in float32, in which it sends them from rank to rank."""
    numbers = [list(json.loads(line).values()) for line in file.read_text().splitlines()]
    return torch.tensor(numbers, dtype=torch.float32).tolist()
