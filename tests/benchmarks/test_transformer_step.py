"""The seconds of a transformer's step: sums by hand, the simulator against closed forms, what may not be."""

from __future__ import annotations

import pytest
from transformer import Sharding, Transformer, parameters
from transformer_step import Job, Multipliers, closed_form_s, stage_costs, step_s

from outsize.ir.cluster import Cluster, Link, parse_cluster
from outsize.planner.costs.collectives import collective_s

GPT = Transformer(layers=16, hidden=512, heads=8, seq_len=256, vocabulary=4096)
BY = Multipliers(host_s=0.0, skew_s=0.0, fixed_s=0.0, optimizer=0.0)
FREE = Link(name="free", latency_s=0.0, bytes_per_s=1e30)


def cluster(name: str = "2x8xa100-80gb", free: bool = False) -> Cluster:
    """Two nodes; links that cost nothing where only the pipeline is looked at."""
    found = parse_cluster(name)
    return found.model_copy(update={"inner": FREE, "outer": FREE}) if free else found


def job(pp: int = 1, microbatches: int = 4, **more: int) -> Job:
    """A job of GPT; `more` are fields of Job, or of its Sharding."""
    of_job = {name: more.pop(name) for name in ("chunks", "dp") if name in more}
    sharding = Sharding.model_validate({"microbatch": 2, **more})
    return Job(model=GPT, sharding=sharding, pp=pp, microbatches=microbatches, **of_job)


def test_one_rank_does_one_microbatch_after_the_other() -> None:
    (cost,) = stage_costs(job(), cluster(), BY)
    assert step_s(job(), cluster(), BY) == pytest.approx(4 * (cost.forward_s + cost.backward_s))
    slower = BY.model_copy(update={"fixed_s": 0.5})
    assert step_s(job(), cluster(), slower) - step_s(job(), cluster(), BY) == pytest.approx(0.5)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 3), (4, 4), (4, 9)])
def test_a_pipeline_on_free_links_takes_the_closed_form(pp: int, microbatches: int) -> None:
    asked = job(pp, microbatches)
    costs = stage_costs(asked, cluster(free=True), BY)
    assert max(costs, key=lambda c: c.forward_s + c.backward_s) is costs[-1]  # the head is heavy
    assert step_s(asked, cluster(free=True), BY) == pytest.approx(closed_form_s(asked, costs))


def test_interleaved_chunks_shrink_the_bubble() -> None:
    """m(f + b) + (p - 1)(f + b)/v where all chunks are equal; arXiv 2104.04473, sec. 2.2."""
    level = GPT.model_copy(update={"vocabulary": 1})
    plain = job(4, 8, chunks=4).model_copy(update={"model": level})
    costs = stage_costs(plain, cluster(free=True), BY)
    formula = closed_form_s(plain, costs)
    assert step_s(plain, cluster(free=True), BY) == pytest.approx(formula, rel=0.03)
    one = plain.model_copy(update={"chunks": 1})
    saved = step_s(one, cluster(free=True), BY) - step_s(plain, cluster(free=True), BY)
    busy = sum(c.forward_s + c.backward_s for c in costs) / 4
    # The kernels of embedding and head are in the first and the last chunk alone.
    assert saved == pytest.approx(3 * busy * (1 - 1 / 4), rel=0.12)


