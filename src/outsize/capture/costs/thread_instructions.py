"""Problem: how long do kernels take that neither the FLOP/s nor the bytes/s of an accelerator bound?

Kernels that compute one element in each thread, or sum over a channel in a block, load one value at a time
and spend most instructions on indices. They take as long in float32 as in bfloat16:

    instructions / (instructions that the device issues in a second)

    depthwise convolution   a thread for each element of the result, or of the image in the backward, also
                            where a stride leaves out taps; a block for each element of the weight's gradient
                            (DepthwiseConv2d.cu). With channels last cuDNN has kernels of its own
    grouped convolution     a product with at least 64 channels: narrower groups are padded to cuDNN's tile.
                            A few groups in float32 have an input gradient without tensor cores (`ffma`)
    image of three channels no kernel for tensor cores, which load 16 bytes of channels at once
    pooling                 a thread for each result, or for each element of the image, which looks at every
                            window that it is in (DilatedMaxPool2d.cu, AveragePool2d.cu)
    bilinear, backward      four atomic additions for each result; those to one element wait for each other
    batch normalisation     each element is added to a running mean by itself (Welford), in the backward twice
    layer normalisation     a block for each row; for the weights one for 32 columns, which walks all rows
    joined parts            the gradient of a split is a concatenation, a bias's a sum over rows
    elements                operands of unlike shapes, strides or a narrower dtype: an index for each element
                            (TensorIterator's offset calculator), in place of vectors of 16 bytes
    products of float32     beside each multiply-add it loads operands from shared memory
    attention               whole blocks of queries and keys, also where they do not fill the last one

Source: the kernels are torch 2.11's (ATen/native/cuda) and cuDNN 9.19's; how many instructions an element
takes is measured, `benchmarks/one-gpu/results/2026-11-27_h200_ops.json`, and rounded. Deviations: a count
stands for all that such a kernel waits for. Other ops, and CPUs, have none. Complexity: O(1) for an op.
Oracle: tests/unit/capture/costs/test_thread_instructions.py counts threads, taps and blocks by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

# Of depthwise convolutions: for each thread as many as for so many taps, for each tap, for each block.
THREAD_TAPS: Final = 16
FORWARD_TAP: Final = 14
INPUT_TAP: Final = 20
WEIGHT_TAP: Final = 47
WEIGHT_BLOCK: Final = 270_000
# With channels last: for each tap; of a weight's gradient in float32 for windows above 3 x 3.
LAST_TAP: Final = 12
LAST_TAP_OF_TWO_BYTES: Final = 8
LAST_WEIGHT_TAP: Final = 5
LAST_LARGE_WEIGHT_TAP: Final = 160
SMALL_WINDOW: Final = 9
# Of grouped convolutions, for each FLOP.
TILE: Final = 64
GROUPED_FLOP: Final = 1 / 6
GROUPED_WEIGHT_FLOP: Final = 1 / 3
FEW_GROUPS: Final = 8
ORDINARY_FLOP: Final = 6.3
# Of the gradient of other convolutions' weights in TF32, for each FLOP.
WIDE_WEIGHT_FLOP: Final = 0.22
# Of convolutions whose channels no kernel for tensor cores can load.
UNALIGNED_FLOP: Final = 1.35
ROW_BYTES: Final = 16
# Of pooling, for each result and tap, and for each element of the image and each window that it is in.
POOL_THREAD: Final = 400
POOL_TAP: Final = 14
POOL_INPUT_THREAD: Final = 300
POOL_INPUT_WINDOW: Final = 35
MEAN_POOL_INPUT: Final = 1.6
# Of bilinear upsampling, for each addition, and for each addition to the same element.
ADDITIONS: Final = 4
ADDITION: Final = 100
SAME_ADDITION: Final = 5.7
ADDITION_OF_TWO_BYTES: Final = 4.3
# Of batch normalisation, for each element of float32 and of two bytes; of layer normalisation for each row.
CHANNEL_ELEMENT: Final = (134, 184)
CHANNEL_ELEMENT_BACKWARD: Final = (207, 245)
INPUT_SHARE: Final = 0.6
STATISTICS_AGAIN: Final = 1.4
ROW: Final = 40_000
ROW_BACKWARD: Final = 20_000
ROW_OF_WEIGHTS: Final = 130_000
MOST_ROWS: Final = 32_768
# Of products of float32, which tensor cores do not compute unless they are asked to, for each FLOP.
ORDINARY_PRODUCT_FLOP: Final = 0.72
# For each element that has an index of its own, is moved around, or is added up over rows.
INDEXED_ELEMENT: Final = 90
ROLLED_ELEMENT: Final = 300
JOINED_ELEMENT: Final = 120
ADDED_ELEMENT: Final = 70
# Of fused attention, queries and keys of a block, and for each FLOP of whole blocks, forward and backward.
BLOCK: Final = 128
ATTENTION_FLOP: Final = (0.097, 0.128)

Count = Callable[[Sequence[Any], Sequence[Tensor], Tensor, int], float]
"""Counts for (arguments of the op, its tensors, its first result, the argument whose gradient is computed, or
FORWARD)."""
FORWARD: Final = -1
WEIGHT: Final = 1


def instructions_of(
    name: str, args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int = FORWARD
) -> int:
    """Returns the instructions of an op's forward, or of the gradient of one of its tensors; 0 for ops that
    FLOPs and bytes bound.
    """
    count = _COUNTS.get(name.removesuffix("_"))
    return round(count(args, tensors, out, argument)) if count is not None else 0


def indexed_elements(tensors: Sequence[Tensor], out: Tensor, argument: int = FORWARD) -> int:
    """Returns the instructions of an op that works element by element, or of the gradient of one of its
    tensors: some for each element where operands are laid out in several ways, more where it is also a sum.
    """
    if all(_is_like(tensor, out) for tensor in tensors if tensor.numel() > 1):
        return 0
    summed = argument != FORWARD and tensors[argument].numel() < out.numel()
    return (INDEXED_ELEMENT + ADDED_ELEMENT * summed) * out.numel()


def attention_instructions(flops: int, query: Tensor, key: Tensor, *, backward: bool) -> int:
    """Returns the instructions of fused attention of so many FLOPs, whose blocks are whole."""
    queries, keys = query.shape[-2], key.shape[-2]
    rows, columns = (-(-count // BLOCK) * BLOCK for count in (queries, keys))
    return round(ATTENTION_FLOP[backward] * flops * rows * columns / max(1, queries * keys))


def bias_instructions(out: Tensor) -> int:
    """Returns the instructions of the kernel that adds a convolution's bias to its result."""
    return INDEXED_ELEMENT * out.numel()


