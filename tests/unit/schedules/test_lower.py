"""Lowering: where sends and receives go, against a plain restatement of the rule and the pictures."""

from __future__ import annotations

import inspect
from textwrap import indent

import pytest

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule, edges_of, together
from outsize.schedules import lower as lower_module
from outsize.schedules.builders import build
from outsize.schedules.families import built
from outsize.schedules.grid import listing
from outsize.schedules.lower import lower
from outsize.schedules.message import RECEIVES, SENDS, Ends, message_of

CHAIN, CHAIN_BACK = frozenset({(0, 1), (1, 2)}), frozenset({(2, 1), (1, 0)})
SKIP = frozenset({(0, 1), (0, 2), (1, 2)})


@pytest.mark.parametrize(
    "schedule",
    [
        lower(build("gpipe", 2, 2), frozenset({(0, 1)}), frozenset({(1, 0)})),
        lower(build("gpipe", 3, 1), SKIP, CHAIN_BACK),
    ],
    ids=["chain", "skip"],
)
def test_docstring_picture_is_the_schedule(schedule: Schedule) -> None:
    assert indent(listing(schedule), "    ") in (inspect.getdoc(lower_module) or "")


@pytest.mark.parametrize("name", built())
def test_compute_is_untouched(name: str) -> None:
    schedule = build(name, 3, 5)
    assert lower(schedule, SKIP, CHAIN_BACK).compute() == schedule


@pytest.mark.parametrize("name", built())
@pytest.mark.parametrize(("forward", "backward"), [(CHAIN, CHAIN_BACK), (SKIP, CHAIN_BACK)])
def test_cells_stand_where_the_rule_says(
    name: str, forward: frozenset[tuple[int, int]], backward: frozenset[tuple[int, int]]
) -> None:
    lowered = lower(build(name, 3, 5), forward, backward)
    ends = Ends(lowered)
    for row in lowered.actions:
        cells = [cell for cell in together(row) if cell[0].kind in COMPUTE]
        at = {action: number for number, cell in enumerate(cells) for action in cell}
        for column, action in enumerate(row):
            before = [a for a in row[:column] if a.kind in COMPUTE]
            if action.kind in SENDS:
                assert ends.producer(message_of(action)) in cells[at[before[-1]]]
                assert before[-1] == cells[at[before[-1]]][-1]
            elif action.kind in RECEIVES:
                ended = sum(cell[-1] in before for cell in cells)
                assert ended == max(0, at[ends.consumer(message_of(action))] - 1)
                assert ended == 0 or before[-1] == cells[ended - 1][-1]


def test_every_edge_carries_every_microbatch() -> None:
    lowered = lower(build("1f1b", 3, 4), SKIP, CHAIN_BACK)
    cells = [a for row in lowered.actions for a in row]
    assert edges_of(cells) == SKIP
    for edge in SKIP:
        sends = [a.microbatch for a in cells if a.kind is Kind.SEND_F and (a.stage, a.peer) == edge]
        assert sends == [0, 1, 2, 3]
    for edge in CHAIN_BACK:
        sends = [a.microbatch for a in cells if a.kind is Kind.SEND_B and (a.stage, a.peer) == edge]
        assert sends == [0, 1, 2, 3]


def test_step_edges_carry_one_message() -> None:
    lowered = lower(build("1f1b", 3, 4), CHAIN, CHAIN_BACK, frozenset({(0, 2), (0, 1)}))
    cells = [a for row in lowered.actions for a in row]
    assert [str(a) for a in cells if a.peer == 2 and a.stage == 0] == ["0SEND_F0@2"]
    assert [str(a) for a in cells if a.peer == 0 and a.stage == 2] == ["2RECV_F0@0"]
    assert len([a for a in cells if a.kind is Kind.SEND_F and a.peer == 1]) == 4


def test_stages_of_one_rank_hand_over_locally() -> None:
    both = Schedule.from_csv("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    lowered = lower(both, CHAIN, CHAIN_BACK)
    assert lowered.to_csv() == "0F0,1RECV_B0,1F0,1SEND_F0,1B0,0B0\n2RECV_F0,2F0,2B0,2SEND_B0\n"


@pytest.mark.parametrize("edge", [(0, 3), (5, 1), (1, 1)])
def test_edges_must_join_two_stages(edge: tuple[int, int]) -> None:
    with pytest.raises(InvalidSchedule, match=f"{edge[0]} -> {edge[1]}"):
        lower(build("gpipe", 3, 2), frozenset({edge}), CHAIN_BACK)


def test_messages_name_both_ends() -> None:
    message = message_of(Action.parse("2SEND_B4@0"))
    assert (message.source, message.destination, message.microbatch) == (2, 0, 4)
    ends = Ends(build("1f1b", 3, 5))
    assert [
        str(a) for a in (ends.producer(message), ends.consumer(message), message.send, message.receive)
    ] == [
        "2B4",
        "0B4",
        "2SEND_B4@0",
        "0RECV_B4@2",
    ]
    assert message_of(message.receive) == message


def test_a_split_backward_hands_its_gradient_on_before_the_weights() -> None:
    lowered = lower(build("zero-bubble", 2, 1), frozenset({(0, 1)}), frozenset({(1, 0)}))
    assert lowered.to_csv() == "0RECV_B0,0F0,0SEND_F0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n"
