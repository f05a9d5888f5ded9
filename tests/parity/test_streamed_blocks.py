"""Blocks whose activations are on the host, but for what is computed again: the plain loop to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted import Device
from decoders import NumberDecoder, mean_square
from parity_runs import Combination, at_random, interleaved, reference, split_run
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.device.streams import TorchStreams
from outsize.errors import BadOption
from outsize.ir.plan import Plan, ScheduleName
from outsize.run.collectives.kept_attention import KeptAttention
from outsize.run.moves import activations
from outsize.run.moves.activations import CopyLane
from outsize.train.check.compare import compare
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")
LAYERS, TOKENS, WIDTH, MIB = 6, 2048, 128, 1 << 20


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[CopyLane]:
    """Those that engines make, on which all goes, however small."""
    found: list[CopyLane] = []

    def lane(device: torch.device) -> CopyLane:
        found.append(CopyLane(TorchStreams((str(device),)), str(device), least_bytes=1))
        return found[-1]

    monkeypatch.setattr(activations, "_lane", lane)
    return found


def streamed(plan: Plan) -> Plan:
    return plan.model_copy(update={"recompute": "streamed"})


# What something is written into stays: a copy would miss it.
IN_PLACE = ("unet", "narrow_resnet18")
CASES: list[tuple[str, int, ScheduleName]] = [
    ("gpt2", 1, "gpipe"),
    ("gpt2", 3, "1f1b"),
    ("gpt2", 2, "zero-bubble"),
    ("unet", 2, "gpipe"),
    ("narrow_resnet18", 2, "1f1b"),
]


@pytest.mark.parametrize(("name", "stages", "how"), CASES)
@pytest.mark.sample("gpt2-3-1f1b", "unet")
def test_streamed_blocks_change_no_bit(
    name: str, stages: int, how: ScheduleName, lanes: list[CopyLane]
) -> None:
    """Dropout and BatchNorm as they are; loss, gradients, buffers, parameters after AdamW steps."""
    plan = streamed(at_random(Combination(name, 4, stages, how), seed=1))
    found = compare(reference(name, 4, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found
    assert (sum(len(lane.buffers) for lane in lanes) > 0) is (name not in IN_PLACE), "what was away"


def test_several_stages_on_a_rank(lanes: list[CopyLane]) -> None:
    plan = streamed(interleaved(Combination("gpt2", 4, 4, "interleaved"), 2))
    found = compare(reference("gpt2", 4, True), split_run("gpt2", plan, dropout=True))
    assert found.bit_equal, found
    assert sum(len(lane.buffers) for lane in lanes) > 0


def tokens() -> Tensor:
    return torch.randn(1, TOKENS, 8, generator=torch.Generator().manual_seed(0))


def decoder() -> NumberDecoder:
    return NumberDecoder(WIDTH, 2, LAYERS, multiplies=True)


def planned(how: Any, **wishes: Any) -> Plan:
    torch.manual_seed(0)
    request: dict[str, Any] = {"cluster": "1xcpu", "microbatches": 1, "recompute": how, **wishes}
    return outsize.plan(decoder(), (tokens(),), loss_fn=mean_square, **request)


def engine_of(plan: Plan) -> Engine:
    torch.manual_seed(0)
    return make_engine(decoder(), plan, None, EngineOptions(loss_fn=mean_square))


class Kernels(TorchDispatchMode):
    """Counts the calls of attention's kernel."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def test_attention_is_computed_once_and_all_else_again() -> None:
    """To the bit, however often its kernel is called."""
    calls, grads = dict[str, int](), dict[str, dict[str, Tensor]]()
    for how in ("none", "selective", "streamed"):
        engine = engine_of(_all_blocks(planned("none")) if how == "selective" else planned(how))
        engine.step(tokens(), update=False)
        with Kernels() as kernels:
            engine.step(tokens(), update=False)
        calls[how] = kernels.calls
        grads[how] = {n: p.grad for n, p in engine.weights.named_parameters() if p.grad is not None}
    assert calls == {"none": LAYERS, "selective": 2 * LAYERS, "streamed": LAYERS}
    assert all(torch.equal(grads["none"][n], grads[how][n]) for how in grads for n in grads["none"])


def _all_blocks(plan: Plan) -> Plan:
    (stage,) = plan.stages
    again = stage.model_copy(update={"recompute": "selective", "recomputed": stage.units})
    return plan.model_copy(update={"stages": (again,)})


def test_the_device_holds_what_two_blocks_keep_and_the_account_is_what_is_counted() -> None:
    """What blocks receive and attention returns are a MiB each; of six blocks two are there at a time. A CPU
    has copied at once what counts as leaving, or coming, beside a block.
    """
    predicted, counted = dict[str, int](), dict[str, int]()
    for how in ("selective", "streamed"):
        plan = planned(how) if how == "streamed" else _all_blocks(planned("none"))
        priced, _, _ = outsize.api.price(plan, decoder(), (tokens(),), loss_fn=mean_square)
        assert priced.expected is not None
        predicted[how] = priced.expected.stages[0].activations_bytes
        engine = engine_of(plan)
        engine.step(tokens(), update=False)
        lanes = engine.crew.activations.lanes.values()
        with Device(lambda lanes=lanes: [data for lane in lanes for data in lane.buffers]) as device:
            engine.step(tokens(), update=False)
        counted[how] = device.peak
        away = [data.numel() for lane in lanes for data in lane.buffers]
        assert len(away) == (LAYERS + 1 if how == "streamed" else 0)
    over = {how: predicted[how] - counted[how] for how in predicted}
    assert 0 <= over["selective"] <= 0.06 * counted["selective"]
    assert over["selective"] <= over["streamed"] <= over["selective"] + 2 * MIB
    assert counted["streamed"] < counted["selective"] - (LAYERS - 4) * MIB


def test_nothing_is_kept_of_what_is_no_kernel() -> None:
    kept = KeptAttention()
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with kept.first():
        out = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert out.requires_grad
    assert kept.calls() == []


def test_weights_on_the_host_are_refused_beside_it() -> None:
    with pytest.raises(BadOption, match="weights and activations on the host at once"):
        planned("streamed", weights="host", cluster="1x12GB")
