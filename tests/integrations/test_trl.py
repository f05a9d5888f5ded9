"""TRL's trainers with this package's Trainer before them: their numbers, metrics and weights, split."""

from __future__ import annotations

import copy
import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from forked import in_forks
from patience import free_port
from trainer_worker import transformers

from outsize.integrations.transformers import Trainer

trl: Any = pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")
TIMES = ("runtime", "per_second", "time")
ALL = (
    "sft", "sft completion", "sft padding free", "sft packed", "sft packed wrapped",
    "dpo", "dpo precomputed", "dpo lora", "dpo followed", "reward", "kto", "grpo", "grpo kl lora", "rloo",
)  # fmt: skip
PREDICTING = ("sft", "sft packed", "dpo", "reward")
# Without --all each kind runs in one process or over two: there what ranks do with reference models, with
# adapters, heads and generated tokens, here other data for the same call, and a DPO in both.
HERE = ("sft completion", "sft padding free", "sft packed wrapped", "dpo", "dpo precomputed", "grpo", "rloo")
THERE = ("sft", "sft packed", "dpo", "dpo lora", "dpo followed", "reward", "kto", "grpo kl lora")


def words(seed: int, count: int) -> str:
    """So many words of the vocabulary; lengths of a kind are equal, so that few programs are recorded."""
    draw = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(3, 60, (count,), generator=draw))


def tokenizer_of() -> Any:
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import WhitespaceSplit

    names = {f"w{i}": i for i in range(3, 60)} | {"<pad>": 0, "</s>": 1, "<unk>": 2}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def rows_of(kind: str, count: int) -> Any:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    rows: list[dict[str, Any]] = []
    for i in range(count):
        prompt, first, second = (words(10 * i + part, 5) for part in range(3))
        pair = {"prompt": prompt, "chosen": f" {first}", "rejected": f" {second}"}
        rows.append(
            {
                "sft completion": {"prompt": prompt, "completion": f" {first}"},
                "kto": {"prompt": prompt, "completion": f" {first}", "label": i % 2 == 0},
                "grpo": {"prompt": prompt},
                "grpo kl lora": {"prompt": prompt},
                "rloo": {"prompt": prompt},
            }.get(kind, {"text": f"{prompt} {first}"} if kind.startswith("sft") else pair)
        )
    return Dataset.from_list(rows)


def different_words(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text.split()))) + 0.01 * len(text) for text in completions]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, num_labels=1, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return (
        transformers.LlamaForSequenceClassification if kind == "reward" else transformers.LlamaForCausalLM
    )(config)


