"""The trainers of the table on docs/fine-tuning.md, each of a random model and random rows of one length.

A Llama of six layers of 512 units for TRL, two samples of 128 tokens in a batch and eight batches in an
update; a BERT of the same size for sentence-transformers; a DiT for a script of diffusers by Accelerate.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import nn

VOCABULARY: Final = 2048
WIDTH: Final = 512
TOKENS: Final = 128
BATCHES: Final = 8  # of an update
Split = dict[str, Any] | None


class Trained(NamedTuple):
    """Numbers of a run: seconds of each update, what was logged, the weights, and the engines that ran."""

    seconds: list[float]
    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    engines: list[Any]


class Clock(transformers.TrainerCallback):
    """The seconds from the end of one update to that of the next; `told` is called behind each, and with 0
    before the model is made."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self.ends, self._told = [time.perf_counter()], told

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Ends an update."""
        self.ends.append(time.perf_counter())
        self._told(len(self.ends) - 1)

    @property
    def seconds(self) -> list[float]:
        """Of each update."""
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


def words(seed: int, count: int) -> str:
    """So many words of the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(3, VOCABULARY, (count,), generator=draw))


def tokenizer() -> Any:
    """A token for each word."""
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import WhitespaceSplit

    names = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def rows(method: str, count: int) -> Any:
    """Rows as TRL wants them; each is `TOKENS` tokens with its end."""
    from datasets import Dataset

    half = TOKENS // 2
    every: list[dict[str, Any]] = []
    for i in range(count):
        prompt, first, second = words(3 * i, half), words(3 * i + 1, half - 1), words(3 * i + 2, half - 1)
        row: dict[str, Any] = {"prompt": prompt, "chosen": f" {first}", "rejected": f" {second}"}
        if method == "SFT":
            row = {"text": f"{prompt} {first}"}
        elif method == "KTO":
            row = {"prompt": prompt, "completion": f" {first}", "label": i % 2 == 0}
        elif method in ("GRPO", "RLOO"):
            row = {"prompt": prompt}
        every.append(row)
    return Dataset.from_list(every)


def different_words(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text.split()))) + 0.01 * len(text) for text in completions]


def llama(kind: Any) -> nn.Module:
    """Of 6 layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=1376, num_hidden_layers=6,
        num_attention_heads=8, max_position_embeddings=512, num_labels=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    return kind(config)


def arguments(updates: int, batch: int = 2, batches: int = BATCHES) -> dict[str, Any]:
    """What all trainers have."""
    return {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": batches, "max_steps": updates,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no", "bf16": False,
        "disable_tqdm": True, "learning_rate": 1e-3, "gradient_checkpointing": False,
    }  # fmt: skip


def of_trl(name: str, folder: Path, split: Split, updates: int, told: Callable[[int], None]) -> Trained:
    """Trains `SFT`, `DPO LoRA`, ..."""
    import trl

    method, lora = name.split()[0], "LoRA" in name
    base, config = (getattr(trl, method + part) for part in ("Trainer", "Config"))
    settings, more = arguments(updates), dict[str, Any]()
    if method in ("GRPO", "RLOO"):
        settings |= {"num_generations": 2, "max_completion_length": 16, "beta": 0.0}
        settings |= {"gradient_accumulation_steps": 4}
        more["reward_funcs"] = different_words
    head = (
        transformers.LlamaForSequenceClassification if method == "Reward" else transformers.LlamaForCausalLM
    )
    told(0)
    model = llama(head)
    if lora:
        import peft

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]
        more["peft_config"] = peft.LoraConfig(
            r=8, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
        )
    elif method in ("DPO", "KTO"):
        more["ref_model"] = copy.deepcopy(model)
    count = updates * settings["gradient_accumulation_steps"] * settings["per_device_train_batch_size"]
    torch.manual_seed(1)
    trainer = base(
        model=model, args=config(str(folder), **settings), train_dataset=rows(method, count),
        processing_class=tokenizer(), **more,
    )  # fmt: skip
    return trained(trainer, split, told)


def of_sentence_transformers(
    _: str, folder: Path, split: Split, updates: int, told: Callable[[int], None]
) -> Trained:
    """Pairs with negatives in the batch; the loss owns the model."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses, modules

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=6,
        num_attention_heads=8, max_position_embeddings=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    told(0)
    bert, is_there = str(folder.parent / "bert"), folder.parent / "bert" / "there"
    if folder.name == "rank0":  # All ranks read one folder.
        transformers.BertModel(config).save_pretrained(bert)
        tokenizer().save_pretrained(bert)
        is_there.touch()
    while not is_there.exists():
        time.sleep(0.05)
    model = st.SentenceTransformer(modules=[modules.Transformer(bert), modules.Pooling(WIDTH)], device="cpu")
    pairs = [
        {"anchor": words(2 * i, 64), "positive": words(2 * i + 1, 64)} for i in range(updates * BATCHES * 4)
    ]
    trainer = st.SentenceTransformerTrainer(
        model=model, args=st.SentenceTransformerTrainingArguments(str(folder), **arguments(updates, 4)),
        train_dataset=Dataset.from_list(pairs), loss=losses.MultipleNegativesRankingLoss(model),
    )  # fmt: skip
    return trained(trainer, split, told)


