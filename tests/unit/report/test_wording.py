"""Every finding has one sentence, every piece of advice a next step; plain text for each."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin

import pytest
import samples

from outsize.ir.answers.advice import Advice, Lever, MemoryLeft, ReplicasFaster
from outsize.ir.answers.fit import Certainty, Effect
from outsize.ir.findings import (
    REJECTIONS,
    Bottleneck,
    DoesNotFit,
    Finding,
    Foresight,
    FullestDevice,
    HostMemoryShort,
    HostStages,
    MemoryShortage,
    NoContextParallel,
    NotChosen,
    PeakMargin,
    Reason,
    SlowestStage,
)
from outsize.ir.offload import Bound
from outsize.ir.plan import Plan
from outsize.report.wording import advised, document, next_step, options_text, sentence

KINDS = Finding.__subclasses__()


UNIONS = {
    "reason": set(get_args(get_args(Reason)[0])),
    "bottleneck": set(get_args(get_args(Bottleneck)[0])),
    "effect": set(get_args(get_args(Effect)[0])),
    "certainty": set(get_args(get_args(Certainty)[0])),
    "advice": set(get_args(Advice)),
    "lever": set(get_args(Lever)),
}


def sample(kind: type[Finding]) -> Finding:
    """A finding of a kind with some figure in each field."""
    return kind.model_validate({name: figure(field.annotation) for name, field in kind.model_fields.items()})


def figure(annotation: Any) -> Any:
    """A value of a field's type; a code is the first that there is."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return inner[0]
    if origin is tuple:
        return tuple(figure(one) for one in inner if one is not ...)
    if origin is dict:
        return {"pp": 2} if inner[1] is int else {"pp": "2"}
    if inner:  # a union with None
        return figure(inner[0])
    if annotation is Bound:
        return Bound(compute_s=2.0, to_device_s=1.0, to_host_s=1.0, optimizer_s=1.0)
    if hasattr(annotation, "model_fields"):
        return {name: figure(field.annotation) for name, field in annotation.model_fields.items()}
    return {int: 2, float: 0.5, bool: True, str: "name"}[annotation]


def test_every_code_has_a_wording_and_every_wording_a_code() -> None:
    assert set(sentence.registry) - {object, Finding} == set(KINDS)
    assert set(next_step.registry) - {object, Finding} == UNIONS["advice"] | UNIONS["lever"]


def test_every_finding_can_be_in_an_answer_under_its_own_code() -> None:
    assert set.union(*UNIONS.values()) | {PeakMargin, Foresight} == set(KINDS)
    for kinds in UNIONS.values():
        assert len({kind.model_fields["code"].default for kind in kinds}) == len(kinds)
    assert set(REJECTIONS) < UNIONS["reason"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wording_is_one_line_of_words_and_figures(kind: type[Finding]) -> None:
    finding = sample(kind)
    text = sentence(finding)
    assert text
    assert not re.search(r"\n|\{|None|  |Finding|code=", text), text
    assert kind.model_validate_json(finding.to_json()) == finding


def test_a_finding_without_wording_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="PeakMargin is no advice"):
        next_step(PeakMargin(unseen_share=0.1))


def test_a_stage_and_a_device() -> None:
    slowest = SlowestStage(stage=1, units=("h.3",), compute_s=0.15, share=0.57, even_share=0.5)
    assert sentence(slowest) == (
        "stage 1 (h.3) sets the pace: its forward and backward take 150 ms per microbatch, 57 % of the work; "
        "an even share is 50 %"
    )
    full = FullestDevice(
        device="cpu:0",
        used_bytes=3 << 30,
        memory_bytes=4 << 30,
        microbatches_in_flight=1,
        largest=(("wte", 1 << 30),),
    )
    assert sentence(full) == (
        "cpu:0 is the fullest device: 3.0 GiB of 4.0 GiB with 1 microbatch in flight; its largest units are "
        "wte 1.0 GiB"
    )


def test_numbers_that_nearly_agree_have_the_digits_that_tell_them_apart() -> None:
    short = MemoryShortage(stage=2, device="cpu:1", needs_bytes=(1 << 30) + (1 << 20), room_bytes=1 << 30)
    assert sentence(short) == "stage 2 needs 1.001 GiB, cpu:1 has room for 1.000"
    alone = short.model_copy(update={"stage": None, "needs_bytes": 2 << 30})
    assert sentence(alone) == "cpu:1 needs 2.0 GiB, it has room for 1.0"


