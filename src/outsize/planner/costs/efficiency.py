"""Predicts which share of a device's peak an op reaches, by family of ops and by size of the op.

    share(x) = peak x / (x + half),   x = seconds that the op would take at the device's peak

It is a saturating curve: an op of length `half_s` reaches half of `peak`, a long one all of it. Written out,
an op costs (x + half_s) / peak seconds: filling and draining the device costs half_s / peak, whatever its
size. Stated in seconds, one curve serves devices of any speed: a faster one needs a larger op.

GPU: large matmuls of cuBLAS reach 0.8 to 0.9 of the A100's bfloat16 peak, 1024^3 about 0.4; the forward of
FlashAttention-2 0.55 to 0.73, its backward 0.5 to 0.6 (arXiv 2307.08691, sec. 4); copies 0.8 to 0.9. Other
kinds of devices reach more or less of their peaks (ir/hardware/devices.py): products as much of the best that
they reach as an A100 of its own best, attention as much as FlashAttention-2 reaches there.
A block of 512 threads has two loads of each in flight (torch's Normalization.cuh), which come after 479
cycles of 1.755 GHz on an H100 (arXiv 2402.13499): a normalisation of few channels can take no less.
While a collective runs, computing is slower by 0.189: both use the same processors and the same memory (mean
over GPT and Llama trainings on A100, H100, MI210 and MI250, arXiv 2507.03114).
Convolutions in NCHW, norms and the backwards of embeddings reach less. Orders of magnitude, not fits.
Products of bfloat16 whose rows are not aligned to 16 bytes reach 0.3: heads of 50,257 classes in published
steps take what 77 to 83 TFLOP/s of an A100's 312 would (tuned half of benchmarks/foresight, where the cost
is proportional to samples and hidden size and gone where tensor parallelism pads the classes).
A kernel leaves the device idle for 10 us more than its work, and so does a collective. The host needs 57 us
for an op of a training loop in Python, with modules, autograd and the loop's own work, by published steps
that wait for their host: Megatron-DeepSpeed takes 3.0 to 3.2 ms for a layer of 51 ops on one A100, and 3.3 to
3.6 with the four collectives of tensor parallelism, each an op more (tuned half); hosts of newer devices
need less (ir/hardware/devices.py). A bare launch takes 5 us.
Hopper's kernels and gaps are measured on an H200, op by op (benchmarks/one-gpu/results, "ops"), its host by
kind of op over 51 steps (decision 190): copies of 128 KiB begin 1.8 us apart, convolutions of several pixels
reach 0.4 to 0.85 of the peaks of bfloat16 and TF32 beside their copies, those of single pixels 0.2 to 0.3,
products of unaligned rows 0.1 to 0.15, by Turing's kernels (`s1688 ... align1`).
A host that is late catches up within a block, such as a layer of a transformer, not over the whole model:
published steps are the sum of layers that wait for the host and of a head that does not. Neither hides the
other wholly; one rank loses 0.15 of the shorter where both are equal (tuned half), and n ranks that meet in a
collective as much as the mean of the latest of n exponential delays (H. A. David, H. N. Nagaraja, Order
Statistics, 2003). The optimizer's step streams its bytes at the rate of additions.

CPU: measured, one core, one thread, float32, torch 2.13, 2026-11. Shares of 240 GFLOP/s and of 60 GB/s: MKL's
matmuls (no AVX-512 here) 0.21 to 0.40, oneDNN's convolutions 0.45 to 0.94, attention 0.2 to 0.38; additions
0.5 to 1, GELU 0.3 to 0.6, LayerNorm 0.24, BatchNorm 0.05 to 0.1, softmax 0.3; a small op costs 1 to 2 us
without autograd. Collectives move and add bytes on the core of their rank: an all-reduce of 25.6 MB over two
processes and loopback has it for 0.66 of its 17 ms. gloo's reduce-scatter adds up a copy of the whole tensor
and takes its part (torch's ProcessGroupGloo): 24 ms, of which 17 on the core. The curves lie in the middle;
against units measured on the same, busy machine they give 0.96 of the seconds for a GPT-2 of 4 layers and
0.69 for ResNet-18, whose max-pooling takes twenty times what they say.
Oracle: tests/unit/planner/costs/test_roofline.py.
"""

