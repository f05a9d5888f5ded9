"""Problem: what does scaled_dot_product_attention cost where it is one kernel, and the recording is not?

A CPU has no fused kernel with dropout, so that a recording sees two products, a softmax and a dropout, and
the probabilities [batch, heads, queries, keys] that autograd saves. Accelerators run one kernel, with dropout
and masks as well. Costs of both are noted, and the planner takes those of the devices that it plans for.

    forward    2 products of queries x keys x width; reads q, k, v and writes the result. Blocks of 128
               keys that a causal mask hides from a block of queries are skipped, so of n x n blocks those
               on and below the diagonal are computed: (n + 1) / (2 n) of the products
    backward   5 such products; reads q, k, v, result and gradient, and writes three gradients
    products   in float32 several heads of queries that share one of keys have no kernel on CUDA
               (sdp_utils.cpp: only flash attention knows them, and it has two bytes). torch scales q and k,
               repeats k and v, and keeps those and the probabilities [batch, heads, queries, keys]
               (_scaled_dot_product_attention_math); a causal mask hides nothing there
    saved      q, k, v and the logsumexp [batch, heads, queries] in float32. The result counts with the
               projection that follows and saves the same memory

Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2 and sec. 3.1 (causal masks); torch's
sdp_utils.cpp, which takes the flash or the memory-efficient kernel for every dtype on CUDA, where the last
dimension of all inputs and of the mask is dense. T5's position bias is not, and its attention is no kernel
anywhere. Deviations: masks that are tensors count whole products; the CPU's kernel has blocks of 512 keys,
and skips less of short sequences. nn.MultiheadAttention is a leaf, whose ops are counted as they run.
Complexity: O(1). Oracle: tests/unit/capture/costs/test_fused_attention.py compares with a recording without
dropout, in which the CPU's kernel is fused as well, and counts blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from outsize.capture.costs.thread_instructions import COUNTS, attention_instructions
from outsize.ir.graph import OpFamily, Work
from outsize.program.tape import Cost

LOGSUMEXP_BYTES = 4
_NAMES = ("query", "key", "value")
_MASK = "attn_mask"


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **_more: Any) -> int:
    """Returns the FLOPs of both products, of shapes [..., heads, rows, width].

    Several heads of queries may share one of keys and values, which the formula of torch 2.11 refuses.
    """
    return 2 * query[:-1].numel() * key[-2] * (query[-1] + value[-1])


KERNEL_FLOPS: Final[Mapping[Any, Any]] = dict.fromkeys(
    (
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
    ),
    attention_flops,
)
"""The formulas of CUDA's kernels, as torch.utils.flop_counter takes them."""