def trained(trainer: Any, split: Split, told: Callable[[int], None]) -> Trained:
    """Runs a trainer, and collects its numbers; every rank has the logs, rank 0 the weights."""
    trainer.remove_callback(transformers.PrinterCallback)
    clock = Clock(told)
    trainer.add_callback(clock)
    trainer.train()
    times = ("runtime", "per_second", "time", "total_flos")
    logs = [
        {k: v for k, v in log.items() if not any(t in k for t in times)} for log in trainer.state.log_history
    ]
    if split is None:
        return Trained(clock.seconds, logs, trainer.model.state_dict(), [])
    own = getattr(trainer, "_own", None)
    engines = list(own._engines.values()) if own is not None else [trainer.engine]
    return Trained(clock.seconds, logs, trainer.engine.weights.full_state_dict(), engines)


def of_diffusers(_: str, folder: Path, split: Split, updates: int, told: Callable[[int], None]) -> Trained:
    """A script as diffusers has them, by Accelerate: the noise that a DiT predicts. The plain one calls its
    model microbatch by microbatch, and takes one loss of all, as of a split model's call.
    """
    import accelerate
    import diffusers

    import outsize
    from outsize.integrations.accelerate import Accelerator

    accelerator = (accelerate.Accelerator if split is None else Accelerator)(cpu=True)
    accelerate.utils.set_seed(0)
    told(0)
    model: Any = diffusers.DiTTransformer2DModel(
        num_attention_heads=8, attention_head_dim=64, in_channels=4, num_layers=6, sample_size=16,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    batch = 2 * BATCHES
    images, steps, labels = torch.randn(batch, 4, 16, 16), torch.arange(batch) * 5, torch.arange(batch) % 10
    engines = []
    if split is not None:
        model = outsize.split(model, (images, steps, labels), microbatches=BATCHES, **split)
        engines = [model.engine]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noises = diffusers.DDPMScheduler(num_train_timesteps=100)
    model, optimizer = accelerator.prepare(model, optimizer)
    seconds, logs = list[float](), list[dict[str, float]]()
    for update in range(updates):
        start = time.perf_counter()
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(update))
        given, parts = (noises.add_noise(images, noise, steps), steps, labels), 1 if engines else BATCHES
        each = zip(*(tensor.chunk(parts) for tensor in given), strict=True)
        predicted = torch.cat([model(*part).sample[:, :4] for part in each])
        loss = nn.functional.mse_loss(predicted, noise)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        logs.append({"loss": float(loss)})
        told(update + 1)
    return Trained(seconds, logs, accelerator.get_state_dict(model), engines)


Case = Callable[[str, Path, Split, int, Callable[[int], None]], Trained]
CASES: Final[dict[str, Case]] = {
    **dict.fromkeys(
        ("SFT", "SFT LoRA", "DPO", "DPO LoRA", "Reward", "KTO", "GRPO", "RLOO"), of_trl
    ),
    "sentence-transformers": of_sentence_transformers,
    "diffusers": of_diffusers,
}  # fmt: skip
