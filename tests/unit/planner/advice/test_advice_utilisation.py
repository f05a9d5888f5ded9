"""Idle time taken apart, on simulated steps whose true costs are known."""

from __future__ import annotations

import pytest
from measured_steps import lowered, measured

from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.plan import Axes, Plan, Stage
from outsize.ir.timeline import Span, Timeline
from outsize.planner.advice.utilisation import LAUNCHES, _IdleCauses, utilisation
from outsize.planner.simulation.measured_step import Replay, numbered
from outsize.planner.simulation.simulate import StageCost, bound_s
from outsize.report.wording import idle_next_step, idle_sentence

EVEN = (1.0, 1.0, 1.0, 1.0)


def ran(
    name: str, works: tuple[float, ...], microbatches: int, message_s: float = 0.0, ranks: int | None = None
) -> Timeline:
    costs = [StageCost(w, 2 * w) for w in works]
    return measured(lowered(name, len(works), microbatches, ranks), costs, message_s)


def planned(name: str, stages: int, microbatches: int, batch: int, pp: int | None = None) -> Plan:
    return Plan(
        model="toy",
        fingerprint="0" * 16,
        cluster="4xcpu",
        axes=Axes(pp=pp or stages),
        batch_size=batch,
        microbatches=microbatches,
        schedule=name,  # pyright: ignore[reportArgumentType]
        stages=tuple(Stage(units=(f"l{s}",), device=f"cpu:{s % (pp or stages)}") for s in range(stages)),
    )


def used(
    name: str, works: tuple[float, ...], microbatches: int, batch: int, message_s: float = 0.0
) -> Utilisation:
    devices = [f"cpu:{r}" for r in range(len(works))]
    step = ran(name, works, microbatches, message_s)
    return utilisation(step, planned(name, len(works), microbatches, batch), devices)


@pytest.mark.parametrize(
    ("name", "microbatches", "ranks"),
    [("1f1b", 6, 4), ("gpipe", 3, 4), ("naive", 2, 4), ("interleaved", 4, 2)],
)
def test_the_schedule_is_read_off_the_spans(name: str, microbatches: int, ranks: int) -> None:
    schedule = lowered(name, 4, microbatches, ranks)
    replay = Replay.of(ran(name, (1.0, 0.5, 2.0, 1.5), microbatches, 0.25, ranks))
    assert replay.schedule.compute().actions == schedule.compute().actions
    assert sorted(map(str, replay.messages)) == sorted(
        str(m) for m in Replay.of(ran(name, EVEN, microbatches, 0.0, ranks)).messages
    )
    found = [(c.forward_s, c.backward_s) for c in replay.costs()]
    assert found == [pytest.approx((w, 2 * w)) for w in (1.0, 0.5, 2.0, 1.5)]


def test_bound_is_the_step_without_messages() -> None:
    works = (1.0, 0.5, 2.0, 1.5)
    found = used("1f1b", works, 6, 12, message_s=0.5)
    wanted = bound_s(lowered("1f1b", 4, 6), [StageCost(w, 2 * w) for w in works])
    assert found.bound_s == pytest.approx(wanted)
    assert found.step_s > found.bound_s + 1
    assert used("1f1b", works, 6, 12).reached == pytest.approx(1.0)


def test_a_wait_counts_as_transfer_from_the_end_of_the_producer_on() -> None:
    """Two ranks, one microbatch: rank 1 waits 1 s for the forward, then both messages take 0.5 s."""
    found = used("gpipe", (1.0, 1.0), 1, 2, message_s=0.5)
    assert found.step_s == pytest.approx(7.0)
    assert found.transfer == pytest.approx(2 * 0.5 / 14)
    assert found.busy == pytest.approx((3 / 7, 3 / 7))
    assert found.bubble == pytest.approx(4 / 7)


def test_sequential_and_what_it_gains() -> None:
    """Four even stages: 1 busy of 4; 8 microbatches with 1f1b take 8 + 3 instead of 4 x 8."""
    idle = used("naive", EVEN, 8, 8).idle
    assert idle is not None
    assert (idle.cause, idle.share) == ("sequential", pytest.approx(0.75))
    assert idle.change == (("schedule", "1f1b"), ("microbatches", "8"))
    assert idle.gain == pytest.approx(32 / 11)
    assert idle_sentence(idle) == (
        "devices idle 75 % of the step: the schedule is sequential; "
        "8 microbatches with 1f1b -> predicted 2.9x"
    )
    assert idle_next_step(idle, "outsize run M") == "outsize run M --schedule 1f1b --microbatches 8"
    assert idle_next_step(idle) == "outsize.plan(..., schedule='1f1b', microbatches=8)"


def test_one_microbatch_of_any_schedule_is_sequential() -> None:
    idle = used("gpipe", EVEN, 1, 64).idle
    assert idle is not None
    assert idle.cause == "sequential"
    # 64 are fastest, 32 are within a tenth of it: 67 against 70 quarters
    assert idle.change[1] == ("microbatches", "32")
    assert idle.gain == pytest.approx(4 / (35 / 32))


