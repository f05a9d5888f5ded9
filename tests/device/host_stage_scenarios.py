"""Models whose frozen weights the host computes with, trained by a plan and by the plain loop.

The functions with a `world` run on ranks (device_ranks.py); `found` of a plan and of the plain loop are equal
bit by bit, since the kernels of the simulated device are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import outsize
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.policies.weights import HOST_COMPUTED
from outsize.train.world.world import World

SAMPLES, MICROBATCHES, STEPS = 8, 4, 2
_SMALL: Final[dict[str, Any]] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: Final[dict[str, Any]] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
_LATENT: Final[dict[str, Any]] = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
_STACKS: Final = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def qwen3_moe() -> nn.Module:
    """Adapters on attention and on the stacks of experts."""
    sizes = {**_SMALL, **_EXPERTS, "num_experts": 4, "num_key_value_heads": 1, "head_dim": 8}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    return adapted(model, target_modules=["q_proj", "v_proj"], target_parameters=_STACKS)


def deepseek_v3() -> nn.Module:
    """A dense layer, and one with experts that are frozen; adapters on attention alone."""
    sizes = {**_SMALL, **_EXPERTS, **_LATENT, "num_key_value_heads": 2}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
    return adapted(model, target_modules=["q_b_proj", "o_proj"])


def llama() -> nn.Module:
    """All is trained, but for the table of the embedding."""
    sizes = {**_SMALL, "num_key_value_heads": 1, "tie_word_embeddings": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.get_input_embeddings().requires_grad_(False)
    return model


def tied_llama() -> nn.Module:
    """The table of the embedding, frozen, is the head as well, which the device computes."""
    sizes = {**_SMALL, "num_key_value_heads": 1, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return adapted(model, target_modules=["q_proj", "up_proj"])


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3, "llama": llama, "tied_llama": tied_llama,
}  # fmt: skip


def adapted(model: nn.Module, **where: Any) -> nn.Module:
    """The model with adapters that change what it computes from the first step on."""
    made: nn.Module = get_peft_model(model, LoraConfig(r=2, **where))  # pyright: ignore[reportArgumentType]
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made


def built(name: str) -> nn.Module:
    """The model of this name, with the same weights each time."""
    torch.manual_seed(0)
    return MODELS[name]()


def batch() -> dict[str, Tensor]:
    """Tokens, which are their own labels."""
    ids = torch.randint(1, 32, (SAMPLES, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def is_large(unit: str) -> bool:
    """Whether the host computes a unit: the embedding's table, and stacks of experts."""
    return "embed_tokens" in unit or "experts" in unit.replace("shared_experts", "")


def plan_of(model: nn.Module, ranks: int, device: str) -> Plan:
    """The plan of `ranks` ranks in which the host computes the large units; two microbatches run together."""
    parts = {name: tensor[: SAMPLES // MICROBATCHES] for name, tensor in batch().items()}
    graph = outsize.capture(model, kwargs=parts)
    large = [is_large(unit.name) for unit in graph.units]
    bounds = [0, *(u for u in range(1, len(large)) if large[u] != large[u - 1]), len(large)]
    count = len(bounds) - 1
    rank_of = [stage * ranks // count for stage in range(count)]
    stages = stages_from_bounds(graph, bounds, [f"{device}:{rank}" for rank in rank_of])
    marked = [
        stage.model_copy(update={"on_host": large[first]})
        for stage, first in zip(stages, bounds, strict=False)
    ]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{ranks}xcpu",
        axes=Axes(pp=ranks),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        schedule="custom",
        actions=tuple(_row([s for s in range(count) if rank_of[s] == rank]) for rank in range(ranks)),
        stages=tuple(marked),
        weights=HOST_COMPUTED.name,
    )


def _row(own: list[int]) -> str:
    pairs = [(at, at + 1) for at in range(0, MICROBATCHES, 2)]
    cells = [f"{s}F{mb}" for pair in pairs for s in own for mb in pair]
    return ",".join(cells + [f"{s}B{mb}" for pair in pairs for s in reversed(own) for mb in pair])


def trained(name: str, ranks: int, device: str, devices: list[str] | None = None) -> dict[str, Any]:
    """What some steps leave; the devices of adapters' states and of the weights that are large."""
    model, given = built(name), dict[str, Any](batch())
    engine = outsize.parallelize(
        model,
        kwargs=given,
        plan=plan_of(model, ranks, device),
        devices=devices,
        optimizer=lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2),
        clip_norm=1.0,
    )
    losses, norms = list[Tensor](), list[Any]()
    for _ in range(STEPS):
        result: Any = engine.step(**given)
        losses.append(result.loss.cpu())
        norms.append(result.grad_norm.cpu())
    tested: Any = engine.evaluate(**given).loss
    optimizer: Any = engine.optimizer
    own = dict(engine.weights.named_parameters())
    states = {str(t.device) for state in optimizer.state.values() for t in state.values() if t.dim()}
    return {
        "losses": losses,
        "norms": norms,
        "tested": tested.cpu(),
        "large": {str(p.device) for n, p in own.items() if is_large(n)},
        "small": {p.device.type for n, p in own.items() if not is_large(n)},
        "states": {place.partition(":")[0] for place in states},
        "weights": {n: t.cpu() for n, t in engine.weights.full_state_dict().items()},
    }


def plain(name: str, device: str) -> dict[str, Any]:
    """What the same steps of a plain loop on one device leave."""
    model = built(name).to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses, norms = list[Tensor](), list[Tensor]()
    for _ in range(STEPS):
        losses.append(_accumulated(model, device, backward=True))
        norms.append(nn.utils.clip_grad_norm_(parameters, 1.0).cpu())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        tested = _accumulated(model, device, backward=False)
    weights = {n: t.detach().cpu() for n, t in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "tested": tested, "weights": weights}


def _accumulated(model: nn.Module, device: str, *, backward: bool) -> Tensor:
    total: Any = None
    for part in batch()["input_ids"].chunk(MICROBATCHES):
        there = part.to(device)
        loss = model(input_ids=there, labels=there).loss
        if backward:
            (loss / MICROBATCHES).backward()
        share = loss.detach() / MICROBATCHES
        total = share if total is None else total + share
    return total.cpu()


# -- on ranks ------------------------------------------------------------------------------------------------


def of_a_rank(world: World, name: str) -> dict[str, Any]:
    """What this rank's part of a plan over all ranks leaves."""
    return trained(name, world.world_size, world.device_type)


def of_the_plain_loop(world: World, name: str) -> dict[str, Any]:
    """What the plain loop leaves on the device of a rank that is alone."""
    return plain(name, f"{world.device_type}:0")