from __future__ import annotations

from functools import cache
from typing import Final, final

from pydantic import Field

from outsize.ir.base import Record
from outsize.ir.graph import OpFamily
from outsize.ir.hardware.devices import (
    HOPPER,
    USUAL_ATTENTION,
    USUAL_HOST_S,
    USUAL_MATMUL,
    Device,
    reached_by,
)


@final
class EfficiencyCurve(Record):
    """`peak` is the share that the longest ops reach; `half_s` is the length of an op that reaches half of
    it.
    """

    peak: float = Field(gt=0)
    half_s: float = Field(default=0.0, ge=0)

    def seconds(self, ideal_s: float, launches: int) -> float:
        """Returns the seconds of `launches` equal ops that would take `ideal_s` in all at the
        device's peak.
        """
        return (ideal_s + launches * self.half_s) / self.peak if ideal_s > 0 else 0.0

    def peak_per_s(self, work: float, taken_s: float) -> float:
        """Returns the device's peak at which one op of so many FLOPs or bytes takes so many seconds."""
        return work / max(taken_s * self.peak - self.half_s, taken_s * self.peak / 2)


_EVEN: Final = (1.0, 1.0)


@final
class Efficiency(Record):
    """Holds curves by family for FLOPs and for bytes; `launch_s` is added per op, `host_s` is its launch on
    the host. `late` is the share of the shorter of a host's and its device's seconds that is lost where both
    need equally long. `update` is the share of bandwidth that an optimizer's step reaches; None leaves its
    seconds out. `element_s` is what one element takes in a block of threads that waits for memory, and
    `narrow_element` how many times as much one of two bytes. `crowded` is by how much longer an op takes
    while a collective runs. With `sums_whole` a reduce-scatter is an all-reduce, from which each rank copies
    its part. `instructions_per_flop` are issued by threads in the time of a FLOP at the peak of ordinary
    float32; 0 where kernels are not bound by them. With `copies_tf32` convolutions in TF32 copy their
    images, as those of two bytes do. `host_shares` are the host's seconds for an op of a family, forward and
    for a gradient, over `host_s`; families that are not in it need the mean.

    A device that runs ahead of its host waits for it: a pass takes the longer of both. On a CPU the host is
    the device, so `host_s` is 0 and `launch_s` is all.
    """

    compute: dict[OpFamily, EfficiencyCurve]
    memory: dict[OpFamily, EfficiencyCurve]
    launch_s: float = Field(ge=0)
    host_s: float = Field(default=0.0, ge=0)
    host_shares: dict[OpFamily, tuple[float, float]] = Field(default_factory=dict)
    late: float = Field(default=0.0, ge=0)
    crowded: float = Field(default=0.0, ge=0)
    element_s: float = Field(default=0.0, ge=0)
    narrow_element: float = Field(default=1.0, ge=1)
    sums_whole: bool = False
    copies_tf32: bool = False
    instructions_per_flop: float = Field(default=0.0, ge=0)
    update: float | None = Field(default=None, gt=0)

    def host_share(self, family: OpFamily, passed: int) -> float:
        """Returns the host's seconds for an op of a family in a pass (0 is the forward) over those of a mean
        op.
        """
        return self.host_shares.get(family, _EVEN)[passed > 0]

    def lateness(self, ranks: int) -> float:
        """Returns `late` for so many ranks that wait for each other.

        The mean of the latest of n exponential delays is 1 + 1/2 + ... + 1/n times that of one.
        """
        return self.late * sum(1 / rank for rank in range(1, ranks + 1))

    def beside_s(self, compute_s: float, links_s: float) -> float:
        """Returns the seconds of computing beside collectives, which slow it down while they run."""
        return compute_s + self.crowded * min(compute_s, links_s)

    def seen_s(self, links_s: float, compute_s: float) -> float:
        """Returns by how much collectives of `links_s` make computing longer that begins with them and has to
        wait for them in its end.
        """
        return max(links_s, self.beside_s(compute_s, links_s)) - compute_s

    def copied_s(self, size_bytes: float, device: Device) -> float:
        """Returns the seconds in which the device reads so many bytes and writes them elsewhere."""
        return 2 * size_bytes / (device.bytes_per_s * self.memory["elementwise"].peak)

    def update_s(self, moved_bytes: float, device: Device) -> float:
        """Returns the seconds of an optimizer's step that reads and writes so many bytes of the device."""
        return moved_bytes / (device.bytes_per_s * self.update) if self.update else 0.0


