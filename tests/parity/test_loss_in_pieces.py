"""A loss in pieces of rows: gradients but for rounding, and memory that falls as planned."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption
from outsize.ir.findings import PiecesOfLoss
from outsize.ir.plan import Plan
from outsize.policies.weights import HOSTED

transformers = import_transformers()

METER = Path(__file__).resolve().parents[2] / "benchmarks" / "memory"
SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 61,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of_transformers(model: str, config: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).train()


MODELS = {
    "llama": lambda: of_transformers("LlamaForCausalLM", "LlamaConfig", **SMALL),
    "gpt2, tied": lambda: of_transformers(
        "GPT2LMHeadModel", "GPT2Config", **GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "t5": lambda: of_transformers("T5ForConditionalGeneration", "T5Config", **T5),
    "bert": lambda: of_transformers("BertForMaskedLM", "BertConfig", **SMALL, **NO_DROPOUT),
    "gemma2, softcapped": lambda: of_transformers("Gemma2ForCausalLM", "Gemma2Config", **SMALL, head_dim=4),
}


def tokens() -> dict[str, Any]:
    ids = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 4:] = -100
    labels[3, :2] = -100
    return {"input_ids": ids, "labels": labels}


class Head(nn.Module):
    """An embedding and a head, with losses as people write them."""

    def __init__(self, kind: str, width: int = 16, classes: int = 61) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.body = kind, nn.Embedding(classes, width)
        self.head = nn.Linear(width, classes, bias=kind != "shifted")
        if kind == "frozen":
            self.head.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits, known = self.head(self.body(input_ids)), labels.clamp(min=0)
        if self.kind == "shifted":
            classes = logits.size(-1)
            return functional.cross_entropy(
                logits[:, :-1].reshape(-1, classes), labels[:, 1:].reshape(-1), ignore_index=-100
            )
        if self.kind == "log-probabilities":
            picked = logits.log_softmax(-1).gather(-1, known[..., None]).squeeze(-1)
            return -(picked * (labels >= 0)).sum() / (labels >= 0).sum()
        if self.kind == "nll":
            return functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten())
        if self.kind == "with z-loss":
            z_loss = torch.logsumexp(logits, -1).pow(2).mean()
            return (
                functional.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1) + 1e-3 * z_loss
            )
        if self.kind == "two outputs":
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.std()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def planned(model: nn.Module, batch: dict[str, Any], pieces: int, **options: Any) -> Plan:
    options = {"stages": 1, "recompute": "none", **options}
    cluster = f"{options['stages']}xcpu"
    request = outsize.Request(cluster=cluster, axes="pp", loss_pieces=pieces, **options)
    return outsize.plan(model, (), batch, request=request)


def distances(model: nn.Module, batch: dict[str, Any], plan: Plan) -> tuple[float, float]:
    """Of the loss, and the largest of a gradient relative to its largest element, to the plain model's."""
    plain = copy.deepcopy(model)
    output = plain(**batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    engine = outsize.parallelize(model, (), batch, plan=plan)
    found = engine.step(**batch, update=False).loss
    assert found is not None
    grads = {name: p.grad for name, p in engine.weights.named_parameters()}
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    worst = 0.0
    for name, parameter in plain.named_parameters():
        # The gradient of a key's bias is zero but for rounding, since softmax does not see it.
        if parameter.grad is not None and parameter.grad.abs().max() > 1e-6 * largest:
            grad = grads[name]
            assert grad is not None
            worst = max(worst, float((grad - parameter.grad).abs().max() / parameter.grad.abs().max()))
    return float((found - loss.detach()).abs() / loss.detach().abs()), worst


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("llama", "gpt2, tied", "gemma2, softcapped")
def test_gradients_are_those_of_the_plain_model(name: str) -> None:
    """Nine tokens in four pieces, labels that are ignored, two microbatches over two stages."""
    model, batch = MODELS[name](), tokens()
    plan = planned(model, batch, 4, stages=2, microbatches=2)
    assert plan.loss_pieces == 4
    assert plan.stages[-1].units[-1].endswith("loss_in_pieces")
    loss, gradients = distances(model, batch, plan)
    assert loss < 1e-6
    assert gradients < 1e-6


@pytest.mark.parametrize("kind", ["shifted", "log-probabilities", "nll", "with z-loss", "plain", "frozen"])
def test_any_loss_that_adds_up_over_rows(kind: str) -> None:
    model, batch = Head(kind).double(), tokens()
    loss, gradients = distances(model, batch, planned(model, batch, 3, microbatches=1))
    assert loss < 1e-12
    assert gradients < 1e-12


def test_a_head_that_is_smaller_than_the_layers_is_found() -> None:
    """Six products of the layers make more features than there are words."""
    wide = {**SMALL, "num_hidden_layers": 3, "intermediate_size": 128}
    model, batch = of_transformers("LlamaForCausalLM", "LlamaConfig", **wide).double(), tokens()
    loss, gradients = distances(model, batch, planned(model, batch, 3, microbatches=1))
    assert loss < 1e-12
    assert gradients < 1e-12


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.sample("full")
def test_wide_modules_in_pieces(recompute: Any) -> None:
    """The MLP of each layer keeps what goes in, and its gradients are those of the plain model."""
    model = of_transformers("LlamaForCausalLM", "LlamaConfig", **{**SMALL, "intermediate_size": 56})
    batch = tokens()
    whole = planned(model, batch, 3, stages=2, microbatches=2, recompute=recompute)
    plan = planned(model, batch, 3, stages=2, microbatches=2, module_pieces=4, recompute=recompute)
    assert plan.module_pieces == 4
    loss, gradients = distances(model, batch, plan)
    assert loss < 1e-6
    assert gradients < 1e-6
    assert plan.expected is not None
    assert whole.expected is not None
    held = [sum(s.activations_bytes for s in p.expected.stages) for p in (plan, whole) if p.expected]
    assert held[0] < held[1]


def test_what_does_not_add_up_is_refused() -> None:
    with pytest.raises(BadOption, match="cannot be computed in pieces of rows"):
        planned(Head("two outputs"), tokens(), 3)


def test_a_check_compares_within_rounding() -> None:
    model, batch = MODELS["llama"](), tokens()
    verdict = outsize.check(model, (), batch, plan=planned(model, batch, 4, stages=2, microbatches=2))
    assert verdict.holds
    assert verdict.first_divergence is None


def test_evaluation_returns_all_logits() -> None:
    model, batch = MODELS["llama"](), tokens()
    engine = outsize.parallelize(model, (), batch, plan=planned(model, batch, 4, microbatches=1))
    engine.step(**batch, update=False)
    found = engine.evaluate(**batch).outputs
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(**batch).logits
    assert any(torch.equal(leaf, logits) for leaf in tree_leaves(found) if isinstance(leaf, Tensor))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_memory_falls_as_planned(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real storages of a step, counted: within 5 % of the plan for eight pieces, and a third of one."""
    monkeypatch.syspath_prepend(str(METER))
    batch: dict[str, Any] = {name: torch.randint(0, 4096, (2, 256)) for name in ("input_ids", "labels")}
    real, expected = dict[int, int](), dict[int, int]()
    for pieces in (1, 8):
        model = Head("plain", classes=4096)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            plan = planned(model, batch, pieces, microbatches=1, precision=precision)
            engine = outsize.parallelize(model, (), batch, plan=plan)
            engine.step(**batch)
            meter = importlib.import_module("meter").Meter(1)
            meter.stage = 0
            with meter:
                engine.step(**batch, update=False)
        real[pieces] = meter.peaks[0]
        assert plan.expected is not None
        stage = plan.expected.stages[0]
        expected[pieces] = stage.activations_bytes + stage.gradients_bytes
    assert real[8] < real[1] / 3
    assert abs(real[8] / expected[8] - 1) < 0.05


def test_the_search_takes_pieces_where_logits_do_not_fit() -> None:
    """One device of 1 GB: 1,024 tokens of 50,257 classes are 618 MB with their gradient in one piece."""
    model = Head("plain", 64, 50257)
    batch = {name: torch.zeros(4, 256, dtype=torch.long) for name in ("input_ids", "labels")}

    def planned_on(cluster: str, **options: Any) -> Plan:
        how: dict[str, Any] = {"optimizer": "sgd", "microbatches": 1, **options}
        return outsize.plan(model, (), batch, request=outsize.Request(cluster=cluster, **how))

    plan = planned_on("1x1GB")
    assert plan.loss_pieces > 1
    (reason,) = (each for each in plan.why if isinstance(each, PiecesOfLoss))
    assert reason.piece_bytes * plan.loss_pieces <= reason.whole_bytes
    assert planned_on("1x24GB").loss_pieces == 1
    assert planned_on("1x24GB", loss_pieces=4).loss_pieces == 4


@pytest.mark.full
def test_plans_on_the_host_are_searched_with_pieces_too() -> None:
    """Blocks on the host are stages of the one device; with pieces the batch needs one microbatch."""
    sizes = {**SMALL, "vocab_size": 128256, "hidden_size": 512, "num_hidden_layers": 8}
    sizes["intermediate_size"] = 2048
    with torch.device("meta"):
        model = of_transformers("LlamaForCausalLM", "LlamaConfig", **sizes)
    batch = {name: torch.zeros(8, 1024, dtype=torch.long) for name in ("input_ids", "labels")}
    plan = outsize.plan(model, (), batch, cluster="1x4GB")
    whole = outsize.plan(model, (), batch, cluster="1x4GB", request=outsize.Request(loss_pieces=1))
    assert plan.weights in HOSTED
    assert whole.weights in HOSTED
    assert plan.loss_pieces > 1
    assert plan.expected is not None
    assert whole.expected is not None
    assert plan.expected.step_s < 0.9 * whole.expected.step_s