@pytest.mark.parametrize("chunks", [1, 2])
def test_beyond_what_is_simulated_each_microbatch_adds_the_same(
    monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    asked = job(4, 24, chunks=chunks)
    short = step_s(asked, cluster(), BY)
    monkeypatch.setattr("transformer_step.KNOWN", 99)
    assert short == pytest.approx(step_s(asked, cluster(), BY), rel=1e-9)


def test_microbatches_that_do_not_divide_are_timed_by_the_closed_form() -> None:
    asked = job(4, 6, chunks=2)
    assert step_s(asked, cluster(), BY) == step_s(asked, cluster(), BY, simulated=False)


def test_a_slow_host_decides() -> None:
    slow = BY.model_copy(update={"host_s": 1.0})
    slower = BY.model_copy(update={"host_s": 2.0})
    assert step_s(job(), cluster(), slower) == pytest.approx(2 * step_s(job(), cluster(), slow))


def test_under_tp_neither_device_nor_host_hides_the_other_wholly() -> None:
    by = BY.model_copy(update={"host_s": 1e-3})
    for asked, adds in ((job(tp=2), True), (job(), False)):
        plain, half, slow = (
            step_s(asked, cluster(), by.model_copy(update=change))
            for change in ({}, {"exposed": 0.5}, {"host_s": 0.0})
        )
        assert half - plain == pytest.approx(0.5 * slow if adds else 0.0)  # the device's seconds are fewer


def test_hosts_on_both_sockets_wait_at_each_collective() -> None:
    waits = BY.model_copy(update={"skew_s": 1.0})
    assert step_s(job(tp=4), cluster(), waits) == step_s(job(tp=4), cluster(), BY)
    # 4 microbatches x (16 layers x 4 collectives + 2 of the embedding + 2 of the head), each 1 s
    assert step_s(job(tp=8), cluster(), waits) == pytest.approx(4 * (16 * 4 + 2 + 2), rel=1e-3)


def test_scores_that_the_fused_softmax_refuses_go_through_more_kernels() -> None:
    """Two heads x one sample on a rank are no multiple of four: twelve launches more in each layer."""
    by = BY.model_copy(update={"host_s": 1.0})
    fused, apart = (step_s(job(tp=4, microbatch=b), cluster(), by) for b in (2, 1))
    assert apart - fused == pytest.approx(4 * 16 * 12)


def test_gradients_are_all_reduced_among_replicas() -> None:
    one, two = job(), job(dp=2)
    expected = collective_s("all_reduce", 2 * one.parameters(0), [0, 1], cluster())
    assert step_s(two, cluster(), BY) - step_s(one, cluster(), BY) == pytest.approx(expected)
    dear = BY.model_copy(update={"inner": 3.0})
    more = step_s(two, cluster(), dear) - step_s(one, cluster(), dear)
    assert more == pytest.approx(3 * expected)


def test_replicas_in_several_nodes_pay_the_network() -> None:
    far = job(dp=2, tp=8)
    dear = BY.model_copy(update={"outer": 2.0})
    near = BY.model_copy(update={"inner": 2.0})
    assert step_s(far, cluster(), dear) > step_s(far, cluster(), BY)
    assert step_s(far, cluster(), near) > step_s(far, cluster(), BY)  # tp stays within the node


@pytest.mark.parametrize(("tp", "pays"), [(1, False), (2, True), (4, True), (8, False)])
def test_gradients_of_replicas_with_some_of_a_nodes_gpus_pay_more(tp: int, pays: bool) -> None:
    asked, dear = job(dp=16 // tp, tp=tp), BY.model_copy(update={"some": 2.0})
    reduced = collective_s("all_reduce", 2 * asked.parameters(0), range(0, 16, tp), cluster())
    more = step_s(asked, cluster(), dear) - step_s(asked, cluster(), BY)
    assert more == pytest.approx(reduced if pays else 0.0)
    near = cluster("1x8xa100-80gb")
    inside = job(dp=8 // tp, tp=tp)
    assert step_s(inside, near, dear) == step_s(inside, near, BY)


def test_recompute_costs_a_second_forward() -> None:
    none, selective, full = (
        sum(c.backward_s for c in stage_costs(asked, cluster(), BY))
        for asked in (
            job(),
            job().model_copy(update={"sharding": Sharding(microbatch=2, recompute="selective")}),
            job().model_copy(update={"sharding": Sharding(microbatch=2, recompute="full")}),
        )
    )
    assert none < selective < full


def test_a_head_of_many_columns_may_be_slower_than_other_matmuls() -> None:
    wide = GPT.model_copy(update={"vocabulary": 51200})
    dear = BY.model_copy(update={"wide_matmul": 2.0})
    for tp, slower in ((1, True), (2, False)):
        asked = job(tp=tp).model_copy(update={"model": wide})
        assert (step_s(asked, cluster(), dear) > step_s(asked, cluster(), BY)) is slower


def test_left_over_layers_go_to_the_middle() -> None:
    uneven = job(4).model_copy(update={"model": GPT.model_copy(update={"layers": 14})})
    assert [uneven.layers(stage) for stage in range(4)] == [3, 4, 4, 3]


def test_parameters_of_the_ranks_are_those_of_the_model_and_a_second_head() -> None:
    assert job().parameters(0) == parameters(GPT)
    ranks = job(4, chunks=2)
    assert sum(ranks.parameters(rank) for rank in range(4)) == parameters(GPT) + 4096 * 512
