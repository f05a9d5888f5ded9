"""Rules 9 to 11 of docs/capture.md: state, chance, caches, checkpoints, hooks, Python values of leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import batch, linear, two
from splits import captured, check_every_cut
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption, NotCapturable, ReplayMismatch

# -- 9: state and chance -----------------------------------------------------------------------------


def running_mean(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)
    return m.b(y - m.mean)


def counted(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.b(m.a(x)) * m.steps


def with_mean() -> nn.Module:
    model = two(running_mean)
    model.register_buffer("mean", torch.zeros(4))
    return model


@pytest.mark.parametrize("make", [with_mean, lambda: two(counted, steps=0)], ids=["buffer", "counter"])
def test_rule_9_a_module_that_rebinds_its_state_is_one_leaf(make: Callable[[], nn.Module]) -> None:
    found = check_every_cut(nn.Sequential(linear(), make(), linear()), batch(), steps=2)
    assert [u.name for u in found.graph.units] == ["0", "1", "2", "sum"]
    assert found.graph.notes == ("1: it rebinds its own tensors during forward",)


def test_rule_9_a_model_that_rebinds_its_state_is_refused_by_name() -> None:
    with pytest.raises(NotCapturable, match=r"self\.mean: it is a buffer.*small_models\.py:\d+"):
        captured(with_mean(), batch())
    with pytest.raises(NotCapturable, match=r"self\.steps: the next call computes something else"):
        captured(two(counted, steps=0), batch())


def test_rule_9_state_that_nothing_reads_is_noted_and_dropped() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.last, m.steps = m.a(x), m.steps + 1
        m.history.append(m.steps)
        return m.b(m.last)

    model: Any = two(run, last=None, steps=0, history=[])
    found = check_every_cut(model, batch())
    assert sorted(note.partition(":")[0] for note in found.graph.notes) == ["history", "last", "steps"]
    assert (model.last, model.steps, model.history) == (None, 0, [])


def test_rule_9_an_auxiliary_loss_in_an_attribute_may_be_read_by_the_parent() -> None:
    def inner(m: Any, x: Tensor) -> Tensor:
        m.aux = x.square().mean()
        return m.b(m.a(x))

    model = two(lambda m, x: (m.b(m.inner(m.a(x))), m.inner.aux), inner=two(inner, aux=None))
    found = check_every_cut(model, batch())
    assert "inner.aux: set by the forward" in found.graph.notes[-1]


DRAWS: dict[str, Callable[[], float]] = {"python": random.random, "numpy": lambda: float(np.random.rand())}


@pytest.mark.parametrize("whose", DRAWS)
def test_rule_9_chance_of_python_and_numpy_makes_a_leaf_that_is_seeded(whose: str) -> None:
    inner = two(lambda m, x: m.b(m.a(x)) * DRAWS[whose]())
    before = (random.getstate(), np.random.get_state()[1].tobytes())  # pyright: ignore
    found = check_every_cut(nn.Sequential(linear(), inner, linear()), batch(), outputs=False)
    assert [i.name for i in found.tape.instructions if i.random] == ["1"]
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before  # pyright: ignore


@pytest.mark.parametrize("whose", DRAWS)
def test_rule_9_in_the_models_own_forward_chance_is_refused(whose: str) -> None:
    with pytest.raises(NotCapturable, match=rf"random numbers of Python or NumPy.*{__file__}:\d+"):
        captured(two(lambda m, x: m.b(m.a(x) * DRAWS[whose]())), batch())


def test_rule_9_a_generator_of_its_own_makes_a_leaf() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.a(x) + torch.randn(4, generator=torch.Generator().manual_seed(3))

    found = check_every_cut(nn.Sequential(linear(), two(run)), batch())
    assert "1: random numbers of a generator of its own" in found.graph.notes[0]


# -- 10: what leaves hand out by the way -------------------------------------------------------------


class Tally:
    def __init__(self) -> None:
        self.calls = 0


class Counted(nn.LayerNorm):
    """Counts its calls in an object that other leaves count in as well; `uses` makes the count a number."""

    def __init__(self, tally: Tally, uses: bool) -> None:
        super().__init__(4)
        self.tally, self.uses = tally, uses

    def forward(self, input: Tensor) -> Tensor:
        self.tally.calls += 1
        float(np.random.default_rng(0).random())  # Code that is called as it is: this module is a leaf.
        return super().forward(input) * (self.tally.calls if self.uses else 1)


def test_rule_9_leaves_may_count_together_but_not_compute_with_the_count() -> None:
    tally = Tally()
    model = nn.Sequential(linear(), *[Counted(tally, uses=False) for _ in range(3)])
    check_every_cut(model, batch())
    tally = Tally()
    model = nn.Sequential(linear(), *[Counted(tally, uses=True) for _ in range(3)])
    with pytest.raises(NotCapturable, match=r"writes self.tally.calls, which 2 reads"):
        captured(model, batch())


class Cache:
    """Keys of earlier layers, as in transformers."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Attention(nn.Module):
    """A childless module with a weight (a leaf) that fills the cache it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.append(x * 2)
        return x * self.scale + len(cache.keys)


def test_rule_10_a_leaf_that_fills_an_object_is_walked_through() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        cache = Cache()
        return m.c(m.b(m.two(m.one(m.a(x), cache), cache)))

    found = check_every_cut(two(run, c=linear(), one=Attention(), two=Attention()), batch())
    assert [note.partition(":")[0] for note in found.graph.notes] == ["one", "two"]
    assert "one" not in {i.name for i in found.tape.instructions}


def test_rule_10_outputs_that_the_loss_does_not_need_never_cross_a_cut() -> None:
    model = two(lambda m, x: {"loss": m.b(m.a(x)).square().mean(), "cache": [m.a(x) * 3]})
    found = check_every_cut(model, batch(), loss_fn=None)
    dead = next(i for i in found.tape.instructions if i.name == "mul")
    assert next(dead.defines()) not in {v.id for v in found.graph.values}


# -- 11: checkpoints, hooks, Python values -----------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.sample("0.0-True", "0.5-False")
def test_rule_11_checkpoint_regions_run_flat_exactly_and_say_so(reentrant: bool, dropout: float) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(checkpoint(m.block, y, use_reentrant=reentrant) + y)

    block = nn.Sequential(linear(), nn.Dropout(dropout), linear())
    found = check_every_cut(two(run, block=block), batch())
    assert [u.name for u in found.graph.units][:4] == ["a", "block.0", "block.1", "block.2"]
    (note,) = found.graph.notes
    assert note.startswith(f"{__file__}:")
    assert "runs flat" in note


def test_rule_11_a_reentrant_region_without_grad_at_its_door_has_none_inside() -> None:
    model = two(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)))
    found = check_every_cut(model, batch())
    assert not next(i for i in found.tape.instructions if i.name == "a").modes.grad


def test_rule_11_containers_with_hooks_are_instructions_and_their_hooks_fire_each_step() -> None:
    fired: list[str] = []
    model = nn.Sequential(nn.Sequential(linear(), linear()), nn.Sequential(linear()), linear())
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[1].register_full_backward_hook(lambda module, grads, _: (fired.append("back"), (grads[0] * 3,))[1])
    found = check_every_cut(model, batch())
    assert [u.name for u in found.graph.units] == ["0", "1", "2", "sum"]
    fired.clear()
    check_every_cut(model, batch(), microbatches=4, outputs=False)
    # Four cuts, plain and split, four microbatches of two batches; each check runs the undivided one once.
    assert len(fired) == 2 * 8 * 4 + 4


class Sized(nn.Module):
    """A leaf that returns Python numbers beside its tensor."""

    def __init__(self, stable: bool) -> None:
        super().__init__()
        self.scale, self.calls, self.stable = nn.Parameter(torch.ones(4)), 0, stable

    def forward(self, x: Tensor) -> tuple[Tensor, int, float]:
        self.calls += 1
        return x * self.scale, x.shape[1] if self.stable else self.calls, 0.5


def steered(m: Any, x: Tensor) -> Tensor:
    y, count, half = m.sized(m.a(x))
    return m.b(y) * count * half


def test_rule_11_python_values_of_a_leaf_are_guarded() -> None:
    check_every_cut(two(steered, sized=Sized(stable=True)), batch())
    with pytest.raises(ReplayMismatch, match=r"sized returns another Python value.*captured 1, got 2"):
        check_every_cut(two(steered, sized=Sized(stable=False)), batch())


def test_rule_9_a_seed_from_the_operating_system_is_refused() -> None:
    """Reformer draws its hashes so: two plain runs differ, and no verdict could be given."""

    def run(m: Any, x: Tensor) -> Tensor:
        torch.manual_seed(torch.seed() % 1000)
        return m.b(torch.dropout(m.a(x), 0.5, True))

    with pytest.raises(BadOption, match=r"from the operating system.*test_rules_state.py:\d+.*Next: draw"):
        record(two(run), (batch(),), {})
    assert torch.seed.__name__ == "seed"
