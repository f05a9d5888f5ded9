"""Assigns each ATen op to a family; a roofline has an efficiency for each family.

The family is found by name where the op is known, by torch's own tag `pointwise`, else it is `other`. Ops
that compute nothing and only make memory (`empty`, a reshape that turned out to be a view) are `ALLOCATIONS`:
no launch, no bytes.

Products in dtypes of two bytes or less are `unaligned_matmul` where a row of a matrix is no multiple of 16
bytes, such as 50,257 logits: kernels for tensor cores load 16 bytes at once, and those that cannot are
several times slower (NVIDIA, Matrix Multiplication Background User's Guide, sec. 2.2; CUTLASS's alignment of
operands). Convolutions whose windows do not overlap (of one pixel, of patches) or that have a kernel for each
channel are `direct_convolution`: they need no copy of their input, and cuDNN no workspace for one.

Tensor cores read images with their channels last. Around each convolution of more than single pixels cuDNN
copies images that have them first: operands before, the result behind (NVIDIA, Convolutional Layers User's
Guide, "Tensor layouts"). The copies are `layout_copy`, which only devices with tensor cores make, in TF32
those that were seen to (planner/costs/roofline.py). So is the kernel that adds a bias to such a result.

A batch normalisation of images that have their channels first runs a block of threads for each channel, and
no more: `blocks(input.size(1))` in torch's Normalization.cuh, which has all of bfloat16, and the kernels that
cuDNN calls `1C11`. Oracle:
tests/unit/capture/costs/test_costs_truth.py, where the FLOPs of a family are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.ir.graph import OpFamily

_NOTHING = """empty empty_like empty_strided new_empty new_empty_strided empty_permuted _unsafe_view
    lift_fresh lift set_ resize_ record_stream"""
ALLOCATIONS = frozenset(_NOTHING.split())
COPIES = frozenset({"_to_copy", "clone", "copy", "copy_"})
ROW_BYTES = 16

_NAMES: dict[OpFamily, str] = {
    "matmul": """mm addmm bmm baddbmm addbmm mv addmv dot vdot outer addr ger _scaled_mm _int_mm _grouped_mm
        _scaled_grouped_mm _trilinear _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn
        miopen_rnn cdist _cdist_forward linear mkldnn_linear _linalg_det linalg_solve""",
    "attention": """_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable _flash_attention_forward
        _efficient_attention_forward _scaled_dot_product_attention_math flex_attention""",
    "convolution": """convolution _convolution cudnn_convolution cudnn_convolution_transpose
        mkldnn_convolution convolution_overrideable _slow_conv2d_forward slow_conv3d_forward
        miopen_convolution deform_conv2d""",
    "normalisation": """native_layer_norm native_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training _native_batch_norm_legit_functional cudnn_batch_norm
        _batch_norm_with_update _batch_norm_no_update native_group_norm _fused_rms_norm miopen_batch_norm
        batch_norm_stats batch_norm_elemt _weight_norm_interface renorm""",
    "reduction": """sum mean var std var_mean std_mean amax amin max min argmax argmin aminmax prod any all
        norm linalg_vector_norm logsumexp logcumsumexp cumsum cumprod cummax cummin _softmax _log_softmax
        nll_loss_forward nll_loss2d_forward nll_loss_nd max_pool2d_with_indices max_pool3d_with_indices
        avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d
        adaptive_max_pool3d fractional_max_pool2d mkldnn_max_pool2d _safe_softmax median mode nanmedian
        topk sort kthvalue count_nonzero nansum trace linalg_matrix_norm _ctc_loss _use_cudnn_ctc_loss
        binary_cross_entropy multi_margin_loss multilabel_margin_loss_forward histc bincount""",
    "embedding": """embedding _embedding_bag _embedding_bag_forward_only index_select gather index
        take take_along_dim scatter scatter_add scatter_reduce index_add index_put index_copy index_fill
        _unsafe_index _unsafe_index_put masked_scatter scatter_ scatter_add_ index_put_ index_add_
        index_copy_ grid_sampler_2d grid_sampler_3d""",
    "elementwise": """_to_copy clone copy copy_ cat stack fill fill_ zero zero_ native_dropout arange
        zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor tril triu
        constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d roll flip
        repeat repeat_interleave upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_nearest1d
        upsample_linear1d upsample_trilinear3d upsample_nearest3d _upsample_bilinear2d_aa bernoulli_ bernoulli
        normal_ uniform_ rand randn rand_like randn_like randint randperm multinomial one_hot pixel_shuffle
        glu mse_loss smooth_l1_loss huber_loss channel_shuffle im2col col2im _fused_dropout slice_scatter
        select_scatter diagonal_scatter cudnn_affine_grid_generator _prelu_kernel rrelu_with_noise
        rrelu_with_noise_functional linspace eye masked_fill masked_fill_ where native_channel_shuffle
        pixel_unshuffle soft_margin_loss kl_div _foreach_add split_with_sizes_copy _pad_circular""",
}
_FAMILY_OF: dict[str, OpFamily] = {name: family for family, names in _NAMES.items() for name in names.split()}


def family_of(op: Any) -> OpFamily:
    """Returns the family of one ATen op (an overload, such as `torch.ops.aten.mm.default`)."""
    known = _FAMILY_OF.get(op_name(op))
    if known is not None:
        return known
    return "elementwise" if torch.Tag.pointwise in getattr(op, "tags", ()) else "other"


def of_operands(family: OpFamily, tensors: Sequence[Tensor]) -> OpFamily:
    """Returns the family of an op of `family` whose arguments and results are `tensors`: products tell
    unaligned ones apart, convolutions (input, weight, ..., result) those without a workspace.
    """
    if family == "matmul" and any(map(_is_unaligned, tensors)):
        return "unaligned_matmul"
    if family == "convolution" and _is_direct(tensors[0], tensors[1], tensors[-1]):
        return "direct_convolution"
    return family


def is_reordered(tensors: Sequence[Tensor], out: Tensor) -> bool:
    """Returns whether cuDNN copies the tensors of a convolution (image, weight, ...) and its result, whose
    channels come first. torch's own kernels for a channel each need no copy, and a convolution of single
    pixels is a product of the image as it is, where a channel's pixels are whole rows of 16 bytes.
    """
    image, weight = tensors[:2]
    if image.dtype.itemsize > 4 or not image.ndim == weight.ndim > 2 or weight.shape[1] == 1:
        return False
    whole_rows = image.shape[2:].numel() * image.dtype.itemsize % ROW_BYTES == 0
    of_pixels = weight.shape[2:].numel() == 1 and image.shape[2:] == out.shape[2:] and whole_rows
    return not of_pixels and not any(map(_has_channels_last, (image, weight)))


def bytes_by_block(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Returns the bytes that a batch normalisation (image, ...; result, mean, ...) moves for each element
    that one of its blocks of threads moves; 0 for other ops, and where running statistics are applied alone.

    Its kernels have a block for each channel of images whose channels are first.
    """
    if "batch_norm" not in name or len(results) < 2 or _has_channels_last(inputs[0]):
        return 0
    channels = inputs[0].shape[1] if inputs[0].ndim > 1 else 0
    return channels * inputs[0].dtype.itemsize if results[1].numel() == channels else 0


def _has_channels_last(tensor: Tensor) -> bool:
    """Returns whether the channels of a pixel are neighbours in memory; one pixel has no order."""
    return tensor.stride(1) == 1 < tensor.shape[1] and tensor.shape[2:].numel() > 1


def _is_direct(image: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Returns whether windows do not overlap, or each channel has a kernel of its own."""
    if not image.ndim == weight.ndim == out.ndim:
        return False
    each_channel = weight.shape[1] == 1 < image.shape[1] <= out.shape[1]
    windows = zip(image.shape[2:], weight.shape[2:], out.shape[2:], strict=True)
    return each_channel or all(kernel * count <= size for size, kernel, count in windows)


def _is_unaligned(tensor: Tensor) -> bool:
    """Returns whether rows of a matrix begin at bytes from which no kernel can load ROW_BYTES at once."""
    size_bytes = tensor.dtype.itemsize
    if tensor.ndim < 2 or size_bytes > 2 or tensor.layout is not torch.strided:
        return False
    return any(
        step > 1 and size > 1 and step * size_bytes % ROW_BYTES
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def op_name(op: Any) -> str:
    """Returns `mm` for `aten.mm.default`."""
    return getattr(getattr(op, "_overloadpacket", op), "__name__", str(op))
