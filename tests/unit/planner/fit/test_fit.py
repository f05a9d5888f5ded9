"""Does it fit: the answer against every cut, the changes in their order, each of which holds what it says."""

from __future__ import annotations

from functools import partial

import pytest
from planner_graphs import chain

from outsize.errors import BadOption, TooFewSamples, TooManyStages
from outsize.ir.answers.fit import Fit, RecomputeAdded
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.planner.fit.fit import ModelAndProfile, fit

KIB = 1024


def at(samples: int, precision: str, *, weights: int = 400, least: int = 1) -> ModelAndProfile | None:
    """Twelve units, 4 KiB saved per sample in each; half of it in bfloat16. It takes `least` samples."""
    if samples < least:
        return None
    size = 2 if precision == "bf16" else 4
    return chain(
        [0.1] * 12,
        value_bytes=8,
        weight_bytes=weights * size // 4,
        saved_bytes=size * KIB * samples,
        batch_size=samples,
    )


def devices(count: int, memory_bytes: int) -> Cluster:
    return make_cluster(f"{count}xcpu", "cpu", 1, count, memory_bytes)


def asked(memory_kib: float, count: int = 2, **wishes: object) -> Fit:
    return fit(
        PlanRequest.model_validate({"batch_size": 8, **wishes}), at, devices(count, int(memory_kib * KIB))
    )


def test_yes_with_its_figures() -> None:
    answer = asked(80)
    assert (answer.answer, answer.microbatches, answer.changes, answer.devices_needed) == ("YES", 8, (), None)
    assert [d.device for d in answer.devices] == ["cpu:0", "cpu:1"]
    assert sum(d.parameters for d in answer.devices) == answer.parameters == 1200
    causes = (
        "weights",
        "gradients",
        "master",
        "optimizer",
        "activations",
        "boundary",
        "workspace",
        "context",
    )
    for device in answer.devices:
        assert sum(getattr(device, f"{cause}_bytes") for cause in causes) == device.p50_bytes
        assert device.p50_bytes < device.p95_bytes <= device.memory_bytes
    assert answer.largest[0].saved_bytes == answer.devices[0].in_flight * 4 * KIB


def test_one_device_may_be_enough() -> None:
    assert asked(80).alone
    assert not asked(48).alone
    assert not asked(80, count=1).alone  # there are no others on which replicas would be faster


def test_fewer_samples_in_a_microbatch_cost_nothing() -> None:
    answer = asked(80, microbatches=2)
    assert answer.answer == "YES IF"
    assert answer.changes[0].options == {"microbatches": 8}


def test_recompute_comes_before_what_changes_the_numbers() -> None:
    answer = asked(40)
    assert answer.answer == "YES IF"
    options = [change.options for change in answer.changes]
    assert options[:2] == [{"recompute": "full"}, {"schedule": "naive"}]
    (effect,) = answer.changes[0].effects
    assert isinstance(effect, RecomputeAdded)
    assert effect.more_compute_share == pytest.approx(1 / 3)


@pytest.mark.parametrize("memory_kib", [6, 14, 22, 30, 38, 46, 54])
def test_every_change_named_does_what_it_says(memory_kib: float) -> None:
    for change in asked(memory_kib).changes:
        wishes = {{"batch": "batch_size"}.get(name, name): value for name, value in change.options.items()}
        again = asked(memory_kib, **wishes)
        assert again.answer == "YES"
        assert max(d.share for d in again.devices) == pytest.approx(change.share)


def test_all_devices_are_used_before_anything_is_recomputed() -> None:
    answer = asked(22, count=4, stages=2, schedule="naive", batch_size=1)
    assert answer.changes[0].options == {"stages": 4}


def test_no_says_how_many_devices_would_do() -> None:
    request = PlanRequest(batch_size=1, optimizer="sgd", precision="bf16")
    answer = fit(request, partial(at, weights=40_000), devices(2, 200 * KIB))
    assert (answer.answer, answer.changes) == ("NO", ())
    assert answer.devices_needed == 4
    assert max(d.share for d in answer.devices) > 1


def test_a_microbatch_that_the_model_rejects_is_not_planned() -> None:
    answer = fit(PlanRequest(batch_size=8), partial(at, least=2), devices(2, 200 * KIB))
    assert (answer.answer, answer.microbatches) == ("YES", 4)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(TooFewSamples):
        asked(80, microbatches=9)
    with pytest.raises(TooManyStages):
        asked(80, count=20, stages=13)
    with pytest.raises(BadOption, match=r"3 stages want as many devices"):
        asked(80, stages=3)
    with pytest.raises(BadOption, match=r"optimizer 'adamx'"):
        asked(80, optimizer="adamx")


def test_the_context_of_a_device_is_no_room() -> None:
    answer = asked(80)
    reserved = devices(2, 80 * KIB).model_copy(
        update={
            "devices": tuple(
                d.model_copy(update={"context_bytes": 40 * KIB}) for d in devices(2, 80 * KIB).devices
            )
        }
    )
    again = fit(PlanRequest(batch_size=8), at, reserved)
    assert (answer.answer, again.answer) == ("YES", "YES IF")
    assert again.devices[0].p50_bytes - again.devices[0].context_bytes <= answer.devices[0].p50_bytes
    assert again.devices[0].context_bytes == 40 * KIB + devices(1, KIB).devices[0].matmul_bytes


def test_a_device_smaller_than_its_context_holds_nothing() -> None:
    tiny = devices(2, KIB)
    tiny = tiny.model_copy(
        update={"devices": tuple(d.model_copy(update={"context_bytes": 2 * KIB}) for d in tiny.devices)}
    )
    assert fit(PlanRequest(batch_size=8), at, tiny).answer == "NO"
