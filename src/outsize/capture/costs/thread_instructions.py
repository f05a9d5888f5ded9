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
takes is measured (`COUNTS`). Deviations: a count stands for all that such a kernel waits for. Other ops, and
CPUs, have none. Complexity: O(1) for an op.
Oracle: tests/unit/capture/costs/test_thread_instructions.py counts threads, taps and blocks by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, final

from torch import Tensor

from outsize.ir.base import Record
from outsize.ir.hardware.constants import DataFile


@final
class InstructionCounts(Record):
    """Holds how many instructions kernels issue; thread_instructions.json has the numbers with their origin.

    Depthwise convolutions have as many for each thread as for `thread_taps` more taps, some for each tap in
    the forward and in the gradients of image and weight, and some for each block of a weight's gradient.
    With channels last there are some for each tap, and more of a weight's gradient in float32 for windows
    of more than `small_window` elements.

    Grouped convolutions issue one for so many FLOPs (`grouped_flops`), of groups that are padded to a
    `tile` of channels; with fewer than `few_groups` in float32 the input's gradient has no tensor cores
    (`ordinary_flop` for each FLOP). `wide_weight_flop` is of the gradient of other convolutions' weights in
    TF32, and `unaligned_flop` of convolutions whose rows are no multiple of `row_bytes`.

    Pooling has some for each result and tap, and for each element of the image and each window that it is
    in. Bilinear upsampling makes `additions` for each result, and those to the same element wait for each
    other. Pairs are for float32 and two bytes (batch normalisation), or for forward and backward
    (attention, for each FLOP of whole blocks). Layer normalisation has some for each row.
    `ordinary_product_flop` is of products of float32, which tensor cores do not compute unless they are
    asked to. Elements are those that have an index of their own, are moved around, or are added up over
    rows.
    """

    thread_taps: int
    forward_tap: int
    input_tap: int
    weight_tap: int
    weight_block: int
    last_tap: int
    last_tap_of_two_bytes: int
    last_weight_tap: int
    last_large_weight_tap: int
    small_window: int
    tile: int
    grouped_flops: int
    grouped_weight_flops: int
    few_groups: int
    ordinary_flop: float
    wide_weight_flop: float
    unaligned_flop: float
    row_bytes: int
    pool_thread: int
    pool_tap: int
    pool_input_thread: int
    pool_input_window: int
    mean_pool_input: float
    additions: int
    addition: int
    same_addition: float
    addition_of_two_bytes: float
    channel_element: tuple[int, int]
    channel_element_backward: tuple[int, int]
    input_share: float
    statistics_again: float
    row: int
    row_backward: int
    row_of_weights: int
    most_rows: int
    ordinary_product_flop: float
    indexed_element: int
    rolled_element: int
    joined_element: int
    added_element: int
    block: int
    attention_flop: tuple[float, float]


COUNTS: Final = InstructionCounts.model_validate(DataFile.beside(__file__).constants())


@final
class Rounded(int):
    """A whole number that knows what it was rounded from, by which that of another batch is known."""

    exact: float

    def __new__(cls, exact: float) -> Self:
        """Rounds the number."""
        made = super().__new__(cls, round(exact))
        made.exact = exact
        return made


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
    return Rounded(count(args, tensors, out, argument)) if count is not None else 0


def indexed_elements(tensors: Sequence[Tensor], out: Tensor, argument: int = FORWARD) -> int:
    """Returns the instructions of an op that works element by element, or of the gradient of one of its
    tensors: some for each element where operands are laid out in several ways, more where it is also a sum.
    """
    if all(_is_like(tensor, out) for tensor in tensors if tensor.numel() > 1):
        return 0
    summed = argument != FORWARD and tensors[argument].numel() < out.numel()
    return (COUNTS.indexed_element + COUNTS.added_element * summed) * out.numel()


