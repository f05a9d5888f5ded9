"""LLaMA-Factory's own program trains split, and logs and saves what it does in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from framework_runs import HERE, environment_of, logs_in, run, same_weights

SPLIT = ("-m", "outsize.integrations.trainers", "stages=2", "-m", "llamafactory.launcher")


LORA = "finetuning_type: lora\nlora_rank: 4\nlora_target: all\nlora_dropout: 0.0\n"
FULL = "finetuning_type: full\n"
METHODS = {
    "lora": f"stage: sft\ndataset: rows\n{LORA}",
    "full": f"stage: sft\ndataset: rows\n{FULL}",
    "dpo": f"stage: dpo\ndataset: pairs\n{LORA}",
    "kto": f"stage: kto\ndataset: verdicts\n{LORA}",
    "reward": f"stage: rm\ndataset: pairs\n{FULL}",
    "packed": f"stage: sft\ndataset: rows\n{FULL}packing: true\nneat_packing: true\n",
    "qlora": f"stage: sft\ndataset: rows\n{LORA}quantization_bit: 4\nquantization_method: bnb\n",
}


def written(folder: Path, method: str) -> str:
    """The file of a run, whose folder is a word behind it."""
    (folder / "train.yaml").write_text(
        f"model_name_or_path: {folder}/model\ndo_train: true\n{METHODS[method]}"
        f"dataset_dir: {folder}\ntemplate: default\ncutoff_len: 64\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nlearning_rate: 1.0e-2\n"
        "max_steps: 3\nlogging_steps: 1\nreport_to: none\nuse_cpu: true\ndisable_tqdm: true\n"
        "save_strategy: 'no'\npreprocessing_num_workers: 1\n"
    )
    return str(folder / "train.yaml")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.slow
@pytest.mark.parametrize("key", ["deepspeed: z3.json", "fsdp: full_shard"])
def test_another_library_that_splits_is_refused_before_the_model_is_loaded(key: str, tmp_path: Path) -> None:
    programs = environment_of("llamafactory")
    file = Path(written(tmp_path, "full"))
    file.write_text(f"{file.read_text()}{key}\n")
    with pytest.raises(
        AssertionError, match=rf"BadOption.*{key.partition(':')[0]} splits the model by another"
    ):
        run(programs, "python", *SPLIT, str(file), f"output_dir={tmp_path}/one")


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
