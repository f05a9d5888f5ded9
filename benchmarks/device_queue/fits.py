"""What `outsize.largest_batch` promises of the models of script 07, written down before a GPU is asked.

    PYTHONPATH=benchmarks/one-gpu python benchmarks/device_queue/fits.py     # writes predicted/fits.json
    PYTHONPATH=benchmarks/one-gpu python benchmarks/device_queue/fits.py NAME ...  # of these models only

Each device kind is planned with 24 GB of its memory, which the script holds its process to: batches are small
then, and thirteen models fit into five minutes. `largest` is the largest batch that is promised (P95 within
the 24 GB); `refused` is the first batch whose P95 is at least 8 % above that.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from cases import Case, image_loss
from quantized import QUANTIZED, REHEARSED
from sets import SETS

HERE: Final = Path(__file__).resolve().parent
FILE: Final = HERE / "predicted" / "fits.json"
ROOM_BYTES: Final = 24_000_000_000
BEYOND: Final = 1.08
KINDS: Final = {"NVIDIA H100": "h100-80gb", "NVIDIA H200": "h200"}
"""Names that CUDA has for the devices, and what they are called in a cluster."""
NAMES: Final = (
    "gpt2-355M-b8-s1024-amp", "llama-0.7B-b8-s1024-bf16", "qwen3-0.6B-b4-s1024-bf16",
    "bert-340M-b16-s512-amp", "t5-220M-b16-s512-bf16", "qwen2-1.5B-lora-b4-s1024-bf16", "resnet50-b128-amp",
    "efficientnet_b0-b128-fp32", "convnext_base-b32-bf16", "vit_b_16-b64-fp32",
    "swin_t-b128-fp32", "unet-b8-s512-amp", "llama-1.1B-nf4-lora-b4-s1024-bf16",
)  # fmt: skip
REHEARSED_NAMES: Final = ("resnet50-b128-amp", *REHEARSED)
KNOWN: Final = {n: case for cases in (*SETS.values(), QUANTIZED, REHEARSED) for n, case in cases.items()}


def sized(name: str, batch: int) -> Case:
    """Returns a case with so many samples in its batch."""
    case = KNOWN[name]
    made = case.make_batch
    return replace(case, make_batch=partial(made.func, batch, *made.args[1:], **made.keywords))


def predicted(name: str, kind: str) -> dict[str, int]:
    """Returns what the product promises of a model on one device of a kind."""
    import outsize
    from outsize.api.problem import cluster_of
    from outsize.capture.models.on_meta import built_on_meta

    case = sized(name, 2)
    model = case.build() if case.is_quantized else built_on_meta(case.build)
    model = (model.bfloat16() if case.precision == "bf16" else model).train()
    cluster = cluster_of(f"1x{kind}")
    share = ROOM_BYTES / cluster.devices[0].memory_bytes
    how: dict[str, Any] = {"cluster": cluster.shared(share, cluster.name), "stages": 1, "microbatches": 1}
    if case.precision == "bf16-mixed":
        how["precision"] = case.precision
    batch = case.batch()
    args: tuple[Any, ...] = ()
    if "images" in batch:
        args, how["target"], how["loss_fn"] = (batch["images"],), batch["classes"], image_loss
    else:
        how["kwargs"] = batch

    def p95_bytes(size: int) -> int:
        return max(device.p95_bytes for device in outsize.fit(model, args, batch_size=size, **how).devices)

    largest = outsize.largest_batch(model, args, **how).value
    per_sample_bytes = (p95_bytes(2 * largest) - p95_bytes(largest)) / largest
    guess = largest + max(1, int((BEYOND * ROOM_BYTES - p95_bytes(largest)) / per_sample_bytes))
    refused = next(size for size in count(guess) if p95_bytes(size) >= BEYOND * ROOM_BYTES)
    return {
        "largest": largest,
        "largest_p95_bytes": p95_bytes(largest),
        "refused": refused,
        "refused_p95_bytes": p95_bytes(refused),
    }


def main() -> None:
    found: dict[str, dict[str, dict[str, int]]] = json.loads(FILE.read_text()) if sys.argv[1:] else {}
    for kind in KINDS.values():
        for name in sys.argv[1:] or NAMES:
            found.setdefault(kind, {})[name] = predicted(name, kind)
            print(kind, name, found[kind][name], flush=True)
            FILE.parent.mkdir(exist_ok=True)
            FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