def attention_instructions(flops: int, query: Tensor, key: Tensor, *, backward: bool) -> Rounded:
    """Returns the instructions of fused attention of so many FLOPs, whose blocks are whole."""
    queries, keys = query.shape[-2], key.shape[-2]
    rows, columns = (-(-count // COUNTS.block) * COUNTS.block for count in (queries, keys))
    return Rounded(COUNTS.attention_flop[backward] * flops * rows * columns / max(1, queries * keys))


def bias_instructions(out: Tensor) -> int:
    """Returns the instructions of the kernel that adds a convolution's bias to its result."""
    return COUNTS.indexed_element * out.numel()


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
        return COUNTS.added_element * out.numel()
    if not image.ndim == weight.ndim == out.ndim > 2:
        return 0
    if is_depthwise(image, weight):
        return _depthwise(image, weight, out, argument)
    groups, width = image.shape[1] // max(1, weight.shape[1]), weight.shape[1]
    taps = weight.shape[2:].numel()
    flops = 2 * out.numel() * width * taps
    if groups > 1 and weight.shape[0] == out.shape[1]:
        if argument == 0 and groups < COUNTS.few_groups and not _has_two_bytes(image):
            return (
                COUNTS.ordinary_flop * flops
                if image.shape[2:] == out.shape[2:]
                else (1 / COUNTS.grouped_flops) * flops
            )
        padded = flops * max(1.0, COUNTS.tile / width)
        return padded * (
            (1 / COUNTS.grouped_weight_flops) if argument == WEIGHT else (1 / COUNTS.grouped_flops)
        )
    if taps > 1 and image.shape[1] * image.dtype.itemsize % COUNTS.row_bytes:
        return COUNTS.unaligned_flop * flops
    wide = argument == WEIGHT and taps > 1 and not _has_two_bytes(image)
    return COUNTS.wide_weight_flop * flops if wide else 0


def _depthwise(image: Tensor, weight: Tensor, out: Tensor, argument: int) -> float:
    taps, results = weight.shape[2:].numel(), out.numel()
    if image.stride(1) == 1 < image.shape[1]:
        if argument == WEIGHT:
            large = taps > COUNTS.small_window and not _has_two_bytes(image)
            return results * taps * (COUNTS.last_large_weight_tap if large else COUNTS.last_weight_tap)
        return results * taps * (COUNTS.last_tap_of_two_bytes if _has_two_bytes(image) else COUNTS.last_tap)
    if argument == WEIGHT:
        return results * taps * COUNTS.weight_tap + weight.numel() * COUNTS.weight_block
    if argument == 0:
        return image.numel() * (taps + COUNTS.thread_taps) * COUNTS.input_tap
    return results * (taps + COUNTS.thread_taps) * COUNTS.forward_tap


def _pooling(args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    image, window = tensors[0], args[1]
    taps = math.prod(window) if len(window) > 1 else window[0] ** (out.ndim - 2)
    if argument == FORWARD:
        return out.numel() * (COUNTS.pool_thread + COUNTS.pool_tap * taps)
    windows = out.numel() * taps / image.numel()
    return image.numel() * (COUNTS.pool_input_thread + COUNTS.pool_input_window * windows)


def _mean_pooling(args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    return _pooling(args, tensors, out, argument) * (1 if argument == FORWARD else COUNTS.mean_pool_input)


def _upsampling(_args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    if argument == FORWARD:
        return COUNTS.indexed_element * out.numel()
    same = out.numel() / max(1, tensors[0].numel())
    each = max(COUNTS.addition, COUNTS.same_addition * same) * (
        COUNTS.addition_of_two_bytes if _has_two_bytes(out) else 1
    )
    return COUNTS.additions * out.numel() * each


def _channel_norm(_args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    """Counts a batch normalisation; its backward has a part for the image and one for the affine weights."""
    images = tensors[0]
    narrow = _has_two_bytes(images)
    if argument == FORWARD:
        return COUNTS.channel_element[narrow] * images.numel()
    share = {0: COUNTS.input_share, WEIGHT: 1 - COUNTS.input_share}.get(argument, 0)
    return COUNTS.channel_element_backward[narrow] * images.numel() * share


def statistics_again(tensors: Sequence[Tensor], argument: int) -> float:
    """Returns how many times as long as its elements a block of a batch normalisation takes: torch's own, for
    dtypes of two bytes, reads the image once for its statistics and once more for the result.
    """
    return COUNTS.statistics_again if argument == FORWARD and _has_two_bytes(tensors[0]) else 1


def _row_norm(args: Sequence[Any], tensors: Sequence[Tensor], _out: Tensor, argument: int) -> float:
    if argument > WEIGHT:
        return 0
    rows = tensors[0].numel() // max(1, math.prod(args[1]))
    if argument == WEIGHT:
        return min(rows, COUNTS.most_rows) * COUNTS.row_of_weights
    return rows * (COUNTS.row if argument == FORWARD else COUNTS.row_backward)


def _joining(_args: Sequence[Any], tensors: Sequence[Tensor], _out: Tensor, argument: int) -> float:
    return 0 if argument == FORWARD else COUNTS.joined_element * tensors[0].numel()


def _product(_args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, _argument: int) -> float:
    return 0 if _has_two_bytes(out) else COUNTS.ordinary_product_flop * 2 * out.numel() * tensors[0].shape[-1]


def _biased_product(args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor, argument: int) -> float:
    return COUNTS.added_element * out.numel() if argument == 0 else _product(args, tensors[1:], out, argument)


def _rolling(_args: Sequence[Any], _tensors: Sequence[Tensor], out: Tensor, _argument: int) -> float:
    return COUNTS.rolled_element * out.numel()


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
    return Rounded(_channel_norm((), tensors, out, argument))
