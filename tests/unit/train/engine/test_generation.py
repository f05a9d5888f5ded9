"""generate() on a model that is split over three processes gives the tokens of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from splits import plan_of
from tiny_transformers import MODELS, batch_of, built, transformers
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption, BoundaryMismatch
from outsize.ir.plan import stages_from_bounds
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]


def prompt_of(name: str) -> dict[str, Any]:
    batch = batch_of(name)
    del batch["labels"]
    if name == "llama":
        batch["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        batch["attention_mask"][0, :3] = 0
    return batch


def told(model: Callable[..., Any], name: str) -> dict[str, Any]:
    """Tokens by way; each way is drawn from the same generator."""
    found = {}
    for way, options in MODELS[name][3].items():
        torch.manual_seed(11)
        found[way] = model(**prompt_of(name), max_new_tokens=6, **options)
    return found


def split(name: str, stages: int) -> outsize.Plan:
    return outsize.plan(
        built(name), (), batch_of(name), stages=stages, microbatches=2, cluster=f"{stages}xcpu"
    )


def engine_of(name: str, plan: outsize.Plan, group: dist.ProcessGroup | None) -> Engine:
    engine = make_engine(built(name), plan, group)
    batch = batch_of(name)
    engine.step(update=False, **dict[str, Any](batch))
    return engine


# With --all alone: gpt2, qwen3 and mixtral keep a cache as llama does, bart and whisper one as t5 does.
LIKE_OTHERS = ("gpt2", "qwen3", "mixtral", "bart", "whisper")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in LIKE_OTHERS else []) for n in MODELS]
)
@pytest.mark.sample("t5", "mamba")
def test_every_rank_gives_the_tokens_of_one_device(tmp_path: Path, name: str) -> None:
    plan = split(name, 3)
    found = on_ranks(tmp_path, 3, lambda group: told(engine_of(name, plan, group).generate, name))
    expected = told(built(name).eval().generate, name)
    for of_rank in found:
        assert {w: t.tolist() for w, t in of_rank.items()} == {w: t.tolist() for w, t in expected.items()}
    tokens = torch.cat([t.flatten() for t in expected.values()])
    assert len(tokens.unique()) > 2


def test_a_plan_that_cuts_within_attention(tmp_path: Path) -> None:
    """Then the block's own Python runs everywhere, and its cache is on all ranks."""
    found = outsize.capture(built("llama"), (), batch_of("llama"))
    names = [u.name for u in found.units]
    bounds = (0, names.index("model.layers.1.self_attn.k_proj"), names.index("model.layers.2.mlp.up_proj"))
    plan = plan_of(found, (*bounds, len(names)), 2, 1)
    tokens = on_ranks(tmp_path, 3, lambda group: told(engine_of("llama", plan, group).generate, "llama"))
    expected = told(built("llama").eval().generate, "llama")
    assert all(torch.equal(t[way], expected[way]) for t in tokens for way in expected)