def attention_inputs(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns query, key and value of a call of scaled_dot_product_attention that is one kernel on
    accelerators; nothing for other calls.
    """
    if target is not functional.scaled_dot_product_attention:
        return []
    values = dict(zip((*_NAMES, _MASK), args, strict=False)) | dict(kwargs)
    inputs, mask = [values[name] for name in _NAMES], values.get(_MASK)
    dense = all(t.stride(-1) == 1 for t in (*inputs, *([] if mask is None else [mask])))
    return inputs if dense else []


def is_causal(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of scaled_dot_product_attention asks for a causal mask without giving one."""
    return bool(args[5] if len(args) > 5 else kwargs.get("is_causal", False))


def causal_flops(flops: int, queries: int, keys: int) -> int:
    """Returns the FLOPs of the blocks that a causal mask does not hide wholly."""
    blocks = -(-keys // COUNTS.block)
    return flops * (blocks + 1) // (2 * blocks) if queries == keys and keys else flops


def has_no_kernel(inputs: Sequence[Tensor], out: Tensor) -> bool:
    """Returns whether query, key and value have no fused kernel on accelerators: fewer heads of keys than of
    queries, in float32. The result has the dtype of the kernel, which autocast may have cast inputs to.
    """
    query, key = inputs[0], inputs[1]
    return out.dtype.itemsize > 2 and query.ndim > 3 and query.shape[-3] != key.shape[-3]


def products_cost(inputs: Sequence[Tensor], out: Tensor) -> Cost:
    """Returns the cost of attention by products and a softmax; keys and values are repeated for each head."""
    query, key, value = inputs
    itemsize, dtype = out.dtype.itemsize, str(out.dtype).removeprefix("torch.")
    flops = attention_flops(query.shape, key.shape, value.shape)
    scores_bytes = query.shape[:-1].numel() * key.shape[-2] * itemsize
    repeats = query.shape[-3] // key.shape[-3]
    query_bytes, out_bytes = query.numel() * itemsize, out.numel() * itemsize
    keys_bytes, values_bytes = (t.numel() * itemsize * repeats for t in (key, value))
    repeated_bytes = query_bytes + keys_bytes + values_bytes

    def work(family: OpFamily, launches: int, moved_bytes: int, flops: int = 0) -> Work:
        return Work(family=family, dtype=dtype, flops=flops, moved_bytes=moved_bytes, launches=launches)

    products_bytes = 2 * scores_bytes + repeated_bytes + out_bytes
    forward = (
        work("elementwise", 6, 2 * (2 * repeated_bytes + scores_bytes)),
        work("matmul", 2, products_bytes, flops),
        work("reduction", 1, 2 * scores_bytes),
    )
    moved_bytes = sum(each.moved_bytes for each in forward)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        return Cost(flops=flops, moved_bytes=moved_bytes, workspace_bytes=2 * scores_bytes, forward=forward)
    return Cost(
        flops=flops,
        moved_bytes=moved_bytes,
        saved_bytes=repeated_bytes + scores_bytes,
        workspace_bytes=scores_bytes,
        backward_workspace_bytes=2 * scores_bytes + 2 * repeated_bytes,
        forward=forward,
        backward_input=(
            work("elementwise", 4, 3 * repeated_bytes),
            work("matmul", 4, 2 * products_bytes, 2 * flops),
            work("reduction", 1, 3 * scores_bytes),
        ),
    )


def fused_cost(
    inputs: Sequence[Tensor], out: Tensor, saved_bytes: int, saved: frozenset[int], *, causal: bool
) -> Cost:
    """Returns the cost of one kernel each for forward and backward.

    `saved_bytes` are those of `inputs` that nothing has saved before, `saved` their storages.
    """
    query, key, value = inputs
    rows = query.shape[:-1].numel()  # no op: this runs while ops are counted
    flops = attention_flops(query.shape, key.shape, value.shape)
    if causal:
        flops = causal_flops(flops, query.shape[-2], key.shape[-2])
    sizes = sum(t.numel() * t.dtype.itemsize for t in inputs)
    statistics_bytes = rows * LOGSUMEXP_BYTES
    result_bytes = out.numel() * out.dtype.itemsize + statistics_bytes
    dtype = str(out.dtype).removeprefix("torch.")
    counted, counted_back = (
        attention_instructions(flops * 5 // 2 if backward else flops, query, key, backward=backward)
        for backward in (False, True)
    )
    forward = Work(
        family="attention",
        dtype=dtype,
        flops=flops,
        moved_bytes=sizes + result_bytes,
        launches=1,
        instructions=int(counted),
    )
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        return Cost(
            flops=flops,
            moved_bytes=forward.moved_bytes,
            forward=(forward,),
            exact_instructions=(((counted.exact,),), (), ()),
        )
    backward = Work(
        family="attention",
        dtype=dtype,
        flops=flops * 5 // 2,
        moved_bytes=2 * result_bytes + 2 * sizes,
        launches=1,
        instructions=int(counted_back),
    )
    return Cost(
        flops=flops,
        moved_bytes=forward.moved_bytes,
        saved_bytes=saved_bytes + statistics_bytes,
        backward_workspace_bytes=result_bytes - statistics_bytes + sizes,
        forward=(forward,),
        backward_input=(backward,),
        exact_instructions=(((counted.exact,),), ((counted_back.exact,),), ()),
        saved_storages=saved,
    )
