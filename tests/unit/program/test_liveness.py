"""Hand-written tapes: what is alive, what is replicated, where a cut is legal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outsize.program.liveness import last_reads, legal_cuts, live, replicable
from outsize.program.tape import Instruction, Meta, Modes, Ref, Tape, Weight, backward_slice

GRAD = Modes(True, False, ())
MEAN = Weight("mean", "buffer")


def line(index: int, reads: Sequence[int], out: int | None, **changes: Any) -> Instruction:
    """Glue that reads slots and fills one."""
    fields: dict[str, Any] = {
        "index": index,
        "target": torch.add,
        "args": tuple(Ref(r) for r in reads),
        "kwargs": {},
        "out": None if out is None else Ref(out),
        "frame": "",
        "modes": GRAD,
        "random": False,
        "writes": frozenset(),
        "weights": (),
        "written_weights": (),
        "where": "here:1",
    }
    return Instruction(**{**fields, **changes})


def tape(
    *instructions: Instruction, storages: Sequence[int] = (0, 1, 2, 3, 4, 5), grad: Sequence[int] = ()
) -> Tape:
    """Slot 0 is the input; the last instruction's slot is the output."""
    metas = tuple(
        Meta((2,), (1,), torch.float32, torch.device("cpu"), slot in grad, storage)
        for slot, storage in enumerate(storages)
    )
    return Tape(
        inputs=(0,),
        instructions=instructions,
        metas=metas,
        constants={},
        output=instructions[-1].out,
        loss=None,
        guards=(),
        modes=GRAD,
        opaque=(),
    )


def test_what_no_result_needs_is_dead_but_writes_of_weights_live() -> None:
    t = tape(line(0, [0], 1), line(1, [0], 2), line(2, [0], None, written_weights=(MEAN,)), line(3, [1], 3))
    assert live(t, [3]) == [True, False, True, True]


def test_a_write_into_memory_that_is_needed_lives() -> None:
    t = tape(line(0, [0], 1), line(1, [1], 2, writes=frozenset({1})), line(2, [1], 3), storages=(0, 1, 1, 3))
    assert live(t, [3]) == [True, True, True]
    assert backward_slice(t.instructions, t.metas, [3]) == [0, 1, 2]


def test_replicable_is_glue_of_inputs_alone() -> None:
    t = tape(
        line(0, [0], 1),
        line(1, [0], 2, random=True),
        line(2, [1], 3, target="layer"),
        line(3, [1], 4, weights=(MEAN,)),
        line(4, [2], 5),
    )
    assert replicable(t) == [True, False, False, True, False]


def test_a_buffer_that_somebody_writes_is_no_common_good() -> None:
    t = tape(line(0, [0], 1, weights=(MEAN,)), line(1, [1], 2, weights=(MEAN,), written_weights=(MEAN,)))
    assert replicable(t) == [False, False]


def test_memory_that_owned_code_writes_is_owned_from_its_birth() -> None:
    t = tape(
        line(0, [0], 1),
        line(1, [0], 2, target="layer"),
        line(2, [1, 2], 3, writes=frozenset({1})),
        storages=(0, 1, 2, 1),
    )
    assert replicable(t) == [False, False, False]


def test_a_write_into_the_input_is_not_replicated() -> None:
    t = tape(line(0, [0], 1, writes=frozenset({0})), storages=(0, 0))
    assert replicable(t) == [False]


def test_no_cut_from_a_definition_to_the_last_write() -> None:
    t = tape(
        line(0, [0], 1),
        line(1, [1], 2),
        line(2, [2], 3, writes=frozenset({1})),
        line(3, [3], 4),
        storages=(0, 1, 2, 1, 4),
    )
    assert legal_cuts(t) == [False, False, False, True, False]


def test_all_that_touch_a_written_weight_stay_together() -> None:
    norm: dict[str, Any] = {"target": "norm", "weights": (MEAN,), "written_weights": (MEAN,)}
    t = tape(
        line(0, [0], 1), line(1, [1], 2, **norm), line(2, [2], 3), line(3, [3], 4, **norm), line(4, [4], 5)
    )
    assert legal_cuts(t) == [False, True, False, False, True, False]


def test_a_gradient_taken_inside_the_forward_keeps_its_graph_in_one_stage() -> None:
    t = tape(
        line(0, [0], 1), line(1, [1], 2), line(2, [2], 3), line(3, [3, 2], 4, target=torch.autograd.grad)
    )
    assert legal_cuts(t) == [False, True, False, False, False]


def test_a_gradient_by_weights_keeps_everything_since_their_first_use_in_one_stage() -> None:
    weight = Weight("net.weight", "parameter")
    lines = (
        *(line(0, [0], 1), line(1, [1], 2, weights=(weight,)), line(2, [2], 3)),
        *(line(3, [3], 4, target=torch.autograd.grad, weights=(weight,)), line(4, [4], 5)),
    )
    assert legal_cuts(tape(*lines)) == [False, True, False, False, True, False]


def test_last_reads_ignore_the_dead() -> None:
    t = tape(line(0, [0], 1), line(1, [1], 2), line(2, [1], 3))
    assert last_reads(t, [True, False, True]) == {0: 0, 1: 2}
    assert last_reads(t, [True, True, False]) == {0: 0, 1: 1}
