"""Problem: may several devices share the tokens of a sequence, as far as the graph tells?

Context parallelism: each of n devices has 1 / n of the tokens of every sequence, and all weights. Ops that
work token by token need no message; attention gathers all keys and values (program/context_parallel). What a
program really allows is known when it is walked; the search asks here which sizes are worth a try.

A model can be split if every value has a dim of tokens and every op works token by token, as far as the graph
tells: the length is that of attention's inputs, their last dim but one. A product token by token has 2 x
tokens x elements of its weights FLOPs. Convolutions, recurrences, norms other than over features, reductions
before the loss, experts, and unknown ops forbid it.

Sizes to try: each device keeps at least LEAST_TOKENS, so only sequences of 8,192 tokens and more are split.
Llama 3 trained 8,192 tokens without cp and 131,072 with cp 16, 8,192 each (arXiv 2407.21783, table 4).

Deviations: ops that move tokens (roll, flip) are not seen; a module that projects and attends counts as
attention alone. Complexity: O(units + users of all values). Oracle:
tests/unit/planner/costs/test_context_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, final

from outsize.ir.findings import NoContextParallel, NoContextReason
from outsize.ir.graph import MATMULS, ModelGraph, Unit, Value

LEAST_TOKENS: Final = 4096
ATTENTION: Final = frozenset({"scaled_dot_product_attention", "MultiheadAttention"})
RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"})
# These words are in the names of modules that normalise over features, token by token.
BY_FEATURE: Final = ("layernorm", "rmsnorm")


@final
@dataclass(frozen=True, slots=True)
class Context:
    """Holds the tokens of a sequence; 0 where it cannot be split, for the reason `why_not`."""

    tokens: int
    why_not: NoContextParallel | None = None

    def sizes(self, devices: int) -> tuple[int, ...]:
        """Returns the sizes of the axis to try, 1 among them."""
        largest = min(devices, self.tokens // LEAST_TOKENS)
        return (1, *(n for n in range(2, largest + 1) if self.tokens % n == devices % n == 0))

    @property
    def refusal(self) -> NoContextParallel | None:
        """Returns why no layout has the axis, however many devices there are; None if some may."""
        if self.tokens >= 2 * LEAST_TOKENS:
            return None
        return self.why_not or NoContextParallel(
            reason="too-few-tokens", tokens=self.tokens, least_tokens=LEAST_TOKENS
        )


def context(graph: ModelGraph) -> Context:
    """Returns whether tokens may be split, as far as the graph tells."""
    inputs = _inputs(graph)
    lengths = {v.shape[-2] for u in graph.units if _attends(u) for v in inputs[u.index] if len(v.shape) > 2}
    if not lengths:
        return Context(0, NoContextParallel(reason="no-attention"))
    if len(lengths) > 1:
        return Context(0, NoContextParallel(reason="several-lengths", lengths=len(lengths)))
    tokens = lengths.pop()
    if tokens == graph.batch_size:
        return Context(0, NoContextParallel(reason="tokens-are-samples", tokens=tokens))
    why_not = next(_objections(graph, tokens), None)
    return Context(tokens if why_not is None else 0, why_not)


def key_value_bytes(graph: ModelGraph) -> dict[int, int]:
    """Maps each attention unit to the bytes of keys and values, for all tokens.

    These are the two smallest of queries, keys and values; for one combined tensor, at most twice its size.
    """
    inputs = _inputs(graph)
    return {u.index: _key_value(inputs[u.index]) for u in graph.units if _attends(u)}


def _inputs(graph: ModelGraph) -> list[list[Value]]:
    """Returns for each unit the values that it uses."""
    inputs: list[list[Value]] = [[] for _ in graph.units]
    for value in graph.values:
        for unit in value.consumers:
            inputs[unit].append(value)
    return inputs


def _attends(unit: Unit) -> bool:
    return unit.kind in ATTENTION or any(work.family == "attention" for work in unit.forward)


def _key_value(inputs: Sequence[Value]) -> int:
    sizes = sorted(v.size_bytes for v in inputs if v.requires_grad)
    return sum(sizes[:2]) if len(sizes) > 2 else 2 * sum(sizes[:1])


def _objections(graph: ModelGraph, tokens: int) -> Iterator[NoContextParallel]:
    loss_units = {u.index for u in graph.units}
    for value in graph.values:
        if prod(value.shape) > 1:
            loss_units.discard(value.producer)
            if not _has_tokens(value.shape, tokens, graph.batch_size):
                name = graph.units[value.producer].name
                yield NoContextParallel(reason="no-token-dim", unit=name, shape=value.shape, tokens=tokens)
    for unit in graph.units:
        reason = None if _attends(unit) else _objection(unit, graph, tokens, unit.index in loss_units)
        if reason is not None:
            yield NoContextParallel(reason=reason, unit=unit.name)


def _has_tokens(shape: tuple[int, ...], tokens: int, samples: int) -> bool:
    """Returns whether the shape has a dim of tokens, alone or merged with the samples; the last dim has
    features.
    """
    return tokens in shape[1:-1] or shape[0] in (tokens, tokens * samples)


def _objection(unit: Unit, graph: ModelGraph, tokens: int, is_loss: bool) -> NoContextReason | None:
    """Returns why the unit may not be split; `is_loss`: it computes only a loss, to which the parts
    add up.
    """
    families = {work.family for work in unit.forward}
    shapes = [graph.parameter_of[name].shape for name in unit.parameters]
    if "convolution" in families:
        return "convolution"
    if unit.kind in RECURRENT:
        return "recurrent"
    by_feature = any(word in unit.kind.lower().replace("_", "") for word in BY_FEATURE)
    by_feature &= all(len(shape) == 1 for shape in shapes)
    if families & {"normalisation", "reduction"} and not (by_feature or is_loss):
        return "unknown-reduction"
    if "other" in families:
        return "unknown-op"
    flops = sum(work.flops for work in unit.forward if work.family in MATMULS)
    by_token = 2 * tokens * graph.batch_size * sum(prod(shape) for shape in shapes if len(shape) > 1)
    return None if flops in (0, by_token) else "product-not-by-token"
