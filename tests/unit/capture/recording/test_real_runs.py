"""What a capture computes with real numbers: decisions that inputs on meta have no values for, and no op
above the limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Written, linear, two
from splits import captured
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.capture.costs import real_runs
from outsize.capture.costs.real_runs import TooLarge, limited
from outsize.capture.recording import opaque_leaf
from outsize.errors import BadOption


def positions(m: Any, ids: Tensor) -> Tensor:
    """Decides as transformers does where a cache is not used: whether positions are those of one text."""
    at = torch.arange(ids.shape[1])[None]
    packed = (torch.diff(at, prepend=at[:, :1] - 1) != 1).cumsum(-1)
    y = m.a(ids)
    return m.b(y) if (packed[:, -1] == 0).all() else y


def test_a_decision_on_shapes_alone_is_taken_though_inputs_are_on_meta() -> None:
    found = captured(nn.Sequential(two(positions)).to("meta"), torch.zeros(2, 4, device="meta"))
    assert [unit.name for unit in found.graph.units] == ["0.a", "0.b", "sum"]
    assert found.graph.notes == ()


def test_a_decision_on_an_input_on_meta_is_taken_as_for_ones_and_said() -> None:
    def run(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        return m.b(m.a(x)) if keep.all() else x

    keep = torch.ones(4, dtype=torch.bool, device="meta")
    found = captured(two(run).to("meta"), torch.zeros(4, 4, device="meta"), keep)
    assert [unit.name for unit in found.graph.units] == ["a", "b", "sum"]
    (note,) = found.graph.notes
    assert note.endswith("decided as for an input of ones, since the example is on meta")
    assert f"{__file__}:" in note


def boxes(m: Any, x: Tensor, box: Tensor) -> Tensor:
    if (box[:, 2:] <= box[:, :2]).any():
        raise ValueError("a box without an area")
    return m.b(m.a(x))


def test_boxes_on_meta_have_an_area() -> None:
    nowhere = torch.zeros(4, 4, device="meta")
    found = captured(two(boxes).to("meta"), nowhere, nowhere.clone())
    assert [unit.name for unit in found.graph.units] == ["a", "b", "sum"]


def deciding(width: int) -> nn.Module:
    inner = Written(lambda m, x: m.a(x) * 2 if m.a(x).sum() > 0 else m.a(x), a=nn.Linear(width, width))
    return nn.Sequential(inner).to("meta")


def test_a_leaf_that_is_too_large_to_be_computed_is_refused_before_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real_runs, "MOST_FLOPS", 10**6)
    assert captured(deciding(8), torch.zeros(2, 8, device="meta")).graph.units
    with pytest.raises(BadOption, match=r"GFLOP so far; the limit is .*microbatches="):
        outsize.capture(deciding(1024), (torch.zeros(2, 1024, device="meta"),))


def test_weights_that_are_too_large_for_a_copy_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_runs, "MOST_BYTES", 10**6)
    monkeypatch.setattr(opaque_leaf, "observing_real_ops", None)  # nothing of it is run
    with pytest.raises(BadOption, match="GiB of values; the limit is"):
        outsize.capture(deciding(1024), (torch.zeros(2, 1024, device="meta"),))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(64, 64), (64, 64)),
        (nn.Conv2d(8, 8, 3), (2, 8, 8, 8)),
    ],
)
def test_no_op_above_the_limit_begins(
    monkeypatch: pytest.MonkeyPatch, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    begun = list[Any]()
    monkeypatch.setattr(real_runs, "MOST_FLOPS", 10**4)

    class Begun(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            begun.extend(leaf for leaf in args if isinstance(leaf, Tensor) and not leaf.is_meta)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(shape)
    with torch.no_grad(), Begun(), pytest.raises(TooLarge, match="the limit is"), limited():
        layer(x)
    assert not any(given is x for given in begun)


def test_ops_below_the_limit_run() -> None:
    with limited():
        assert linear()(torch.zeros(2, 4)).shape == (2, 4)
