"""Slices of sequences: the numbers of the plain loop within rounding, in less memory."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.run.collectives import sequence_slices
from outsize.run.collectives.sequence_slices import KeptRows, SequenceKeeper
from outsize.run.stage.stage import StageExecutor
from outsize.train.batch.batch import Batch
from outsize.train.variants.variant import Variants

transformers = import_transformers()

METER = Path(__file__).resolve().parents[2] / "benchmarks" / "memory"
TOKENS, WORDS = 16, 61
LLAMA: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def of_transformers(model: str, config: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).train()


MODELS: dict[str, Any] = {
    "llama": lambda: of_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "gpt2": lambda: of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2, attn_pdrop=0.0),
    "own": lambda: Own(),
}


class Own(nn.Module):
    """A decoder as people write it: heads repeated by hand, positions learnt, a z-loss beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(TOKENS, 16)
        self.query, self.keys = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        heads = [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query(x), *self.two(x))]
        query, key, value = heads[0], *(each.repeat_interleave(2, 1) for each in heads[1:])
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.head(self.norm(x + attended.transpose(1, 2).flatten(2)))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + 1e-3 * logits.logsumexp(-1).pow(2).mean()

    def two(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.keys(x).chunk(2, -1)


def tokens() -> dict[str, Any]:
    ids = torch.randint(0, WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 9:] = -100
    labels[3, :6] = -100
    return {"input_ids": ids, "labels": labels}


def planned(model: nn.Module, batch: dict[str, Any], slices: int, **options: Any) -> Plan:
    options = {"stages": 2, "microbatches": 2, "recompute": "none", **options}
    request = outsize.Request(cluster=f"{options['stages']}xcpu", axes="pp", slices=slices, **options)
    return outsize.plan(model, (), batch, request=request)


def gradients(model: nn.Module, batch: dict[str, Any], plan: Plan) -> tuple[float, dict[str, Tensor]]:
    engine = outsize.parallelize(copy.deepcopy(model), (), batch, plan=plan)
    loss = engine.step(**batch, update=False).loss
    assert loss is not None
    return float(loss), {n: p.grad for n, p in engine.weights.named_parameters() if p.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest of a gradient, relative to its largest element; gradients of zero but for rounding are left
    out."""
    assert found.keys() == expected.keys()
    most = max(float(grad.abs().max()) for grad in expected.values())
    pairs = [(found[name], grad) for name, grad in expected.items() if grad.abs().max() > 1e-6 * most]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("llama-2", "gpt2-4", "own-4")
def test_gradients_are_those_of_whole_sequences(name: str, slices: int) -> None:
    """Dropout draws masks of whole sequences; labels are ignored, and shifted over the edges of slices."""
    model, batch = MODELS[name]().double(), tokens()
    whole, in_slices = (planned(model, batch, count) for count in (1, slices))
    assert in_slices.slices == slices
    assert not in_slices.bit_identical
    (loss, expected), (other, found) = (gradients(model, batch, plan) for plan in (whole, in_slices))
    within = 1e-12 if name == "own" else 1e-6  # Those of transformers cast to float32.
    assert abs(loss - other) < within * abs(loss)
    assert distance(found, expected) < within


@pytest.mark.parametrize("options", [
    {"schedule": "gpipe"}, {"schedule": "naive"}, {"stages": 1}, {"microbatches": 1}, {"microbatches": 4},
    {"recompute": "full"}, {"recompute": "selective"}, {"loss_pieces": 3},
    {"loss_pieces": 2, "module_pieces": 2},
])  # fmt: skip
def test_in_any_pipeline(options: dict[str, Any]) -> None:
    model, batch = MODELS["gpt2"](), tokens()
    expected = gradients(model, batch, planned(model, batch, 1, microbatches=options.get("microbatches", 2)))
    found = gradients(model, batch, planned(model, batch, 4, **options))
    assert abs(found[0] - expected[0]) < 1e-6 * abs(expected[0])
    assert distance(found[1], expected[1]) < 1e-5


def test_several_steps_train_as_the_plain_loop() -> None:
    model, batch = MODELS["llama"](), tokens()
    plain = copy.deepcopy(model)
    engine = outsize.parallelize(model, (), batch, plan=planned(model, batch, 4), optimizer=adam)
    optimizer = adam(plain.parameters())
    for _ in range(3):
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = engine.step(**batch).loss
        assert found is not None
        assert abs(float(found) - float(loss.detach())) < 1e-5


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_evaluation_and_outputs_are_of_whole_sequences() -> None:
    model, batch = MODELS["llama"](), tokens()
    plain = copy.deepcopy(model).eval()
    engine = outsize.parallelize(model, (), batch, plan=planned(model, batch, 4, microbatches=1))
    engine.step(**batch, update=False)
    found = engine.evaluate(**batch)
    with torch.no_grad():
        expected = plain(**batch)
    assert found.loss is not None
    assert torch.equal(found.loss, expected.loss)


def test_a_check_compares_within_rounding() -> None:
    model, batch = MODELS["llama"](), tokens()
    verdict = outsize.check(model, (), batch, plan=planned(model, batch, 4))
    assert verdict.holds


def test_keys_and_values_are_in_memory_once_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage keeps those of its layer, of a microbatch's whole sequence, until its first slice is
    back."""
    keepers: list[SequenceKeeper] = []
    most: list[int] = []
    made, end = SequenceKeeper.__init__, KeptRows.end

    def making(self: SequenceKeeper, slices: int) -> None:
        made(self, slices)
        keepers.append(self)

    def ending(self: KeptRows, microbatch: int) -> None:
        most.append(self.rows_bytes)
        end(self, microbatch)

    monkeypatch.setattr(SequenceKeeper, "__init__", making)
    monkeypatch.setattr(KeptRows, "end", ending)
    model, batch = MODELS["llama"](), tokens()
    gradients(model, batch, planned(model, batch, 4, microbatches=1))
    of_a_layer = (
        2 * 4 * TOKENS * 2 * 4 * 4
    )  # Keys and values: samples, tokens, heads, width of a head, bytes.
    assert most == [of_a_layer, of_a_layer]
    assert all(kept.rows_bytes == 0 for keeper in keepers for kept in keeper._stages.values())


def test_ranks_number_programs_by_what_they_record() -> None:
    """Channels of ranks are those of whole programs; slices have numbers of their own."""
    model, batch = MODELS["llama"](), tokens()
    variants = Variants(model, planned(model, batch, 4), None)
    found = [
        variants.find(Batch((), {n: t[:, :end] for n, t in batch.items()}), outputs=False) for end in (8, 16)
    ]
    assert [variant.number for variant in found] == [0, 1]
    numbers = [unit.number for variant in found for unit in variant.slices]
    assert max(numbers) < 0
    assert len({*numbers}) == 8


def test_a_plan_says_what_it_holds() -> None:
    model, batch = MODELS["llama"](), tokens()
    plans = [planned(model, batch, count, microbatches=4) for count in (1, 4)]
    held = [[s.activations_bytes for s in plan.expected.stages] for plan in plans if plan.expected]
    assert held[1][0] < held[0][0]  # Four microbatches: two in flight, or one and a quarter.


def test_real_memory_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real storages of the first of four stages, with four microbatches: less than half in eight slices.

    A CPU writes the masks of attention in pieces out, and saves them; accelerators do not. The meter knows no
    masks of torch's own class.
    """
    monkeypatch.syspath_prepend(str(METER))
    monkeypatch.setattr(sequence_slices, "causal", with_written_mask)
    meter = importlib.import_module("meter").Meter(4)
    run = StageExecutor.forward, StageExecutor.backward

    def metered(method: Any) -> Any:
        def of_stage(self: StageExecutor, *args: Any) -> Any:
            meter.stage = self.program.stage
            return method(self, *args)

        return of_stage

    monkeypatch.setattr(StageExecutor, "forward", metered(run[0]))
    monkeypatch.setattr(StageExecutor, "backward", metered(run[1]))
    ids = torch.randint(0, WORDS, (4, 256))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    config = {**LLAMA, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
    peaks, expected = list[int](), list[int]()
    for slices in (1, 8):
        model = of_transformers("LlamaForCausalLM", "LlamaConfig", **config)
        plan = planned(model, batch, slices, stages=4, microbatches=4, chunks=1)
        engine = outsize.parallelize(model, (), batch, plan=plan)
        engine.step(**batch, update=False)
        meter.peaks, meter.live_bytes = [0] * 4, [0] * 4
        with meter:
            engine.step(**batch, update=False)
        peaks.append(meter.peaks[0])
        assert plan.expected is not None
        expected.append(plan.expected.stages[0].activations_bytes)
    assert peaks[1] < peaks[0] / 2
    assert expected[1] < expected[0] / 2


def with_written_mask(
    function: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    rows, keys = query.shape[-2], key.shape[-2]
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return function(query, key, value, mask, scale=scale, enable_gqa=True)


class Bidirectional(Own):
    """Reads all tokens."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        query, (key, value) = self.query(x)[:, None], [each[:, None] for each in self.two(x)]
        mixed = functional.scaled_dot_product_attention(query[..., :8], key, value)[:, 0]
        return functional.cross_entropy(
            self.head(torch.cat([mixed, mixed], -1)).flatten(0, 1), labels.flatten()
        )


class Centred(Own):
    """Takes the mean over all tokens from each."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        x = x - x.mean(1, keepdim=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Convolved(Own):
    """Reads its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.mix(self.words(input_ids).transpose(1, 2)).transpose(1, 2)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Bidirectional, "it reads rows of later slices"),
        (Centred, "its rows follow from a sum over all rows"),
        (Convolved, "cannot be computed by rows"),
        (lambda: of_transformers("BertForMaskedLM", "BertConfig", **LLAMA), "cannot be computed by rows"),
        (lambda: of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2), "cannot be computed by rows"),
    ],
)
def test_what_reads_later_rows_is_refused_when_it_is_planned(model: Any, what: str) -> None:
    with pytest.raises(BadOption, match=what):
        planned(model(), tokens(), 4)


