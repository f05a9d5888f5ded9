"""Problem: over how many devices is it worth to share the tokens of a sequence?

Context parallelism: each of n devices has 1 / n of the tokens of every sequence, and gathers keys and
values. Whether a model can be divided so is derived from its program (capture/graph/row_parallel.py), and is
a fact of its graph. A graph without it is not divided.

Each device keeps at least LEAST_TOKENS, so only sequences of 8,192 tokens and more are shared. Llama 3
trained 8,192 tokens without cp and 131,072 with cp 16, 8,192 each (arXiv 2407.21783, table 4). Complexity:
O(devices). Oracle: tests/unit/planner/costs/test_context_parallel.py.
"""

from __future__ import annotations

from typing import Final

from outsize.ir.graph import ModelGraph

LEAST_TOKENS: Final = 4096


def context_sizes(graph: ModelGraph, devices: int) -> tuple[int, ...]:
    """Returns the sizes of the axis to try, 1 among them."""
    tokens = 0 if graph.rows is None else graph.rows.tokens
    largest = min(devices, tokens // LEAST_TOKENS)
    return (1, *(n for n in range(2, largest + 1) if devices % n == 0))
