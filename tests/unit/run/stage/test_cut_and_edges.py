"""Two derivations of what travels agree: run/stage/cut.py (tape), planner/costs/stage_edges.py (graph)."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest
from parity_runs import captured, fresh, random_bounds
from torch import nn

from outsize.planner.costs.stage_edges import edges_between
from outsize.run.stage.boundary import Boundary, backward_edges, forward_edges, step_edges
from outsize.run.stage.cut import Cut, cut, in_runs

MODELS = ("mlp", "unet", "gpt2", "llama", "t5", "mixtral", "bert", "swin", "whisper", "mamba", "resnet18")


@cache
def model_of(name: str) -> nn.Module:
    return fresh(name)


def cut_at(name: str, bounds: tuple[int, ...]) -> Cut:
    found = captured(name, 4)
    return cut(found.tape, model_of(name), in_runs([found.starts[u] for u in bounds]), outputs=False)


def size_bytes(boundary: Boundary, model: nn.Module) -> int:
    if boundary.meta is not None:
        return boundary.meta.size_bytes
    assert boundary.weight is not None
    weight = model.get_parameter(boundary.weight)
    return weight.numel() * weight.element_size()


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("mlp", "unet", "gpt2", "t5", "mixtral", "bert", "swin")
def test_same_edges_and_bytes(name: str, stages: int) -> None:
    graph, model = captured(name, 4).graph, model_of(name)
    draw = random.Random(f"{name}{stages}")
    for _ in range(8):
        bounds = random_bounds(len(graph.units), stages, draw)
        found, expected = cut_at(name, bounds).boundaries, edges_between(graph, bounds)
        forward, backward, step = Counter[tuple[int, int]](), Counter[tuple[int, int]](), Counter()
        for boundary in found:
            size = size_bytes(boundary, model)
            forward.update(dict.fromkeys(forward_edges([boundary]), size))
            backward.update(dict.fromkeys(backward_edges([boundary]), size))
            step.update(dict.fromkeys(step_edges([boundary]), size))
        assert (dict(forward), dict(backward), dict(step)) == (
            dict(expected.forward),
            dict(expected.backward),
            dict(expected.step),
        ), bounds


@pytest.mark.parametrize("name", MODELS)
def test_every_live_instruction_is_in_a_stage_and_owned_ones_in_one(name: str) -> None:
    graph = captured(name, 4).graph
    bounds = random_bounds(len(graph.units), 3, random.Random(name))
    programs = cut_at(name, bounds).programs
    names = [p.weights for p in programs]
    parameters = {n for unit in graph.units for n in unit.parameters}
    assert parameters <= set().union(*names)
    shared = (names[0] & names[1]) | (names[1] & names[2]) | (names[0] & names[2])
    assert not shared & parameters, "a trainable weight lives in one stage"