GPU: Final = Efficiency(
    compute={
        "matmul": EfficiencyCurve(peak=0.8, half_s=5e-6),
        "unaligned_matmul": EfficiencyCurve(peak=0.3, half_s=5e-6),
        "attention": EfficiencyCurve(peak=0.6, half_s=12e-6),
        "convolution": EfficiencyCurve(peak=0.5, half_s=8e-6),
        "direct_convolution": EfficiencyCurve(peak=0.5, half_s=8e-6),
        "layout_copy": EfficiencyCurve(peak=0.4),
        "elementwise": EfficiencyCurve(peak=0.4),
        "normalisation": EfficiencyCurve(peak=0.4),
        "reduction": EfficiencyCurve(peak=0.4),
        "embedding": EfficiencyCurve(peak=0.4),
        "other": EfficiencyCurve(peak=0.4),
    },
    memory={
        "matmul": EfficiencyCurve(peak=0.8, half_s=2e-6),
        "unaligned_matmul": EfficiencyCurve(peak=0.8, half_s=2e-6),
        "attention": EfficiencyCurve(peak=0.8, half_s=2e-6),
        "convolution": EfficiencyCurve(peak=0.7, half_s=2e-6),
        "direct_convolution": EfficiencyCurve(peak=0.7, half_s=2e-6),
        "layout_copy": EfficiencyCurve(peak=0.85, half_s=2e-6),
        "elementwise": EfficiencyCurve(peak=0.85, half_s=2e-6),
        "normalisation": EfficiencyCurve(peak=0.7, half_s=2e-6),
        "reduction": EfficiencyCurve(peak=0.75, half_s=3e-6),
        "embedding": EfficiencyCurve(peak=0.5, half_s=3e-6),
        "other": EfficiencyCurve(peak=0.7, half_s=2e-6),
    },
    launch_s=10e-6,
    host_s=USUAL_HOST_S,
    late=0.15,
    crowded=0.189,
    element_s=0.27e-6 / (512 * 2),
    narrow_element=1.35,
    update=0.85,
)

CPU: Final = Efficiency(
    compute={
        "matmul": EfficiencyCurve(peak=0.35, half_s=0.3e-6),
        "unaligned_matmul": EfficiencyCurve(peak=0.35, half_s=0.3e-6),
        "attention": EfficiencyCurve(peak=0.35, half_s=10e-6),
        "convolution": EfficiencyCurve(peak=0.7, half_s=10e-6),
        "direct_convolution": EfficiencyCurve(peak=0.7, half_s=10e-6),
        "layout_copy": EfficiencyCurve(peak=0.2),
        "elementwise": EfficiencyCurve(peak=0.2),
        "normalisation": EfficiencyCurve(peak=0.2),
        "reduction": EfficiencyCurve(peak=0.2),
        "embedding": EfficiencyCurve(peak=0.2),
        "other": EfficiencyCurve(peak=0.2),
    },
    memory={
        "matmul": EfficiencyCurve(peak=0.8),
        "unaligned_matmul": EfficiencyCurve(peak=0.8),
        "attention": EfficiencyCurve(peak=0.5),
        "convolution": EfficiencyCurve(peak=0.6),
        "direct_convolution": EfficiencyCurve(peak=0.6),
        "layout_copy": EfficiencyCurve(peak=0.45),
        "elementwise": EfficiencyCurve(peak=0.45),
        "normalisation": EfficiencyCurve(peak=0.15, half_s=1e-6),
        "reduction": EfficiencyCurve(peak=0.5),
        "embedding": EfficiencyCurve(peak=0.8),
        "other": EfficiencyCurve(peak=0.5),
    },
    launch_s=4e-6,
    crowded=0.66,
    sums_whole=True,
)


