"""How a received value enters a stage."""

from __future__ import annotations

import torch

from outsize.run.stage.stage import enter


def test_a_received_value_keeps_the_strides_of_its_dimensions_of_size_one() -> None:
    """Kernels choose their path by strides, also by those that no element needs: microbatches of one sample
    of ConvNeXt were off by 1e-12. `view_as` writes them anew.
    """
    value = torch.randn(48).as_strided((1, 4, 12, 1), (7, 1, 4, 4))
    alias = enter(value, {}, 0)
    assert alias.stride() == value.stride()
    assert alias.data_ptr() == value.data_ptr()
