"""Measures single ops on the GPU here: the device's seconds by op, shape and dtype, the host's by kind of op,
and those between kernels. The product's facts about Hopper are rounded from its file.

    python benchmarks/one-gpu/ops.py --out ops.json                  # on a GPU, one minute

Nothing of outsize is imported. Device seconds are those of several runs that the host has launched behind a
kernel that waits, so that the host is never late; each row has forward and backward in float32 and bfloat16.
Small tensors stay in the device's cache between runs, so these are lower ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
AHEAD_CYCLES: Final = 1_500_000
RUNS, LAPS, CHAIN = 4, 7, 60
Row = dict[str, Any]
Run = Callable[[], object]
Op = Callable[..., Tensor]

# (batch, channels, side, results, kernel, stride, groups)
DEPTHWISE: Final = [
    (64, 32, 112, 32, 3, 1, 32), (64, 96, 112, 96, 3, 2, 96), (64, 144, 56, 144, 3, 1, 144),
    (64, 144, 56, 144, 5, 2, 144), (64, 240, 28, 240, 5, 1, 240), (64, 480, 14, 480, 5, 1, 480),
    (64, 960, 7, 960, 5, 1, 960), (64, 96, 56, 96, 7, 1, 96), (64, 384, 14, 384, 7, 1, 384),
    (64, 768, 7, 768, 7, 1, 768),
]  # fmt: skip
GROUPED: Final = [
    (64, 128, 56, 128, 3, 1, 32), (64, 256, 28, 256, 3, 1, 32), (64, 512, 14, 512, 3, 1, 32),
    (64, 1024, 7, 1024, 3, 1, 32), (64, 96, 56, 96, 3, 1, 2), (64, 192, 28, 192, 3, 1, 4),
    (64, 448, 28, 448, 3, 1, 8), (64, 896, 14, 896, 3, 1, 16), (64, 48, 56, 48, 3, 1, 2),
]  # fmt: skip
DENSE: Final = [
    (64, 64, 56, 64, 3, 1, 1), (64, 128, 28, 128, 3, 1, 1), (64, 256, 14, 256, 3, 1, 1),
    (64, 512, 7, 512, 3, 1, 1), (64, 128, 56, 128, 3, 2, 1), (64, 64, 224, 64, 3, 1, 1),
    (64, 256, 28, 512, 3, 1, 1), (8, 2048, 65, 256, 3, 1, 1), (64, 64, 56, 256, 1, 1, 1),
    (64, 512, 28, 128, 1, 1, 1), (64, 1024, 14, 256, 1, 1, 1), (64, 2048, 7, 512, 1, 1, 1),
    (64, 256, 56, 512, 1, 2, 1), (64, 3, 224, 64, 7, 2, 1), (64, 3, 224, 32, 3, 2, 1),
]  # fmt: skip
CHANNELS: Final = [(64, 16, 112), (64, 64, 112), (64, 64, 56), (64, 256, 56), (64, 512, 28), (64, 1024, 14)]
ROWS: Final = [(16384, 768), (8192, 4096), (200704, 96), (50176, 192)]
PRODUCTS: Final = [
    (8192, 768, 768), (8192, 768, 3072), (8192, 2048, 8192), (25216, 768, 3072), (200704, 96, 384),
    (8192, 1024, 50257), (8192, 768, 50304), (64, 2048, 1000), (4096, 1536, 16),
]  # fmt: skip
# (batch, heads, heads of keys, length, width, causal)
ATTENTION: Final = [
    (16, 12, 12, 1024, 64, True), (8, 16, 16, 512, 64, True), (128, 12, 12, 197, 64, False),
    (4, 32, 32, 2048, 64, True), (4, 16, 8, 1024, 128, True), (2, 8, 4, 1024, 256, True),
]  # fmt: skip
IMAGES: Final = (64, 256, 56, 56)


def device_s(run: Run, runs: int = RUNS) -> float:
    """Returns the device's seconds of one run, launched long before it begins."""
    run()
    run()
    taken_s = list[float]()
    for _ in range(2):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        torch.cuda.synchronize()
        taken_s.append(begin.elapsed_time(end) / 1e3 / runs)
    return min(taken_s)