def default_of(device: Device) -> Efficiency:
    """Returns the curves of a known kind of device, with its own host where that was measured."""
    return CPU if device.kind == "cpu" else _of_kind(device.kind, device.host_s)


# Seconds beside its work, in which a kernel of an H200 leaves the device idle or fills and drains it.
_HOPPER_LAUNCH_S: Final = 2e-6
_HOPPER_COMPUTE: Final[dict[OpFamily, EfficiencyCurve]] = {
    "matmul": EfficiencyCurve(peak=0.8, half_s=2e-6),
    "unaligned_matmul": EfficiencyCurve(peak=0.135, half_s=2e-6),
    "attention": EfficiencyCurve(peak=0.6, half_s=5e-6),
    "convolution": EfficiencyCurve(peak=0.68, half_s=7e-6),
    "direct_convolution": EfficiencyCurve(peak=0.25, half_s=1e-6),
}
_HOPPER_MEMORY_HALF_S: Final = 0.6e-6
_HOPPER_MEMORY: Final[dict[OpFamily, float]] = {"layout_copy": 0.6, "elementwise": 0.8}
# The host's microseconds for an op in the forward, and for one of its gradients, over the 37 of a mean op.
_HOPPER_HOST_US: Final[dict[OpFamily, tuple[float, float]]] = {
    "matmul": (95, 55),
    "unaligned_matmul": (95, 55),
    "attention": (95, 55),
    "convolution": (88, 30),
    "direct_convolution": (88, 30),
    "normalisation": (46, 28),
    "elementwise": (10, 20),
    "reduction": (10, 20),
    "embedding": (10, 20),
    "other": (10, 20),
}


@cache
def _of_kind(kind: str, host_s: float | None) -> Efficiency:
    reached = reached_by(kind)
    is_hopper = kind.split("-")[0] in HOPPER
    compute, memory = GPU.compute | (_HOPPER_COMPUTE if is_hopper else {}), GPU.memory
    if is_hopper:
        memory = {
            family: EfficiencyCurve(peak=_HOPPER_MEMORY.get(family, curve.peak), half_s=_HOPPER_MEMORY_HALF_S)
            for family, curve in memory.items()
        }
    shares: dict[OpFamily, float] = {
        "matmul": reached.matmul / USUAL_MATMUL,
        "unaligned_matmul": reached.matmul / USUAL_MATMUL,
        "attention": reached.attention / USUAL_ATTENTION,
    }
    for family, share in shares.items():
        curve = compute[family]
        compute[family] = curve.model_copy(update={"peak": curve.peak * share})
    return GPU.model_copy(
        update={
            "compute": compute,
            "memory": memory,
            "launch_s": _HOPPER_LAUNCH_S if is_hopper else GPU.launch_s,
            "host_s": reached.host_s if host_s is None else host_s,
            "host_shares": {f: (us[0] / 37, us[1] / 37) for f, us in _HOPPER_HOST_US.items() if is_hopper},
            "copies_tf32": is_hopper,
            "instructions_per_flop": reached.instructions_per_flop,
        }
    )