@pytest.mark.parametrize(
    ("slices", "options", "what"),
    [
        (3, {}, "are equally long"),
        (4, {"schedule": "zero-bubble"}, "knows no slices"),
        (4, {"recompute": "offload"}, "go with stages, replicas and tp"),
        (4, {"exact": True}, "go with stages, replicas and tp"),
    ],
)
def test_what_slices_do_not_run_with(slices: int, options: dict[str, Any], what: str) -> None:
    with pytest.raises(BadOption, match=what):
        planned(MODELS["llama"](), tokens(), slices, **options)


@pytest.mark.parametrize(("length", "slices", "padded"), [(10, 2, 0), (11, 1, 0), (32, 4, 0), (16, 1, 5)])
def test_a_later_batch_goes_in_as_many_slices_as_it_can(length: int, slices: int, padded: int) -> None:
    """Fewer where the plan's do not divide its tokens, and whole where its program reads a written mask."""
    model, first = MODELS["llama"]().double(), tokens()
    batch: dict[str, Any] = {name: torch.cat([each, each], 1)[:, :length] for name, each in first.items()}
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -padded:] = 0
    whole, in_slices = (planned(model, first, count) for count in (1, 4))
    found = Variants(model, in_slices, None).find(Batch((), batch), outputs=False)
    assert len(found.slices or (found,)) == slices
    engines = [outsize.parallelize(copy.deepcopy(model), (), first, plan=plan) for plan in (whole, in_slices)]
    expected, after = (
        [engine.step(**each, update=False).loss for each in (first, batch, first)] for engine in engines
    )
    assert all(a is not None and b is not None for a, b in zip(expected, after, strict=True))
    assert [float(a) for a in after if a is not None] == pytest.approx(
        [float(b) for b in expected if b is not None], rel=1e-6
    )
    ours, theirs = (
        {n: p.grad for n, p in engine.weights.named_parameters() if p.grad is not None} for engine in engines
    )
    assert distance(theirs, ours) < 1e-5