def trainer_of(kind: str, folder: Path, split: dict[str, Any] | None) -> Any:
    name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO", "grpo": "GRPO", "rloo": "RLOO"}
    base, config = (getattr(trl, name[kind.split()[0]] + part) for part in ("Trainer", "Config"))
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 2,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2,
        "per_device_eval_batch_size": 2,
    }  # fmt: skip
    more: dict[str, Any] = {}
    if "padding free" in kind:
        settings |= {"padding_free": True, "max_length": None}
    if "packed" in kind:  # two rows of eleven tokens in each
        settings |= {"packing": True, "max_length": 22, "per_device_train_batch_size": 1}
        settings |= {"eval_packing": True, "packing_strategy": "wrapped" if "wrapped" in kind else "bfd"}
    if kind.startswith(("grpo", "rloo")):
        settings |= {"num_generations": 2, "max_completion_length": 4, "beta": 0.1 if "kl" in kind else 0.0}
        settings |= {"gradient_accumulation_steps": 2}
        more["reward_funcs"] = different_words
    model = model_of(kind)
    if "lora" in kind:
        import peft

        more["peft_config"] = peft.LoraConfig(
            r=2, lora_dropout=0.0, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
        )
    elif kind.startswith(("dpo", "kto")):
        more["ref_model"] = copy.deepcopy(model)
        settings["precompute_ref_log_probs"] = "precomputed" in kind
    if "followed" in kind:  # The reference follows the policy after each update.
        settings |= {"sync_ref_model": True, "ref_model_sync_steps": 1}
    if split is not None:
        base = type("Split", (Trainer, base), {})
        more["outsize"] = split
    torch.manual_seed(1)
    trainer = base(
        model=model, args=config(str(folder), **settings), train_dataset=rows_of(kind, 12),
        eval_dataset=rows_of(kind, 4), processing_class=tokenizer_of(), **more,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def ran(kind: str, folder: Path, split: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the trainer logs of two updates and an evaluation, and the weights that it ends with."""
    trainer = trainer_of(kind, folder, split)
    trainer.train()
    trainer.evaluate()
    found = trainer.predict(trainer.eval_dataset).predictions if kind in PREDICTING else None
    predictions = [] if found is None else [torch.as_tensor(each) for each in arrays_in(found)]
    logs = [
        {name: value for name, value in log.items() if not any(time in name for time in TIMES)}
        for log in trainer.state.log_history
    ]
    state = trainer.model.state_dict() if split is None else trainer.engine.weights.full_state_dict()
    plan = None if split is None else (trainer.engine.plan.form, trainer.engine.plan.microbatches)
    weights = {name: weight.clone() for name, weight in state.items()}
    return {"logs": logs, "weights": weights, "plan": plan, "predictions": predictions}


def arrays_in(tree: Any) -> list[Any]:
    return [each for part in tree for each in arrays_in(part)] if isinstance(tree, tuple | list) else [tree]


@cache
def plain(kind: str) -> dict[str, Any]:
    return ran(kind, Path(mkdtemp()))


def insist_on_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["logs"] == expected["logs"]
    assert len(found["predictions"]) == len(expected["predictions"])
    for predicted, other in zip(found["predictions"], expected["predictions"], strict=True):
        assert torch.equal(predicted, other)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


@pytest.mark.sample(*HERE)
@pytest.mark.parametrize("kind", ALL)
def test_one_process_has_the_numbers_of_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    found = ran(kind, tmp_path, {"stages": 2})
    insist_on_equal(found, plain(kind))
    assert found["plan"] == ("tape", 2 if kind.startswith(("grpo", "rloo")) else 3)
    assert any("eval_loss" in log for log in found["logs"])


def over_processes(kind: str, folder: Path, split: dict[str, Any], count: int = 2) -> list[dict[str, Any]]:
    """What each rank has found."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        torch.save(ran(kind, folder, split), folder / f"found{number}.pt")

    in_forks(folder, count, rank)
    return [torch.load(folder / f"found{n}.pt", weights_only=False) for n in range(count)]


@pytest.mark.dist
@pytest.mark.sample(*THERE)
@pytest.mark.parametrize("kind", ALL)
def test_so_have_two_processes(kind: str, tmp_path: Path) -> None:
    expected = plain(kind)  # First: ranks are forks, which have imported by then what it imports.
    found, other = over_processes(kind, tmp_path, {"stages": 2})
    insist_on_equal(found, expected)
    assert [log.get("loss") for log in other["logs"]] == [log.get("loss") for log in found["logs"]]
    assert all(torch.equal(a, b) for a, b in zip(other["predictions"], found["predictions"], strict=True))


def test_each_kind_runs_somewhere() -> None:
    assert {*HERE, *THERE} == {*ALL}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "axes", "count"),
    [("dpo", {"dp_replicate": 3}, 3), ("grpo", {"dp_shard": 3}, 3), ("sft", {"dp_shard": 2}, 2)],
)
def test_replicas_have_them_but_for_rounding(
    kind: str, axes: dict[str, int], count: int, tmp_path: Path
) -> None:
    """Three share the three batches of an update out, two have a part of each."""
    expected = plain(kind)["logs"]
    for found in over_processes(kind, tmp_path, {"stages": 1, "axes": axes}, count):
        assert len(found["logs"]) == len(expected)
        for log, other in zip(found["logs"], expected, strict=True):
            assert log == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_batches_of_an_update_run_in_one_pipeline(tmp_path: Path) -> None:
    """Those of the reference as well; so do the batches of an evaluation and of a prediction."""
    trainer = trainer_of("dpo", tmp_path, {"stages": 2})
    together: list[tuple[int, bool]] = []
    from outsize.train.split.calls import ModelCalls

    run = ModelCalls.together

    def counted(self: Any, calls: Any, microbatches: int = 1) -> Any:
        together.append((len(calls), torch.is_grad_enabled()))
        return run(self, calls, microbatches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelCalls, "together", counted)
        trainer.train()
        assert together == [(3, True), (3, False)] * 2
        together.clear()
        trainer.evaluate()
        assert together == [(2, False)] * 2
        together.clear()
        trainer.predict(trainer.eval_dataset)
    assert together == [(2, False)] * 3  # TRL calls the policy once more for its logits.


def test_a_batch_is_divided_where_microbatches_are_asked_for(tmp_path: Path) -> None:
    """Six microbatches of three batches: two of each. Sums have another order than in the plain trainer."""
    found, expected = ran("dpo", tmp_path, {"stages": 2, "microbatches": 6}), plain("dpo")
    assert found["plan"] == ("tape", 6)
    for log, other in zip(found["logs"], expected["logs"], strict=True):
        assert log == pytest.approx(other, rel=1e-4, abs=1e-5)
