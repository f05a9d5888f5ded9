"""The real Trainer of transformers, split: the logs of the plain one, digit for digit."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import trainer_worker
from forked import in_forks
from patience import free_port
from torch._dynamo import utils as dynamo_utils
from trainer_worker import transformers

from outsize.errors import BadCheckpoint, BadOption
from outsize.integrations.transformers import Trainer

SAVES = {"save_strategy": "steps", "save_steps": 2}
JOBS: dict[str, dict[str, Any]] = {
    "gpt2 in bfloat16": {"arguments": {"bf16": True, "eval_strategy": "steps", "eval_steps": 2}},
    "gpt2 with padding": {"ragged": True, "metrics": False},
    "gpt2 by epochs": {
        "arguments": {"max_steps": -1, "num_train_epochs": 1, "max_grad_norm": 0.0, "warmup_steps": 2,
                      "lr_scheduler_type": "cosine", "logging_steps": 1},
    },
    "gpt2 with LoRA": {"lora": True},
    "a loss of the user's": {"own_loss": True, "arguments": {"bf16": True}},
    "compiled stages": {"arguments": {"torch_compile_backend": "aot_eager"}},
    "label smoothing": {"arguments": {"label_smoothing_factor": 0.1}},
    "metrics by batches": {"model": "bert", "arguments": {"batch_eval_metrics": True}},
    "losses alone": {"metrics": False, "arguments": {"per_device_eval_batch_size": 3}},
    "bert with SGD": {"model": "bert", "arguments": {"optim": "sgd", "gradient_accumulation_steps": 2}},
}  # fmt: skip


# The others run in one process; with --all these do as well.
OVER_PROCESSES = (
    "gpt2 in bfloat16", "gpt2 with LoRA", "a loss of the user's", "metrics by batches", "losses alone",
)  # fmt: skip


def run(job: dict[str, Any], folder: Path, ranks: int = 1) -> dict[str, Any]:
    """What the script says of this job."""
    job = {"folder": str(folder), "out": str(folder / "out.json"), **job}
    if ranks == 1:
        trainer_worker.main(job)
    else:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

        def rank(number: int) -> None:
            numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update(place | {name: str(value) for name, value in numbers.items()})
            trainer_worker.main(job)

        in_forks(folder, ranks, rank)
    return json.loads((folder / "out.json").read_text())


@cache
def plain(name: str) -> dict[str, Any]:
    return run(JOBS[name], Path(mkdtemp()))


@pytest.mark.sample("gpt2 in bfloat16", *(name for name in JOBS if name not in OVER_PROCESSES))
@pytest.mark.parametrize("name", JOBS)
def test_a_split_trainer_has_the_digits_of_the_plain_one(name: str, tmp_path: Path) -> None:
    assert run({**JOBS[name], "split": {"stages": 2}}, tmp_path) == plain(name)


@pytest.mark.dist
@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_so_has_one_over_two_processes(name: str, tmp_path: Path) -> None:
    expected = plain(name)  # First: ranks are forks, which have imported by then what it imports.
    assert run({**JOBS[name], "split": {"stages": 2}}, tmp_path, ranks=2) == expected


@pytest.mark.dist
def test_a_run_goes_on_at_another_number_of_stages(tmp_path: Path) -> None:
    """Two processes save at step 2; three stages in one process go on, and two processes from the best."""
    job: dict[str, Any] = {"arguments": {**SAVES, "lr_scheduler_type": "cosine"}}
    whole = run(job, tmp_path / made(tmp_path, "plain"))
    saved = {"split": {"stages": 2}, "arguments": {**job["arguments"], "load_best_model_at_end": True,
             "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1.0}}  # fmt: skip
    run({**job, "split": {"stages": 2}}, tmp_path / made(tmp_path, "two"), ranks=2)
    checkpoint = str(tmp_path / "two/run/checkpoint-2")
    again = run({**job, "split": {"stages": 3}, "resume": checkpoint}, tmp_path / made(tmp_path, "three"))
    assert steps_of(again) == steps_of(whole)
    assert again["predicted"] == whole["predicted"]
    # At this learning rate the loss grows, so the best model is the first that was saved.
    expected = run({"arguments": saved["arguments"]}, tmp_path / made(tmp_path, "best"))
    found = run(saved, tmp_path / made(tmp_path, "best of two"), ranks=2)
    assert found["predicted"] == expected["predicted"]
    assert found["logs"][-1] == expected["logs"][-1]


def made(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    return name


def steps_of(result: dict[str, Any]) -> list[Any]:
    return [log for log in result["logs"] if "loss" in log]


def test_the_folder_is_one_that_from_pretrained_reads(tmp_path: Path) -> None:
    result = run({"split": {"stages": 2}}, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    data = trainer_worker.Tokens(20, False, 0)
    with torch.no_grad():
        logits = [model(data[i]["input_ids"][None]).logits for i in range(20)]
    assert sum(float(part.double().sum()) for part in logits) == pytest.approx(result["predicted"], rel=1e-5)
    assert {"config.json", "model.safetensors"} <= set(result["files"])
    assert (tmp_path / "model" / "training_args.json").is_file()  # the plain one writes a pickle


def trainer_of(tmp_path: Path, kind: Any = Trainer, **more: Any) -> Any:
    arguments = more.pop("arguments", {})
    plain = {"per_device_train_batch_size": 2, "max_steps": 1, "report_to": "none", "use_cpu": True}
    args = transformers.TrainingArguments(str(tmp_path), **{**plain, **arguments})
    data = trainer_worker.Tokens(8, False, 0)
    return kind(model=trainer_worker.model_of({}), args=args, train_dataset=data, **more)


def test_options_that_are_the_trainers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"clip_norm of outsize= is what the training framework says itself"):
        trainer_of(tmp_path, outsize={"stages": 2, "clip_norm": 1.0})


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    """transformers logs missing weights, and goes on with those of the new model."""
    trainer = trainer_of(tmp_path)
    loads = torch.nn.modules.module._IncompatibleKeys
    trainer._issue_warnings_after_load(loads(["lm_head.weight"], []))  # tied to the embedding
    name = next(name for name, _ in trainer.model.named_parameters() if ".h.1." in name)
    for result in (loads([name], []), loads([], ["transformer.h.9.ln_1.weight"])):
        with pytest.raises(BadCheckpoint, match=r"the checkpoint is of another model.*Next: build the model"):
            trainer._issue_warnings_after_load(result)


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_evaluations_in_fewer_bits_are_refused_over_processes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, arguments={name: True})
    monkeypatch.setitem(type(trainer.args.distributed_state)._shared_state, "num_processes", 2)
    with pytest.raises(BadOption, match=rf"{name}=True converts the whole model.* Next: leave {name} out"):
        trainer.create_accelerator_and_postprocess()


def test_vllm_is_refused_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)
    vars(trainer.args)["use_vllm"] = True  # as the arguments of TRL have it
    trainer.create_accelerator_and_postprocess()
    monkeypatch.setitem(type(trainer.args.distributed_state)._shared_state, "num_processes", 2)
    with pytest.raises(BadOption, match=r"use_vllm=True .*; 2 processes\. Next: leave use_vllm out"):
        trainer.create_accelerator_and_postprocess()


def test_fp16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"fp16=True scales losses .* Next: bf16=True"):
        trainer_of(tmp_path, arguments={"fp16": True})


@pytest.mark.parametrize("is_compiled", [False, True])
def test_stages_are_compiled_where_the_arguments_say_so(is_compiled: bool, tmp_path: Path) -> None:
    compiled = {"torch_compile_backend": "eager"} if is_compiled else {}
    trainer = trainer_of(tmp_path, arguments=compiled, outsize={"stages": 2})
    counters: Any = dynamo_utils.counters
    counters.clear()
    trainer.train()
    assert (counters["frames"]["ok"] > 0) is is_compiled


def test_a_mode_of_torch_compile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"torch_compile_mode='max-autotune'\. Next: torch_compile=True"):
        trainer_of(tmp_path, arguments={"torch_compile_mode": "max-autotune"})


def losses_of(trainer: Any) -> list[tuple[float, float]]:
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def twice(kind: Any) -> Any:
    """A trainer whose loss reads numbers and calls the model twice."""

    class Twice(kind):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            first = model(**inputs).loss
            turned = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
            return first * (2.0 if first.item() > 0 else 1.0) + model(**turned).loss

    return Twice


def test_a_loss_that_calls_the_model_twice_runs_over_the_stages(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    split = trainer_of(tmp_path, twice(Trainer), arguments=arguments, outsize={"stages": 2})
    plain = trainer_of(tmp_path, twice(transformers.Trainer), arguments=arguments)
    with pytest.raises(BadOption, match=r"the model is split at its first call, .* Next: trainer\.train\(\)"):
        _ = split.engine
    assert losses_of(split) == losses_of(plain)
    assert (split.engine.plan.form, split.engine.plan.microbatches) == ("tape", 3)
    for (name, weight), other in zip(split.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_a_run_of_such_a_loss_goes_on(tmp_path: Path) -> None:
    """From a checkpoint of the split trainer, at another number of stages."""
    arguments = {"gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
    whole = losses_of(
        trainer_of(tmp_path, twice(transformers.Trainer), arguments={**arguments, "max_steps": 4})
    )
    first = {**arguments, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer_of(tmp_path, twice(Trainer), arguments=first, outsize={"stages": 2}).train()
    again = trainer_of(tmp_path, twice(Trainer), arguments=first, outsize={"stages": 3})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = [(log["loss"], log["grad_norm"]) for log in again.state.log_history if "loss" in log]
    assert found == whole


def test_a_loss_without_the_model_is_refused(tmp_path: Path) -> None:
    class Without(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return inputs["input_ids"].sum()

    with pytest.raises(BadOption, match=r"without a call of the model"):
        trainer_of(tmp_path, Without, outsize={"stages": 2}).train()


def test_a_plan_may_come_from_a_file(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, outsize={"stages": 2}, arguments={"gradient_accumulation_steps": 2})
    trainer.engine.plan.save(tmp_path / "plan.json")
    other = trainer_of(tmp_path, outsize=tmp_path / "plan.json", arguments={"gradient_accumulation_steps": 2})
    assert other.engine.plan == trainer.engine.plan
    assert (len(other.engine.plan.stages), other.engine.plan.microbatches) == (2, 2)


def test_a_checkpoint_of_the_plain_trainer_goes_on_in_one_process(tmp_path: Path) -> None:
    job: dict[str, Any] = {"arguments": SAVES}
    whole = run(job, tmp_path / made(tmp_path, "plain"))
    checkpoint = str(tmp_path / "plain/run/checkpoint-2")
    again = run({**job, "split": {"stages": 2}, "resume": checkpoint}, tmp_path / made(tmp_path, "split"))
    assert steps_of(again) == steps_of(whole)


def test_batches_are_prepared_by_the_method_of_a_subclass(tmp_path: Path) -> None:
    """Once each and in order, and the example that the engine is built with is not counted."""

    def made(kind: Any, **split: Any) -> tuple[list[float], int, float]:
        class Prepared(kind):
            calls = 0

            def _prepare_inputs(self, inputs: Any) -> Any:
                inputs = super()._prepare_inputs(inputs)
                self.calls += 1
                return {**inputs, "input_ids": (inputs["input_ids"] + self.calls) % 60}

        arguments = {"gradient_accumulation_steps": 2, "logging_steps": 1}
        data = trainer_worker.Tokens(4, False, 0)
        trainer = trainer_of(tmp_path, Prepared, arguments=arguments, eval_dataset=data, **split)
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return losses, trainer.calls, trainer.evaluate()["eval_loss"]

    plain = made(transformers.Trainer)
    assert plain[1] == 2
    assert made(Trainer, outsize={"stages": 2}) == plain


@pytest.mark.parametrize("metrics", [None, trainer_worker.accuracy], ids=["losses", "outputs"])
def test_the_batches_of_an_evaluation_run_in_one_pipeline(metrics: Any, tmp_path: Path) -> None:
    """As many as the plan has microbatches, and then the rest, of which the last has one sample."""
    arguments = {"gradient_accumulation_steps": 4, "per_device_eval_batch_size": 2}
    trainer = trainer_of(
        tmp_path, arguments=arguments, eval_dataset=trainer_worker.Tokens(11, False, 0),
        compute_metrics=metrics, outsize={"stages": 2, "schedule": "1f1b"},
    )  # fmt: skip
    ran: list[int] = []
    crew = trainer.engine.crew
    run = crew.run

    def counted(loads: Any, *more: Any) -> Any:
        ran.extend(len(load.variants) for load in loads)
        return run(loads, *more)

    crew.run = counted
    trainer.evaluate()
    assert ran == [4, 2]
    ran.clear()
    trainer.predict(trainer_worker.Tokens(12, False, 0))
    assert ran == [4, 2]


@pytest.mark.parametrize("method", ["prediction_step", "_prepare_inputs"])
def test_an_evaluation_of_a_subclass_runs_batch_by_batch(method: str, tmp_path: Path) -> None:
    """What changes the inputs on its way sees each batch once, in order, and nothing was computed before."""

    def made(kind: Any, **split: Any) -> tuple[int, float]:
        class Changing(kind):
            calls = 0

            def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                if method == "prediction_step":
                    self.calls += 1
                    inputs["input_ids"] = (inputs["input_ids"] + self.calls) % 60
                return super().prediction_step(model, inputs, *args, **kwargs)

            def _prepare_inputs(self, inputs: Any) -> Any:
                inputs = super()._prepare_inputs(inputs)
                if method == "_prepare_inputs":
                    self.calls += 1
                    inputs = {**inputs, "input_ids": (inputs["input_ids"] + self.calls) % 60}
                return inputs

        arguments = {"gradient_accumulation_steps": 4, "per_device_eval_batch_size": 2}
        trainer = trainer_of(
            tmp_path, Changing, arguments=arguments, eval_dataset=trainer_worker.Tokens(8, False, 0),
            compute_metrics=trainer_worker.accuracy, **split,
        )  # fmt: skip
        loss = trainer.evaluate()["eval_loss"]
        return trainer.calls, loss

    assert made(Trainer, outsize={"stages": 2}) == made(transformers.Trainer)


def test_a_loss_that_holds_the_model_runs_over_the_stages(tmp_path: Path) -> None:
    class Holder(torch.nn.Module):
        """As the losses of sentence-transformers: the model is a part of it."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Any, labels: Any) -> torch.Tensor:
            return self.model(input_ids=inputs, labels=labels).loss

    def holding(kind: Any) -> Any:
        class Holding(kind):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                return loss(inputs["input_ids"], inputs["labels"])

        return Holding

    arguments = {"gradient_accumulation_steps": 2, "logging_steps": 1}
    trainer = trainer_of(tmp_path, holding(Trainer), arguments=arguments, outsize={"stages": 2})
    loss = Holder(trainer.model)
    found = losses_of(trainer)
    assert not trainer.model._forward_pre_hooks
    assert "forward" not in vars(trainer.model)
    other = trainer_of(tmp_path, holding(transformers.Trainer), arguments=arguments)
    loss = Holder(other.model)
    assert found == losses_of(other)