def drawn(shape: Sequence[int], dtype: str) -> Tensor:
    """Returns random values that want a gradient."""
    return torch.randn(*shape, device="cuda", dtype=DTYPES[dtype], requires_grad=True)


def passes(kind: str, op: Op, inputs: list[Tensor], **more: Any) -> Row:
    """Returns the row of an op over inputs: seconds of its forward, and of the gradients of all inputs."""
    out = op(*inputs)
    gradient = torch.randn_like(out)
    backward_s = device_s(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))
    with torch.no_grad():
        forward_s = device_s(lambda: op(*inputs))
    return {"kind": kind, **more, "forward_s": forward_s, "backward_s": backward_s}


def convolution(shape: tuple[int, ...], dtype: str, *, last: bool = False) -> Row:
    """Returns the row of a convolution, with its two gradients apart."""
    batch, channels, side, results, kernel, stride, groups = shape
    with torch.no_grad():
        image = drawn((batch, channels, side, side), dtype)
        if last:
            image = image.contiguous(memory_format=torch.channels_last)
        weight = drawn((results, channels // groups, kernel, kernel), dtype)
        how: list[Any] = [[stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups]
        aten = torch.ops.aten
        gradient = torch.randn_like(aten.convolution(image, weight, None, *how))

        def back(mask: list[bool]) -> float:
            return device_s(lambda: aten.convolution_backward(gradient, image, weight, None, *how, mask))

        return {
            "kind": "convolution",
            "shape": shape,
            "dtype": dtype,
            "channels_last": last,
            "forward_s": device_s(lambda: aten.convolution(image, weight, None, *how)),
            "input_s": back([True, False, False]),
            "weight_s": back([False, True, False]),
        }


def attention(shape: tuple[int, int, int, int, int, bool], dtype: str) -> Row:
    """Returns the row of an attention, with what it keeps for its backward in sizes of its queries."""
    batch, heads, keys, length, width, causal = shape
    inputs = [drawn((batch, count, length, width), dtype) for count in (heads, keys, keys)]

    def op(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=keys != heads)

    before_bytes = torch.cuda.memory_allocated()
    out = op(*inputs)
    kept = (torch.cuda.memory_allocated() - before_bytes) / inputs[0].nbytes
    node = type(out.grad_fn).__name__
    del out
    return passes("attention", op, inputs, shape=shape, dtype=dtype, kept_queries=kept, node=node)


def products(shape: tuple[int, int, int], dtype: str) -> Row:
    """Returns the row of x @ w.t() of (rows, width) and (results, width)."""
    rows, width, results = shape
    inputs = [drawn((rows, width), dtype), drawn((results, width), dtype)]
    return passes("product", lambda x, w: x @ w.t(), inputs, shape=shape, dtype=dtype)


def element_ops(dtype: str) -> list[Row]:
    """Returns rows of normalisations, pooling, upsampling and ops that work element by element."""
    rows = list[Row]()
    for batch, channels, side in CHANNELS:
        inputs = [drawn((batch, channels, side, side), dtype)]
        inputs += [torch.ones(channels, device="cuda", requires_grad=True) for _ in range(2)]
        rows.append(
            passes(
                "batch_norm",
                lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
                inputs,
                shape=(batch, channels, side),
                dtype=dtype,
            )
        )
    for count, width in ROWS:
        inputs = [drawn((count, width), dtype), drawn((width,), dtype), drawn((width,), dtype)]
        norm: Op = lambda x, w, b: F.layer_norm(x, w.shape, w, b)  # noqa: E731
        rows.append(passes("layer_norm", norm, inputs, shape=(count, width), dtype=dtype))
    alone: dict[str, tuple[Sequence[int], Op]] = {
        "max_pool 3/2": ((64, 64, 112, 112), lambda x: F.max_pool2d(x, 3, 2, 1)),
        "max_pool 2/2": (IMAGES, lambda x: F.max_pool2d(x, 2)),
        "max_pool 3/1": ((256, 480, 14, 14), lambda x: F.max_pool2d(x, 3, 1, 1)),
        "avg_pool 2/2": (IMAGES, lambda x: F.avg_pool2d(x, 2)),
        "bilinear 65 to 520": ((8, 21, 65, 65), lambda x: F.interpolate(x, (520, 520), mode="bilinear")),
        "relu": (IMAGES, F.relu),
        "gelu": (IMAGES, F.gelu),
        "transposed copy": ((16, 1024, 12, 64), lambda x: x.transpose(1, 2).contiguous()),
        "roll": ((64, 56, 56, 96), lambda x: torch.roll(x, (3, 3), (1, 2))),
        "cast": ((16384, 3072), lambda x: x.to(torch.float32 if dtype == "bf16" else torch.bfloat16)),
        "softmax": ((16, 12, 512, 512), lambda x: x.softmax(-1)),
        "sum of rows": ((16384, 1024), lambda x: x.sum(0)),
    }
    for name, (shape, op) in alone.items():
        rows.append(passes(name, op, [drawn(shape, dtype)], shape=shape, dtype=dtype))
    pairs = {"mul": IMAGES, "mul by channel": (64, 256, 1, 1), "mul by column": (56,)}
    for name, shape in pairs.items():
        rows.append(passes(name, torch.mul, [drawn(IMAGES, dtype), drawn(shape, dtype)], dtype=dtype))
    return rows


def host_rows(dtype: str) -> list[Row]:
    """Returns the host's microseconds for one op of a chain, forward and backward, on tiny tensors."""
    wide, images = (8, 64, 64), (4, 32, 8, 8)
    like = DTYPES[dtype]
    weight = drawn((64,), dtype)
    ops: dict[str, tuple[Sequence[int], Op]] = {
        "view": (wide, lambda x: x.view(wide)),
        "transpose": (wide, lambda x: x.transpose(1, 2)),
        "relu": (wide, F.relu),
        "mul by a weight": (wide, lambda x: x * weight),
        "softmax": (wide, lambda x: x.softmax(-1)),
        "linear": (wide, nn.Linear(64, 64).to("cuda", like)),
        "layer_norm": (wide, nn.LayerNorm(64).to("cuda", like)),
        "convolution": (images, nn.Conv2d(32, 32, 3, padding=1, bias=False).to("cuda", like)),
        "batch_norm": (images, nn.BatchNorm2d(32).to("cuda")),
    }
    return [host_row(name, op, shape, dtype) for name, (shape, op) in ops.items()]


def host_row(name: str, op: Op, shape: Sequence[int], dtype: str) -> Row:
    """Returns the median over LAPS chains of CHAIN ops each."""
    forward_s, backward_s = list[float](), list[float]()
    for _ in range(LAPS):
        value = drawn(shape, dtype)
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        for _ in range(CHAIN):
            value = op(value)
        forward_s.append((time.perf_counter() - begin_s) / CHAIN)
        gradient = torch.ones_like(value)
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        torch.autograd.backward(value, gradient)
        backward_s.append((time.perf_counter() - begin_s) / CHAIN)
        torch.cuda.synchronize()
    medians = {"forward_s": statistics.median(forward_s), "backward_s": statistics.median(backward_s)}
    return {"kind": "host", "op": name, "dtype": dtype, **medians}


def gap_rows() -> list[Row]:
    """Returns the seconds of small kernels in a row, from the begin of one to that of the next."""
    rows = list[Row]()
    for elements in (1 << 6, 1 << 16, 1 << 20, 1 << 22, 1 << 25):
        source = drawn((elements,), "bf16").detach()
        target = torch.empty_like(source)
        taken_s = device_s(lambda s=source, t=target: t.copy_(s), 50)
        rows.append({"kind": "gap", "of": "copy", "moved_bytes": 4 * elements, "seconds": taken_s})
    square = drawn((512, 512), "bf16").detach()
    rows.append({"kind": "gap", "of": "product of 512", "seconds": device_s(lambda: square @ square, 50)})
    return rows


def main() -> None:
    """Measures all and writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = gap_rows()
    for dtype in DTYPES:
        rows += host_rows(dtype)
        rows += [convolution(shape, dtype) for shape in (*DEPTHWISE, *GROUPED, *DENSE)]
        rows += [convolution(shape, dtype, last=True) for shape in DEPTHWISE]
        rows += element_ops(dtype)
        rows += [products(shape, dtype) for shape in PRODUCTS]
        rows += [attention(shape, dtype) for shape in ATTENTION]
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    options.out.write_text(json.dumps({"head": head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
