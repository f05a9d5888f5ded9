"""The host computes stages whose weights it keeps: bit-equal to the plain loop on one device.

Streams of the simulated device run as late as they may (`lazy`) or by a seed, so a value that the host reads
before its copy has come is NaN, and so is one that the device reads before its copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_ranks import DeviceRanks
from host_stage_scenarios import MODELS, batch, built, plain, plan_of, trained

import outsize
from outsize.device.streams import StreamEvent
from outsize.errors import UnsupportedPlan
from outsize.run.moves.host_stages import _Crossing
from outsize.run.transport.device_copies import DeviceCopy

SIM = pytest.mark.sim
PLACES = [
    pytest.param(["sim:0"], marks=SIM, id="one-lazy"),
    pytest.param(["sim:0", "sim:1"], marks=SIM, id="two-seed1"),
    pytest.param(["sim:0", "sim:1"], marks=[SIM, pytest.mark.full], id="two-lazy"),
    pytest.param(["sim:0", "sim:0"], marks=[SIM, pytest.mark.full], id="shared-seed2"),
    pytest.param(["cpu", "cpu"], id="cpu"),
]


def insist_on_equal(found: dict[str, Any], whole: dict[str, Any]) -> None:
    """The same losses, norms and weights, and the large weights on the host."""
    assert [found["losses"], found["norms"], found["tested"]] == [
        whole["losses"],
        whole["norms"],
        whole["tested"],
    ]
    pairs = ((name, found["weights"][name], tensor) for name, tensor in whole["weights"].items())
    assert [name for name, ours, theirs in pairs if not torch.equal(ours, theirs)] == []


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("qwen3_moe-one-lazy", "deepseek_v3-two-seed1", "tied_llama-two-seed1", "llama-cpu")
def test_a_model_with_host_stages_is_bit_equal(name: str, places: list[str]) -> None:
    found = trained(name, len(places), places[0].partition(":")[0], places)
    insist_on_equal(found, plain(name, places[0]))
    assert found["large"] == {"cpu"}
    assert found["small"] == {places[0].partition(":")[0]}


@pytest.mark.sim
def test_states_of_adapters_on_the_host_are_there() -> None:
    """Those of experts are with their experts, the others on the device."""
    assert trained("qwen3_moe", 1, "sim", ["sim:0"])["states"] == {"cpu", "sim"}


@pytest.mark.sim
@pytest.mark.parametrize("direction", ["down", "up"])
def test_a_value_that_is_read_before_its_copy_is_noticed(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """The second test of the absence of errors: without this wait there is one."""

    def opened(copy: DeviceCopy) -> Any:
        class Passed(StreamEvent):
            def done(self) -> bool:
                return True

            def wait(self) -> None:
                """Returns at once."""

        if copy._link.is_async == (direction == "up"):
            copy.copied = Passed()
        return DeviceCopy.open(copy)

    monkeypatch.setattr(_Crossing, "wait", lambda self: None if self._copy is None else opened(self._copy))
    whole = plain("deepseek_v3", "sim:0")
    found = trained("deepseek_v3", 1, "sim", ["sim:0"])
    assert found["losses"] != whole["losses"]


def test_a_trained_weight_in_two_places_is_refused() -> None:
    model = built("tied_llama")
    model.requires_grad_(True)
    plan = plan_of(model, 1, "cpu")
    given: dict[str, Any] = {**batch()}
    engine = outsize.parallelize(model, kwargs=given, plan=plan)
    with pytest.raises(UnsupportedPlan, match="stages of the device and of the host use it"):
        engine.step(**given)


def test_a_plan_that_was_searched_runs_with_the_same_bits() -> None:
    """On the CPU, which is device and host."""
    model, given = built("deepseek_v3"), dict[str, Any](batch())
    plan = outsize.plan(
        model, kwargs=given, cluster="1xrtx4090-24gb", weights="host-computed", microbatches=4
    )
    assert plan.host_stages
    assert outsize.check(model, kwargs=given, plan=plan).bit_equal


@pytest.fixture(scope="module")
def ranks() -> Iterator[DeviceRanks]:
    started = DeviceRanks("sim", "host_stage_scenarios")
    yield started
    started.end()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("qwen3_moe", "lazy"),
        ("deepseek_v3", "seed1"),
        pytest.param("llama", "lazy", marks=pytest.mark.full),
        pytest.param("tied_llama", "seed2", marks=pytest.mark.full),
    ],
)
def test_two_processes_are_bit_equal(ranks: DeviceRanks, name: str, order: str) -> None:
    """Each has its device, and computes its own host stages."""
    (whole,) = ranks.run("of_the_plain_loop", 1, name=name)
    first, second = ranks.run("of_a_rank", 2, order=order, name=name)
    insist_on_equal(first, whole)
    assert second["losses"] == whole["losses"]
    assert first["large"] | second["large"] == {"cpu"}
    assert first["small"] == second["small"] == {"sim"}