def is_depthwise(image: Tensor, weight: Tensor) -> bool:
    """Returns whether a convolution has a kernel for each channel."""
    return weight.shape[1] == 1 < image.shape[1] <= weight.shape[0]


def _is_like(tensor: Tensor, out: Tensor) -> bool:
    """Returns whether an operand's elements have the order of the result's, and no narrower dtype."""
    same = tensor.shape == out.shape and tensor.stride() == out.stride()
    return same and tensor.dtype.itemsize >= min(out.dtype.itemsize, 4)


def _has_two_bytes(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize <= 2


def _convolution(_args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    image, weight = tensors[:2]
    if argument > WEIGHT:
        return ADDED_ELEMENT * out.numel()
    if not image.ndim == weight.ndim == out.ndim > 2:
        return 0
    if is_depthwise(image, weight):
        return _depthwise(image, weight, out, argument)
    groups, width = image.shape[1] // max(1, weight.shape[1]), weight.shape[1]
    taps = weight.shape[2:].numel()
    flops = 2 * out.numel() * width * taps
    if groups > 1 and weight.shape[0] == out.shape[1]:
        if argument == 0 and groups < FEW_GROUPS and not _has_two_bytes(image):
            return ORDINARY_FLOP * flops if image.shape[2:] == out.shape[2:] else GROUPED_FLOP * flops
        padded = flops * max(1.0, TILE / width)
        return padded * (GROUPED_WEIGHT_FLOP if argument == WEIGHT else GROUPED_FLOP)
    if taps > 1 and image.shape[1] * image.dtype.itemsize % ROW_BYTES:
        return UNALIGNED_FLOP * flops
    wide = argument == WEIGHT and taps > 1 and not _has_two_bytes(image)
    return WIDE_WEIGHT_FLOP * flops if wide else 0


def _depthwise(image: Tensor, weight: Tensor, out: Tensor, argument: int) -> float:
    taps, results = weight.shape[2:].numel(), out.numel()
    if image.stride(1) == 1 < image.shape[1]:
        if argument == WEIGHT:
            large = taps > SMALL_WINDOW and not _has_two_bytes(image)
            return results * taps * (LAST_LARGE_WEIGHT_TAP if large else LAST_WEIGHT_TAP)
        return results * taps * (LAST_TAP_OF_TWO_BYTES if _has_two_bytes(image) else LAST_TAP)
    if argument == WEIGHT:
        return results * taps * WEIGHT_TAP + weight.numel() * WEIGHT_BLOCK
    if argument == 0:
        return image.numel() * (taps + THREAD_TAPS) * INPUT_TAP
    return results * (taps + THREAD_TAPS) * FORWARD_TAP


def _pooling(args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    image, window = tensors[0], args[1]
    taps = math.prod(window) if len(window) > 1 else window[0] ** (out.ndim - 2)
    if argument == FORWARD:
        return out.numel() * (POOL_THREAD + POOL_TAP * taps)
    windows = out.numel() * taps / image.numel()
    return image.numel() * (POOL_INPUT_THREAD + POOL_INPUT_WINDOW * windows)


def _mean_pooling(args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    return _pooling(args, tensors, out, argument) * (1 if argument == FORWARD else MEAN_POOL_INPUT)


def _upsampling(_args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    if argument == FORWARD:
        return INDEXED_ELEMENT * out.numel()
    same = out.numel() / max(1, tensors[0].numel())
    each = max(ADDITION, SAME_ADDITION * same) * (ADDITION_OF_TWO_BYTES if _has_two_bytes(out) else 1)
    return ADDITIONS * out.numel() * each


def _channel_norm(_args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    """Counts a batch normalisation; its backward has a part for the image and one for the affine weights."""
    images = tensors[0]
    narrow = _has_two_bytes(images)
    if argument == FORWARD:
        return CHANNEL_ELEMENT[narrow] * images.numel()
    share = {0: INPUT_SHARE, WEIGHT: 1 - INPUT_SHARE}.get(argument, 0)
    return CHANNEL_ELEMENT_BACKWARD[narrow] * images.numel() * share


def statistics_again(tensors: Sequence[Tensor], argument: int) -> float:
    """Returns how many times as long as its elements a block of a batch normalisation takes: torch's own, for
    dtypes of two bytes, reads the image once for its statistics and once more for the result.
    """
    return STATISTICS_AGAIN if argument == FORWARD and _has_two_bytes(tensors[0]) else 1


def _row_norm(args: Sequence[Any], tensors: Sequence[Tensor], _out: Tensor, argument: int) -> float:
    if argument > WEIGHT:
        return 0
    rows = tensors[0].numel() // max(1, math.prod(args[1]))
    if argument == WEIGHT:
        return min(rows, MOST_ROWS) * ROW_OF_WEIGHTS
    return rows * (ROW if argument == FORWARD else ROW_BACKWARD)


def _joining(_args: Sequence[Any], tensors: Sequence[Tensor], _out: Tensor, argument: int) -> float:
    return 0 if argument == FORWARD else JOINED_ELEMENT * tensors[0].numel()


def _product(_args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, _argument: int) -> float:
    return 0 if _has_two_bytes(out) else ORDINARY_PRODUCT_FLOP * 2 * out.numel() * tensors[0].shape[-1]


def _biased_product(args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    return ADDED_ELEMENT * out.numel() if argument == 0 else _product(args, tensors[1:], out, argument)


def _rolling(_args: Sequence[Any], _tensors: Sequence[Tensor], out: Tensor, _argument: int) -> float:
    return ROLLED_ELEMENT * out.numel()


_NAMES: Final[dict[Count, str]] = {
    _convolution: "convolution _convolution cudnn_convolution mkldnn_convolution",
    _pooling: "max_pool2d_with_indices max_pool3d_with_indices",
    _mean_pooling: "avg_pool2d avg_pool3d",
    _upsampling: "upsample_bilinear2d",
    _row_norm: "native_layer_norm",
    _rolling: "roll",
    _joining: "unbind split split_with_sizes chunk",
    _product: "mm bmm",
    _biased_product: "addmm",
}
_COUNTS: Final = {name: count for count, names in _NAMES.items() for name in names.split()}


def channel_instructions(tensors: Sequence[Tensor], out: Tensor, argument: int = FORWARD) -> int:
    """Returns the instructions of a batch normalisation that has a block of threads for each channel."""
    return round(_channel_norm((), tensors, out, argument))