def test_few_microbatches_and_a_batch_that_cannot_be_cut_further() -> None:
    idle = used("1f1b", EVEN, 2, 16).idle
    assert idle is not None
    assert idle.cause == "few-microbatches"
    assert "2 microbatches are few for 4 stages" in idle_sentence(idle)
    assert idle.change[1] == ("microbatches", "16")
    tight = used("1f1b", EVEN, 2, 2).idle
    assert tight is not None
    assert tight.change == (("batch", "4"), ("schedule", "1f1b"), ("microbatches", "4"))
    assert tight.gain == pytest.approx(2 * 5 / 7)


def test_uneven_stages() -> None:
    idle = used("1f1b", (1.0, 1.0, 8.0, 1.0), 16, 16).idle
    assert idle is not None
    assert idle.cause == "uneven-stages"
    assert "stage 2 computes 73 % of the step's work" in idle_sentence(idle)
    assert idle_next_step(idle, "outsize run M") == "outsize tune MODEL"
    assert 2.3 < idle.gain < 8 / 11 * 4


def test_microbatches_do_not_help_where_one_stage_does_it_all() -> None:
    """1 against 39, one microbatch: the slow stage sets the pace however it is cut; even stages overlap."""
    idle = used("gpipe", (1.0, 39.0), 1, 16).idle
    assert idle is not None
    assert idle.cause == "uneven-stages"
    assert idle_next_step(idle, "outsize run M") == "outsize tune MODEL"
    assert idle.gain == pytest.approx(16 / (16 + 1) * 2)


def test_transfers_and_fewer_of_them() -> None:
    idle = used("1f1b", (0.1, 0.1), 16, 16, message_s=1.0).idle
    assert idle is not None
    assert idle.cause == "transfers"
    assert int(dict(idle.change)["microbatches"]) < 16
    assert idle.gain > 2
    none = used("1f1b", (0.1, 0.1), 1, 1, message_s=1.0).idle
    assert none is not None
    assert (none.change, none.gain) == ((), 1.0)


def test_the_parts_add_up_to_the_idle_share() -> None:
    works = (1.0, 0.5, 2.0, 1.5)
    found, step = used("gpipe", works, 3, 6, 0.3), ran("gpipe", works, 3, 0.3)
    parts = _IdleCauses(Replay.of(step), planned("gpipe", 4, 3, 6), found).parts()
    assert sum(parts.values()) == pytest.approx(found.bubble)
    assert min(parts.values()) > 0.05


def test_busy_devices_need_no_explanation_and_a_shared_one_none_either() -> None:
    assert used("1f1b", EVEN, 16, 16).idle is None
    step, plan = ran("naive", EVEN, 2), planned("naive", 4, 2, 8)
    shared = utilisation(step, plan, ["cpu"] * 4)
    assert (shared.devices, shared.idle) == (("cpu",), None)
    assert shared.busy == pytest.approx((1.0,))


def test_modules_wait_for_each_other() -> None:
    """Their waits are spans, no message is known: the bound is the sum of what all compute."""
    step, plan = ran("naive", EVEN, 2), planned("naive", 4, 2, 8)
    found = utilisation(step, plan.model_copy(update={"form": "modules"}), [f"cpu:{r}" for r in range(4)])
    assert found.bound_s == pytest.approx(found.step_s)
    assert found.idle is not None
    assert "runs by modules" in idle_sentence(found.idle)
    assert idle_next_step(found.idle, "outsize run M") == "outsize explain W210"


def test_launches_on_a_gpu_are_not_called_idle() -> None:
    step, plan, names = ran("naive", EVEN, 2), planned("naive", 4, 2, 8), [f"cuda:{r}" for r in range(4)]
    found = utilisation(step, plan.model_copy(update={"form": "modules"}), names)
    assert found.idle is None
    assert ("note", LAUNCHES) in found.facts()
    assert utilisation(step, plan, names).idle is not None  # of the other form marks are the device's own


def test_groups_of_microbatches_count_on() -> None:
    def span(action: str, start_s: float) -> Span:
        return Span(rank=0, lane="compute", action=action, start_s=start_s, end_s=start_s + 1)

    spans = [span(a, t) for t, a in enumerate(("0F0", "0F1", "0B0", "0B1", "0F0", "0B0", "0F0", "0B0"))]
    assert [str(a) for a, _ in numbered(spans)] == ["0F0", "0F1", "0B0", "0B1", "0F2", "0B2", "0F3", "0B3"]


def test_what_a_terminal_shows() -> None:
    text = str(used("naive", EVEN, 8, 8))
    assert text.splitlines()[1] == "busy       cpu:0 25 %, cpu:1 25 %, cpu:2 25 %, cpu:3 25 %"
    assert "W210       sequential, schedule=1f1b, microbatches=8" in text
    assert "100 % reached" in text
