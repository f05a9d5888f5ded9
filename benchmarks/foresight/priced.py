"""Asks the product what a transformer in a given layout costs: nothing here computes a second or a byte.

A row becomes a model of Hugging Face on meta, captured in bfloat16 as accelerators run it, and a plan of its
layout with as many layers in each stage, which `outsize.price`'s own functions price. One capture serves all
layouts of the model that have the same microbatch.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from outsize.api.problem import case_of, styled
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Expected, Plan, Stage
from outsize.ir.profile import Profile
from outsize.ir.units.names import compress_units
from outsize.planner.costs.roofline import roofline
from outsize.planner.search.evaluate_plan import price

LAYER = re.compile(r"\.(?:h|layers|layer)\.(\d+)(?:[.:]|$)")
CORE = re.compile(r"\.attn:")
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Shape:
    """What a transformer is made from; as it stands, GPT as Megatron-LM's systems fuse it.

    `activation` is one kernel in any case; `scaled` is false where the softmax's kernel scales; `loss` is
    Hugging Face's own (in float32) or `in_half`.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    family: Literal["gpt", "bert", "neox"] = "gpt"
    tied: bool = True
    fused: bool = False
    dropout: float = 0.1
    activation: str = "gelu_pytorch_tanh"
    scaled: bool = False
    loss: Literal["float32", "half"] = "float32"


@dataclass(frozen=True)
class Division:
    """How a training is divided, and on which cluster. Full recompute is that of layers.

    `waits`: the system waits for the collectives that the product runs beside the gradients of weights.
    """

    tp: int
    pp: int
    chunks: int
    dp: int
    microbatch: int
    microbatches: int
    sequence_parallel: bool
    recompute: Recompute
    cluster: str
    waits: bool = False


def priced(shape: Shape, division: Division, optimizer: str = "adamw") -> Expected:
    """What the product expects of the layout. Raises OutsizeError."""
    style = None if division.tp == 1 else "waits" if division.waits else "begins"
    graph, profile = _costs(shape, division.microbatch, _device_of(division.cluster), style)
    if graph.tensor is not None:
        graph.tensor.insist_on_degree(division.tp)
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=division.cluster,
        axes=Axes(pp=division.pp, tp=division.tp, dp_replicate=division.dp),
        batch_size=division.microbatch * division.microbatches * division.dp,
        microbatches=division.microbatches,
        schedule="interleaved" if division.chunks > 1 else "1f1b",
        stages=tuple(stages_of(graph, shape.layers, division)),
        optimizer=optimizer,
        sequence_parallel=division.sequence_parallel,
        precision="bf16",
    )
    found = price(plan, graph, profile, _cluster(division.cluster)).expected
    assert found is not None
    return found


def stages_of(graph: ModelGraph, layers: int, division: Division) -> Iterator[Stage]:
    """Stages of equally many layers; what is before the first or after the last belongs to it.

    Where that is impossible, the first and the last have one less, as zero-bubble runs do for the embedding
    and the loss. Raises BadOption where that is impossible, too.
    """
    count, names, place = division.pp * division.chunks, [u.name for u in graph.units], 0
    less = 1 if layers % count else 0
    if (layers + 2 * less) % count:
        raise BadOption(f"{layers} layers are no multiple of {count} stages", next_step="another layout")
    each = (layers + 2 * less) // count
    members: list[list[int]] = [[] for _ in range(count)]
    again: list[list[int]] = [[] for _ in range(count)]
    seen = False
    for index, name in enumerate(names):
        found = LAYER.search(name)
        place = (int(found[1]) + less) // each if found else (count - 1 if seen else 0)
        members[place].append(index)
        seen |= found is not None
        if found and (
            division.recompute == "full" or (division.recompute == "selective" and CORE.search(name))
        ):
            again[place].append(index)
    for stage, units in enumerate(members):
        yield Stage(
            units=compress_units(names, units),
            device=f"cuda:{stage % division.pp * division.tp * division.dp}",
            recompute="selective" if again[stage] else "none",
            recomputed=compress_units(names, again[stage]),
        )


@lru_cache(maxsize=4)
def _costs(
    shape: Shape, microbatch: int, device: str, divided: Literal["waits", "begins"] | None
) -> tuple[ModelGraph, Profile]:
    """The graph and its units' seconds, with what tensor parallelism divides where it is `divided`, by a
    system that waits for each collective or one in which some only begin.
    """
    cluster, ids = _cluster(f"1x{device}"), torch.zeros(microbatch, shape.length, dtype=torch.long)
    inputs, options = {"input_ids": ids}, dict[str, Any]()
    if shape.loss == "half":
        options = {"target": ids, "loss_fn": in_half}
    else:
        inputs["labels"] = ids
    case = case_of(model_of(shape), (), inputs, options).under("bf16").on(cluster)  # pyright: ignore
    captured = case.captured(microbatch)
    graph = styled(case, captured, Axes(), divided is not None)
    graph = _waiting(graph) if divided == "waits" else graph
    return graph, roofline(graph, cluster.devices[0])


def _waiting(graph: ModelGraph) -> ModelGraph:
    """The graph where no collective has only begun: each is waited for."""
    none = {"begun_sum": 0, "begun_gather": 0, "beside": ()}
    units = (u.model_copy(update={"divided": u.divided.model_copy(update=none)}) for u in graph.units)
    return graph.model_copy(update={"units": tuple(units)})


@lru_cache(maxsize=256)
def _cluster(name: str) -> Cluster:
    return parse_cluster(name)


def _device_of(cluster: str) -> str:
    return cluster.partition("@")[0].rpartition("x")[2]


def in_half(output: Any, labels: Tensor) -> Tensor:
    """The loss in bfloat16, which holds as much as Megatron-LM's does.

    That is a softmax in float32, over which its gradient is written, and the copy of it in bfloat16: the
    bytes of three tensors in bfloat16, as here (result, its gradient, that of the logits). Hugging Face's own
    loss computes in float32 and holds 2.5 times as much.
    """
    logits = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@lru_cache(maxsize=1)
def model_of(shape: Shape) -> nn.Module:
    """The model of Hugging Face, with weights on meta."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _built(shape).train()


def _built(shape: Shape) -> nn.Module:
    found = import_transformers()
    common: dict[str, Any] = {
        "attn_implementation": "sdpa" if shape.fused else "eager",
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "use_cache": False,
    }
    if shape.family == "gpt":
        config = found.GPT2Config(
            n_layer=shape.layers,
            n_embd=shape.hidden,
            n_head=shape.heads,
            n_positions=shape.length,
            activation_function=shape.activation,
            scale_attn_weights=shape.scaled,
            embd_pdrop=shape.dropout,
            resid_pdrop=shape.dropout,
            attn_pdrop=shape.dropout,
            bos_token_id=0,
            eos_token_id=0,
            **common,
        )
        return found.GPT2LMHeadModel(config)
    common |= {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.hidden,
        "max_position_embeddings": shape.length,
    }
    if shape.family == "bert":
        return found.BertForPreTraining(found.BertConfig(**common))
    config = found.GPTNeoXConfig(
        rotary_pct=1.0,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        use_parallel_residual=False,
        **common,
    )
    return found.GPTNeoXForCausalLM(config)
