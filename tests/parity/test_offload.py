"""Weights on the host: the plain loop to the bit, and never more on the device than two stages."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from parity_runs import STEPS, Combination, at_random, batch_of, engine_for, reference, split_run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import case

from outsize.ir.plan import Axes, Plan, Recompute
from outsize.run.hosted import Hosted
from outsize.run.residency import Residency
from outsize.train.engine import Engine
from outsize.train.parity import compare

MODELS = ["resnet50", "deeplabv3", "gpt2", "llama", "t5", "mixtral", "unet"]
SHARE = {"resnet50": 0.5}


def on_host(name: str, stages: int = 6, microbatches: int = 2, recompute: Recompute = "full") -> Plan:
    """Random cuts, all on one device."""
    plan = at_random(Combination(name, microbatches, stages, "gpipe"), seed=0)
    own = tuple(stage.model_copy(update={"device": "cpu:0"}) for stage in plan.stages)
    one = {"axes": Axes(), "cluster": "1xcpu", "weights": "host", "stages": own, "recompute": recompute}
    return plan.model_copy(update=one)


def residency_of(engine: Engine) -> Residency:
    together: Any = engine.crew._together  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(together, Hosted)
    return together.residency


class Device(TorchDispatchMode):
    """Counts the bytes of what is made under it, but for what is on the host."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._residency, self._known, self.alive, self.peak = residency_of(engine), dict[int, int](), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._count(tensor)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or any(storage.data_ptr() == host for host in self._host()):
            return
        self._known[key] = size
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.alive -= self._known.pop(key)

    def _host(self) -> list[int]:
        blocks = self._residency._blocks
        return [t.data_ptr() for b in blocks for t in (b.values, b.gradients) if t is not None]


@pytest.mark.parametrize("name", MODELS)
def test_bit_equal_to_the_plain_loop(name: str) -> None:
    """Loss, gradients, buffers, and parameters after AdamW steps."""
    differences = compare(reference(name, 2), split_run(name, on_host(name)))
    assert differences.bit_equal, differences


@pytest.mark.parametrize("name", MODELS)
def test_steps_that_begin_before_the_backward_has_ended(name: str) -> None:
    engine, batch, wanted = engine_for(name, on_host(name)), batch_of(case(name)), reference(name, 2)
    for _ in range(STEPS):
        engine.step(*batch.args, target=batch.target or None, **batch.kwargs)
    wrong = [n for n, p in engine.model.named_parameters() if not torch.equal(p, wanted.parameters[n])]
    assert wrong == []
