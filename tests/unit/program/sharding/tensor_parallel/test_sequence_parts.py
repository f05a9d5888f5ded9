"""By hand: which values sequence parallelism divides, along which dim, and where it gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from test_styles import Net
from tiny_transformers import batch_of, built
from torch import Tensor, nn
from torch.nn import functional

from outsize.capture.recording.fallbacks import record
from outsize.program.sharding.tensor_parallel.bytes_sent import sent_bytes
from outsize.program.sharding.tensor_parallel.sequence import in_sequence
from outsize.program.sharding.tensor_parallel.styles import Derived, derive
from outsize.program.tape import Tape

X = torch.randn(2, 5, 12)


def both(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tape, Derived, Derived]:
    tape = record(model, args, kwargs)
    derived = derive(tape, model)
    return tape, derived, in_sequence(tape, derived, model)


def found(
    run: Callable[..., Tensor], layers: dict[str, nn.Module], x: Tensor = X
) -> tuple[dict[str, int], set[str]]:
    """Dim by which values are cut in sequence, by what makes them, and the weights that parts enter."""
    tape, before, after = both(Net(run, **layers), x)
    new = after.shares.keys() - before.shares.keys()
    return {tape.instructions[tape.producer[s]].name: after.shares[s].dim for s in new}, set(after.entered)


def pair() -> dict[str, nn.Module]:
    return {"up": nn.Linear(12, 24), "down": nn.Linear(24, 12)}


def test_a_sum_its_norm_and_its_dropout_are_cut_along_the_tokens() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x + functional.dropout(m.down(m.up(x).relu()), 0.1))
        return y + m.down2(m.up2(y).relu())

    more = {"norm": nn.LayerNorm(12), "up2": nn.Linear(12, 24), "down2": nn.Linear(24, 12)}
    cut, entered = found(run, {**pair(), **more})
    assert cut == dict.fromkeys(("down", "dropout", "add", "norm", "down2", "add"), 1)
    assert entered == {"norm.weight", "norm.bias", "down.bias", "down2.bias"}


def test_the_longest_dim_is_cut_and_never_the_features() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.down(m.up(x).relu()).tanh()

    assert found(run, pair(), torch.randn(7, 3, 12))[0] == {"down": 0, "tanh": 0}
    assert found(run, pair(), torch.randn(1, 1, 12))[0] == {}


def test_a_source_behind_which_nothing_can_be_cut_goes_on_as_before() -> None:
    cut, entered = found(lambda m, x: m.down(m.up(x).relu()).cumsum(1), pair())
    assert cut == {}
    assert entered == set()


def test_a_value_that_is_written_in_place_stays_whole() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.down(m.up(x).relu())
        y += x
        return y.tanh()

    assert found(run, pair())[0] == {}


def test_a_norm_that_also_takes_whole_values_takes_no_parts() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.norm(m.down(m.up(m.norm(x)).relu()).tanh())

    cut, entered = found(run, {"norm": nn.LayerNorm(12), **pair()})
    assert cut == {}
    assert entered == set()


def test_a_llama_sends_as_much_as_before_but_for_its_norms() -> None:
    """All-reduces become as many gathers and reduce-scatters, two of which take as long as one; besides, what
    products have read is gathered again.
    """
    model, batch = built("llama"), batch_of("llama")
    tape, derived, after = both(model, **batch)
    totals = []
    for each in (derived, after):
        sent = [traffic.sizes for traffic in sent_bytes(tape, each, model).values()]
        sums = sum(c["forward_sum"] + c["backward_sum"] for c in sent)
        gathers = sum(c["forward_gather"] + c["backward_gather"] - c["again_bytes"] for c in sent)
        totals.append((sums, gathers))
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    (before, nothing), (left, gathered) = totals
    assert nothing == 0
    assert 2 * before + 2 * norms == 2 * left + gathered
    tokens, layers = batch["input_ids"].numel(), model.config.num_hidden_layers
    read = tokens * model.config.hidden_size * 4
    # By q, k and v, by gate and up, and by the head.
    sent = sent_bytes(tape, after, model).values()
    assert sum(traffic.sizes["again_bytes"] for traffic in sent) == (2 * layers + 1) * read
