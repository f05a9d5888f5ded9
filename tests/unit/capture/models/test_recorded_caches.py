"""A recorded cache is the cache of a real forward: grouped heads, windows, cross attention, states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_transformers import MODELS, SMALL, transformers
from torch import Tensor

from outsize.capture.graph.by_modules import capture_model
from outsize.capture.models.generation import cache_bytes, forward_arguments, generates
from outsize.program.objects import Scope, walk

SAMPLES, TOKENS = 3, 8
IDS = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
WINDOW = ("MistralConfig", "MistralForCausalLM", {**SMALL, "sliding_window": 4})


def built(config: str, kind: str, values: dict[str, Any]) -> Any:
    return getattr(transformers, kind)(getattr(transformers, config)(**values)).eval().requires_grad_(False)


def real_bytes(model: Any, example: dict[str, Any]) -> int:
    """The storages that the cache of a real forward holds."""
    output = model(**example, use_cache=True)
    objects = [part for part in output.values() if not isinstance(part, Tensor | tuple | list)]
    tensors = (value for _, value in walk(objects, Scope()) if isinstance(value, Tensor))
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mamba", "window"])
@pytest.mark.sample("gpt2", "t5", "mamba", "window")
def test_the_bytes_of_a_cache_by_the_units_that_make_it(name: str) -> None:
    model = built(*(WINDOW if name == "window" else MODELS[name][:3]))
    example = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})
    sizes = cache_bytes(model, (), example)
    assert sum(sizes.values()) == pytest.approx(real_bytes(model, example), rel=0.01)
    blocks = {unit.rpartition(".")[0] for unit in sizes}
    assert len(blocks) >= 3
    if name == "llama":
        heads = SMALL["num_key_value_heads"] * SMALL["hidden_size"] // SMALL["num_attention_heads"]
        assert [*sizes.values()] == [2 * SAMPLES * TOKENS * heads * 4] * SMALL["num_hidden_layers"]
        recorded = capture_model(model, (), {**example, "use_cache": False}, None, ()).graph
        assert sizes.keys() <= {unit.name for unit in recorded.units}


def test_a_prompt_has_no_labels_and_scores_its_last_token() -> None:
    llama, t5 = (built(*MODELS[name][:3]) for name in ("llama", "t5"))
    given = forward_arguments(llama, {"input_ids": IDS, "labels": IDS})
    assert {name: value for name, value in given.items() if name != "input_ids"} == {
        "use_cache": False,
        "logits_to_keep": 1,
    }
    assert llama(**given).logits.shape[1] == 1
    decoding = forward_arguments(t5, {"input_ids": IDS, "labels": -IDS})
    assert int(decoding["decoder_input_ids"].min()) == 0
    assert "labels" not in decoding
    assert generates(llama)
    assert not generates(torch.nn.Linear(2, 2))
    assert forward_arguments(torch.nn.Linear(2, 2), {"labels": IDS}) == {"labels": IDS}