def test_what_was_not_chosen() -> None:
    other = NotChosen(
        schedule="interleaved",
        microbatches=8,
        stages_per_device=4,
        axes={"pp": 2, "tp": 2},
        weights="resident",
        sequence_parallel=False,
        differs=("axes",),
        step_s=4.5,
        chosen_step_s=3.66,
        as_fast=False,
        more_bytes=0,
        bit_identical=True,
    )
    assert sentence(other) == (
        "interleaved (4 stages a device) with 8 microbatches on pp 2 x tp 2: 4.50 s a step instead of 3.66 "
        "s, 23 % slower; its results are bit-identical to one device's"
    )
    as_fast = other.model_copy(
        update={"as_fast": True, "differs": ("weights", "sequence_parallel"), "bit_identical": False}
    )
    assert sentence(as_fast) == (
        "interleaved (4 stages a device) with 8 microbatches, weights resident, not sequence parallel: as "
        "fast within a percent, with no less memory"
    )
    no_fit = DoesNotFit(
        schedules=("gpipe", "1f1b"),
        microbatches=4,
        stages_per_device=1,
        axes={"pp": 4},
        weights="resident",
        shortage=MemoryShortage(stage=0, device="cpu:0", needs_bytes=2 << 30, room_bytes=1 << 30),
    )
    assert sentence(no_fit) == (
        "gpipe, 1f1b with 4 microbatches: at best stage 0 needs 2.0 GiB, cpu:0 has room for 1.0"
    )


def test_the_reason_against_context_parallelism_is_that_of_the_walk() -> None:
    assert sentence(NoContextParallel(refused="h.5 cannot be divided")) == "cp: h.5 cannot be divided"


def test_what_the_host_computes() -> None:
    found = HostStages(
        units=tuple(f"h.{n}.experts" for n in range(4)),
        lasting_bytes=8 << 30,
        saved_bytes=1 << 30,
        host_s=2.5,
        flops_per_s=5.3e12,
        bytes_per_s=1.6e11,
        is_assumed=True,
        host_memory_bytes=64 << 30,
    )
    assert sentence(found) == (
        "the host computes 4 units (h.0.experts to h.3.experts), whose weights stay there: 8.0 GiB with "
        "adapters and states, and 1.0 GiB saved of 64.0 GiB; it takes 2.50 s of a step, at 5.3 TFLOP/s and "
        "160 GB/s of its memory, which are assumed (host_flops_per_s, host_bytes_per_s)"
    )


def test_a_disk_of_unknown_speed() -> None:
    short = HostMemoryShort(
        host_memory_bytes=1 << 30, missing_bytes=1 << 30, disk_bytes_per_s=None, disk_s=None
    )
    assert sentence(short).endswith("whose speed the cluster does not say (disk_bytes_per_s)")


def test_advice_says_what_to_type() -> None:
    replicas = ReplicasFaster(
        cluster="2xcpu",
        replicas=2,
        sharded=False,
        samples_per_s=48.0,
        pipeline_samples_per_s=24.0,
        ratio=2.0,
    )
    assert next_step(replicas) == "outsize plan MODEL --cluster 2xcpu --axes dp_replicate=2"
    free = MemoryLeft(device="cpu:1", room_bytes=1 << 20)
    assert advised(free) == "1.0 MiB are free on cpu:1, the fullest device. Next: a larger --batch"
    assert document(free) == {
        "code": "memory",
        "device": "cpu:1",
        "room_bytes": 1 << 20,
        "sentence": "1.0 MiB are free on cpu:1, the fullest device",
        "next_step": "a larger --batch",
    }


def test_options_are_what_one_types() -> None:
    assert options_text({"dp_shard": 2, "recompute": "full"}) == "--axes dp_shard=2 --recompute full"


def test_a_plan_of_version_one_is_read_without_its_sentences(plan_file: dict[str, Any]) -> None:
    old = {**plan_file, "version": 1, "why": ["stage 0 sets the pace"]}
    old["expected"] = {**plan_file["expected"], "limited_by": "links", "margins": ["P95 adds 1 %"]}
    plan = Plan.of_document(old)
    assert (plan.version, plan.why) == (2, ())
    assert plan.expected is not None
    assert (plan.expected.limited_by, plan.expected.margins) == (None, ())
    with pytest.raises(ValueError, match="version"):
        Plan.of_document({**plan_file, "version": 3})


@pytest.fixture
def plan_file() -> dict[str, Any]:
    """A plan as its file has it."""
    return samples.plan().model_dump(mode="json")
