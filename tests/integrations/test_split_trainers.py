"""Trainers that a framework makes deep in its own code are split there, with their own digits."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trainer_worker
from trainer_worker import transformers

import outsize
from outsize.errors import BadOption
from outsize.integrations import trainers
from outsize.integrations.trainers import split_trainers
from outsize.integrations.transformers import Trainer

OUTSIZE = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"


class Theirs(transformers.Seq2SeqTrainer):
    """A framework's own."""

    def __init__(self, finetuning: str, *, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs, processing_class=tokenizer)
        self.finetuning = finetuning

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def made(folder: Path, kind: Any = Theirs) -> Any:
    """What a framework's own code makes."""
    arguments = transformers.Seq2SeqTrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2,
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model, data = trainer_worker.model_of({}), trainer_worker.Tokens(12, False, 0)
    own = ["full"] if issubclass(kind, Theirs) else []
    trainer = kind(*own, model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logs_of(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    times = ("runtime", "per_second")
    return [
        {k: v for k, v in log.items() if not any(t in k for t in times)} for log in trainer.state.log_history
    ]


def test_a_trainer_of_a_framework_has_its_own_digits(tmp_path: Path) -> None:
    expected = logs_of(made(tmp_path))
    with split_trainers(stages=2):
        trainer = made(tmp_path)
    assert logs_of(trainer) == expected
    assert len(trainer.engine.plan.stages) == 2
    assert isinstance(trainer, Theirs)
    assert trainer.finetuning == "full"
    assert type(trainer).__name__ == "Theirs"
    assert inspect.signature(type(trainer).__init__) == inspect.signature(Theirs.__init__)


def test_it_ends_where_the_context_ends_and_the_inner_one_counts(tmp_path: Path) -> None:
    with split_trainers(stages=2):
        with split_trainers(outsize.Request(stages=3)):
            inner = made(tmp_path)
        outer = made(tmp_path, transformers.Trainer)
    plain = made(tmp_path)
    assert type(plain) is Theirs
    assert not isinstance(plain, Trainer)
    for trainer, stages in ((inner, 3), (outer, 2)):
        assert len(trainer.engine.plan.stages) == stages


def test_a_class_that_says_itself_how_it_is_split_is_left_alone(tmp_path: Path) -> None:
    class Mine(Trainer, Theirs):  # pyright: ignore[reportIncompatibleMethodOverride]
        pass

    with split_trainers(stages=2):
        assert type(made(tmp_path, Mine)) is Mine


def test_what_says_nothing_is_refused_before_a_trainer_is_made() -> None:
    with pytest.raises(BadOption, match="the training framework says itself"):
        split_trainers(clip_norm=1.0)
    with pytest.raises(BadOption, match="there is no program"):
        trainers.main(['{"stages": 2}'])
    for text in ("stages", '{"stages": }'):
        with pytest.raises(BadOption, match="does not say how trainers are split"):
            trainers.main([text, "train.py"])


@pytest.mark.parametrize(
    "other", [{"deepspeed": "z3.json"}, {"fsdp": "full_shard"}, {"parallelism_config": 1}]
)
def test_another_library_that_splits_is_refused_where_the_arguments_are_made(
    other: dict[str, Any], tmp_path: Path
) -> None:
    (name, value) = next(iter(other.items()))
    wanted = rf"{name} splits .* by another library.*{name}='{value}'.* Next: leave {name} out"
    with split_trainers(stages=2), pytest.raises(BadOption, match=wanted):
        transformers.Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, **other)
    plain = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    vars(plain).update(other)  # As arguments that were made before.
    with pytest.raises(BadOption, match=wanted):
        Trainer(model=trainer_worker.model_of({}), args=plain, outsize={"stages": 2})


def test_arguments_are_refused_from_here_on_where_nobody_holds_what_ends_it(tmp_path: Path) -> None:
    with split_trainers(stages=2):  # Its end restores both classes.
        pass
    arguments: Any = transformers.TrainingArguments
    before = transformers.Trainer.__new__, arguments.__post_init__
    split_trainers(stages=2)
    gc.collect()
    try:
        with pytest.raises(BadOption, match="fsdp splits the model"):
            arguments(str(tmp_path), use_cpu=True, fsdp="full_shard")
    finally:
        transformers.Trainer.__new__, arguments.__post_init__ = before


def ran(command: list[str], folder: Path) -> dict[str, Any]:
    """What the worker writes, started by a command that splits the trainers it makes."""
    folder.mkdir()
    job = json.dumps({"folder": str(folder), "out": str(folder / "out.json")})
    paths = os.pathsep.join([str(Path(trainer_worker.__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run([*command, job], env=environment, check=True, timeout=300)
    return json.loads((folder / "out.json").read_text())


@pytest.mark.dist
@pytest.mark.usefixtures("forked_python")
def test_a_command_splits_the_trainers_of_a_script_or_a_module(tmp_path: Path) -> None:
    """No line of the program changes, in one process or over two."""
    (tmp_path / "plain").mkdir()
    out = tmp_path / "out.json"
    trainer_worker.main({"folder": str(tmp_path / "plain"), "out": str(out)})
    expected = json.loads(out.read_text())
    run, split = (
        [sys.executable, "-c", OUTSIZE, "run", "--nproc-per-node", "2"],
        "outsize.integrations.trainers",
    )
    assert ran([*run, "-m", split, "stages=2", "-m", "trainer_worker"], tmp_path / "two") == expected
    alone = [sys.executable, "-m", split, '{"stages": 2}', trainer_worker.__file__]
    assert ran(alone, tmp_path / "one") == expected
