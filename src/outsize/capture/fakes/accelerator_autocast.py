"""Problem: what does autocast make of a model on an accelerator, when its forward is recorded on the CPU?

torch.autocast has a list of ops for each kind of device. On accelerators layer_norm, softmax, pow, exp, sum
and some sixty more compute in float32 and return it; on a CPU they stay in the dtype of their input. A plan
for GPUs would lack these bytes: the activation that GPT-2 computes by `torch.pow` saves float32 there.

Method: while a forward is recorded, ops of the accelerators' lists that a CPU's autocast leaves alone get a
kernel under the CPU's autocast key, which casts their inputs, or asks for a result of float32 where the op
converts by itself. Autocast that the model turns off is off for them as well, and each is gone afterwards.

Source: torch's ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, of which the lists
below are a copy. Deviations: `norm` of one tensor, and ops that promote to their widest input. Threads that
run under a CPU's autocast meanwhile see the kernels, too. Complexity: O(1) for each call. Oracle:
tests/unit/capture/fakes/test_accelerator_autocast.py reads torch's header, and dtypes by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from outsize.program.tree import map_leaves

IN_FLOAT32: Final = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm",
    "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Ops whose floating inputs accelerators cast to float32; behind the dot is the overload."""

TO_FLOAT32: Final = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Ops that accelerators ask for a result of float32; their inputs stay as they are."""

_KEY: Final = "AutocastCPU"


@contextmanager
def accelerator_lists() -> Iterator[None]:
    """Lets the CPU's autocast compute in float32 what that of accelerators does, within the context."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for names, policy in ((IN_FLOAT32, _casting), (TO_FLOAT32, _kernel_asking_for_dtype)):
            for name in names:
                op = _op_of(name)
                if op is not None and not op.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, _KEY)):
                    library.impl(name, policy(op), _KEY)
        yield
    finally:
        library._destroy()


def _op_of(name: str) -> Any:
    """Returns the op; None where this version of torch has none of this name."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _casting(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.autocast("cpu", enabled=False):
            return op(*map_leaves(_wide, args), **map_leaves(_wide, kwargs))

    return kernel


def _kernel_asking_for_dtype(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_given = kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None)
        more = {} if is_given or not _is_narrow_or_single(args[0]) else {"dtype": torch.float32}
        with torch._C.DisableTorchFunction(), torch.autocast("cpu", enabled=False):
            return op(*args[:place], **{**kwargs, **more}) if more else op(*args, **kwargs)

    return kernel


def _wide(leaf: Any) -> Any:
    return leaf.to(torch.float32) if isinstance(leaf, Tensor) and _is_narrow_or_single(leaf) else leaf


def _is_narrow_or_single(tensor: Tensor) -> bool:
    """Returns whether autocast casts this tensor: not integers, and not float64."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64