def doubting() -> Any:
    """A llama whose root decides on activations."""

    class Doubting(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Twice the logits where they are small."""
            out = super().forward(*args, **kwargs)
            if float(out.logits.detach().abs().mean()) < 1:
                out.logits = out.logits * 2
            return out

    torch.manual_seed(0)
    return Doubting(transformers.LlamaConfig(**MODELS["llama"][2])).train()


def test_a_model_that_runs_by_modules_generates(tmp_path: Path) -> None:
    plan = outsize.plan(doubting(), (), batch_of("llama"), stages=3, microbatches=2, cluster="3xcpu")
    assert plan.form == "modules"

    def work(group: dist.ProcessGroup) -> dict[str, Any]:
        engine = make_engine(doubting(), plan, group)
        engine.step(update=False, **dict[str, Any](batch_of("llama")))
        return told(engine.generate, "llama")

    expected = told(doubting().eval().generate, "llama")
    for tokens in on_ranks(tmp_path, 3, work):
        assert all(torch.equal(tokens[way], expected[way]) for way in expected)


def test_in_one_process_the_model_just_runs() -> None:
    engine = engine_of("gpt2", split("gpt2", 3), None)
    found, expected = (told(m.generate, "gpt2") for m in (engine, built("gpt2").eval()))
    assert all(torch.equal(found[way], expected[way]) for way in expected)


def within_attention(plan: outsize.Plan) -> outsize.Plan:
    """The same with both cuts within the attention of layer 1."""
    graph = outsize.capture(built("llama"), (), batch_of("llama"))
    names = [unit.name for unit in graph.units]
    cuts = [names.index(f"model.layers.1.self_attn.{product}") for product in ("v_proj", "o_proj")]
    devices = tuple(stage.device for stage in plan.stages)
    stages = stages_from_bounds(graph, (0, *cuts, len(names)), devices)
    return plan.model_copy(update={"stages": stages})


def test_it_leaves_everything_as_it_was_and_caches_at_home(tmp_path: Path) -> None:
    plan = within_attention(split("llama", 3))

    def work(group: dist.ProcessGroup) -> tuple[dict[str, bool], list[bool]]:
        engine = engine_of("llama", plan, group)
        model = engine.model
        model.get_submodule("model.layers.1").eval()
        torch.manual_seed(20 + group.rank())  # generate agrees on one for all, and gives it back
        before = everything(model)
        out = engine.generate(**prompt_of("llama"), max_new_tokens=3, do_sample=True, **DETAILED)
        same = {name: equal(value, before[name]) for name, value in everything(model).items()}
        return same, [layer.keys.is_meta for layer in out.past_key_values.layers]

    found = on_ranks(tmp_path, 3, work)
    for same, _ in found:
        assert all(same.values()), [name for name, kept in same.items() if not kept]
    holders = [sum(not on_meta for on_meta in layer) for layer in zip(*(c for _, c in found), strict=True)]
    assert holders == [1, 3, 1, 1]


DETAILED: dict[str, Any] = {"return_dict_in_generate": True}


def everything(model: nn.Module) -> dict[str, Any]:
    """What a generation must not change."""
    kept: dict[str, Any] = {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    kept |= {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    kept |= {f"{n}.training": m.training for n, m in model.named_modules()}
    copies = {n: v.clone() if isinstance(v, Tensor) and not v.is_meta else v for n, v in kept.items()}
    return copies | {"generator": torch.get_rng_state()}


def equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return a is b or a == b
    return a.is_meta == b.is_meta and (a.is_meta or torch.equal(a, b))


def test_what_transformers_hangs_on_the_model_meanwhile_is_gone_afterwards() -> None:
    engine = engine_of("gpt2", split("gpt2", 3), None)
    hooks = {"output_hidden_states": True, "return_dict_in_generate": True}
    first = engine.generate(**prompt_of("gpt2"), max_new_tokens=2, do_sample=False, **hooks)
    assert not any(m._forward_hooks for m in engine.model.modules())
    engine.step(update=False, **dict[str, Any](batch_of("gpt2")))
    again = engine.generate(**prompt_of("gpt2"), max_new_tokens=2, do_sample=False, **hooks)
    assert torch.equal(first.hidden_states[0][1], again.hidden_states[0][1])


def test_what_only_an_owner_sees_is_refused_on_every_rank(tmp_path: Path) -> None:
    plan = split("gpt2", 3)

    def work(group: dist.ProcessGroup) -> str:
        engine = engine_of("gpt2", plan, group)
        with pytest.raises(BoundaryMismatch) as caught:
            engine.generate(
                **prompt_of("gpt2"), max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True
            )
        return caught.value.what

    found = on_ranks(tmp_path, 3, work)
    assert found == ["the ranks have different numbers for what is generated"] * 3


def test_a_model_that_cannot_generate_says_so() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    engine = outsize.parallelize(
        model, (x,), stages=2, microbatches=1, loss_fn=nn.functional.mse_loss, target=x
    )
    with pytest.raises(BadOption, match="Sequential has no generate"):
        engine.generate(x)
