"""Problem: may several devices share the tokens of a sequence, and what do they send each other then?

Context parallelism: each of n devices has 1 / n of the tokens of every sequence, and all weights. What is
done token by token needs no message. Attention goes round a ring: n - 1 times a device sends the keys and
values that it has to the next one while it attends to them, and in the backward their gradients too, which
take one more hop to get home. A turn takes the longer of both (arXiv 2310.01889, sec. 3):

    forward     c + (n - 1) max(c, s)         c = 1 / n of what the device computes, s = a block's way
    backward    c + (n - 1) max(c, 2 s) + s   (c of the backward)

A model may be split so if every value has a dim of tokens and every op works by the token, as far as the
graph tells: the length is that of what attention takes, its last dim but one. A product by the token has 2 x
tokens x elements of its weights FLOPs. Convolutions, recurrences, norms other than over features, reductions
before the loss, experts, and ops that nobody knows forbid it.

Which sizes are worth a look: each device keeps LEAST_TOKENS, so sequences of 8,192 tokens and more. Llama 3
trained 8,192 tokens without cp and 131,072 with cp 16, 8,192 each (arXiv 2407.21783, table 4).

Deviations: work is balanced over the ring although a mask is causal (as with stripes, arXiv 2311.09431); ops
that move tokens (roll, flip) are not seen; of a module that projects and attends, all is taken as attention.
Complexity: O(units + users of all values). Oracle: tests/unit/planner/test_context.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, final

from outsize.ir.graph import ModelGraph, Unit, Value

LEAST_TOKENS: Final = 4096
ATTENTION: Final = frozenset({"scaled_dot_product_attention", "MultiheadAttention"})
RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"})
# In the name of what normalises over features, token by token.
BY_FEATURE: Final = ("layernorm", "rmsnorm")


@final
@dataclass(frozen=True, slots=True)
class Context:
    """Tokens of a sequence; 0 where it cannot be split, and `why_not`."""

    tokens: int
    why_not: str = ""

    def ways(self, devices: int) -> tuple[int, ...]:
        """Sizes of the axis that are worth a look, 1 among them."""
        most = min(devices, self.tokens // LEAST_TOKENS)
        return (1, *(n for n in range(2, most + 1) if self.tokens % n == devices % n == 0))

    @property
    def refusal(self) -> str:
        """Why no layout has the axis, however many devices there are; empty if some may."""
        if self.tokens >= 2 * LEAST_TOKENS:
            return ""
        return (
            self.why_not
            or f"of {self.tokens:,} tokens two devices would have less than {LEAST_TOKENS:,} each"
        )


def context(graph: ModelGraph) -> Context:
    """Whether tokens may be split, as far as the graph tells."""
    taken = _taken(graph)
    lengths = {v.shape[-2] for u in graph.units if _attends(u) for v in taken[u.index] if len(v.shape) > 2}
    if len(lengths) != 1:
        return Context(0, f"attention over {len(lengths)} lengths" if lengths else "no attention was seen")
    tokens = lengths.pop()
    if tokens == graph.batch_size:
        return Context(0, f"tokens and samples cannot be told apart: {tokens} of each")
    why_not = next(_objections(graph, tokens), "")
    return Context(0 if why_not else tokens, why_not)


def ring_bytes(graph: ModelGraph) -> dict[int, int]:
    """What attends -> the keys and values that go round, of all tokens.

    The two smallest of queries, keys and values; of what comes in one tensor twice its size, at most.
    """
    taken = _taken(graph)
    return {u.index: _key_value(taken[u.index]) for u in graph.units if _attends(u)}


def ring_s(compute_s: float, turn_s: float, ways: int) -> float:
    """Seconds of `ways` turns: `compute_s` in all, each but the last beside a message of `turn_s`."""
    each = compute_s / ways
    return each + (ways - 1) * max(each, turn_s)


def _taken(graph: ModelGraph) -> list[list[Value]]:
    """For each unit the values that it uses."""
    taken: list[list[Value]] = [[] for _ in graph.units]
    for value in graph.values:
        for unit in value.consumers:
            taken[unit].append(value)
    return taken


def _attends(unit: Unit) -> bool:
    return unit.kind in ATTENTION or any(work.family == "attention" for work in unit.forward)


def _key_value(taken: Sequence[Value]) -> int:
    sizes = sorted(v.size_bytes for v in taken if v.requires_grad)
    return sum(sizes[:2]) if len(sizes) > 2 else 2 * sum(sizes[:1])


def _objections(graph: ModelGraph, tokens: int) -> Iterator[str]:
    closing = {u.index for u in graph.units}
    for value in graph.values:
        if prod(value.shape) > 1:
            closing.discard(value.producer)
            if not _has_tokens(value.shape, tokens, graph.batch_size):
                name = graph.units[value.producer].name
                yield f"{name} makes {value.shape}, where no dim is the {tokens:,} tokens"
    for unit in graph.units:
        said = "" if _attends(unit) else _objection(unit, graph, tokens, unit.index in closing)
        if said:
            yield f"{unit.name} {said}"


def _has_tokens(shape: tuple[int, ...], tokens: int, samples: int) -> bool:
    """By themselves or with the samples; the last dim has features."""
    return tokens in shape[1:-1] or shape[0] in (tokens, tokens * samples)


def _objection(unit: Unit, graph: ModelGraph, tokens: int, closing: bool) -> str:
    """Why the unit may not be split; `closing`: it makes nothing but a loss, which parts add up to."""
    families = {work.family for work in unit.forward}
    shapes = [graph.parameter_of[name].shape for name in unit.parameters]
    if "convolution" in families:
        return "convolves, maybe over tokens"
    if unit.kind in RECURRENT:
        return "goes from token to token"
    by_feature = any(word in unit.kind.lower().replace("_", "") for word in BY_FEATURE)
    by_feature &= all(len(shape) == 1 for shape in shapes)
    if families & {"normalisation", "reduction"} and not (by_feature or closing):
        return "reduces over a dim that the graph does not tell"
    if "other" in families:
        return "has an op whose dims are not known"
    flops = sum(work.flops for work in unit.forward if work.family == "matmul")
    by_token = 2 * tokens * graph.batch_size * sum(prod(shape) for shape in shapes if len(shape) > 1)
    return "" if flops in (0, by_token) else "has a product that is not by the token"
