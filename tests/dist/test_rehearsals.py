"""`outsize rehearse` over real processes: what holds, and faults that it finds, each with the right name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.api.records import Lora
from outsize.cli.processes.rehearsals import RehearsedModel
from outsize.errors import ModelMismatch
from outsize.ir.answers.runs.rehearsal import Rehearsal
from outsize.ir.plan import Axes, Plan, Precision
from outsize.ops.rehearsal.small_model import SmallModel
from outsize.run.stage.stage import StageExecutor as Stage
from outsize.run.transport.same_host import SameHostTransport
from outsize.train.checkpoint.background import WrittenSave
from outsize.train.engine.engine import Engine
from outsize.train.engine.state import EngineState

pytestmark = pytest.mark.dist
HERE = f"{__name__}:"


@pytest.fixture(autouse=True)
def _where_the_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import a builder from the working directory, as the command line does."""
    monkeypatch.chdir(Path(__file__).parent)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x)).tanh()


def blocks(layers: int = 8, width: int = 64) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 8))


def planned(
    spec: str,
    shape: str,
    batch: int,
    axes: dict[str, int],
    lora: Lora | None = None,
    precision: Precision = "fp32",
) -> Plan:
    built = SmallModel(spec, shape, 0, lora=lora or Lora()).made(batch, meta=True, as_it_is=True)
    mesh = Axes(**axes)
    return outsize.plan(
        built.model,
        built.args,
        built.kwargs,
        loss_fn=built.objective.loss_fn,
        target=built.objective.target,
        cluster=f"{mesh.world_size // 8}x8xh100-80gb"
        if mesh.world_size > 8
        else f"{mesh.world_size}xh100-80gb",
        stages=mesh.pp,
        microbatches=batch // (2 * mesh.replicas),
        schedule="1f1b",
        request=outsize.Request(precision=precision),
        axes={**{name: size for name, size in axes.items() if name != "pp"}, "others": 1},
    )


def rehearsed(
    spec: str,
    shape: str,
    plan: Plan,
    most_ranks: int = 2,
    hang_s: float = 5.0,
    lora: Lora | None = None,
) -> Rehearsal:
    model = RehearsedModel(spec, shape, None, plan, most_ranks, lora=lora or Lora(), hang_s=hang_s)
    return model.rehearsed(lambda _: None)


def is_rank(number: int) -> bool:
    """Whether this process is that rank of a rehearsal; the test itself is none."""
    return os.environ.get("RANK") == str(number)


LLAMA = (
    "transformers:LlamaConfig?num_hidden_layers=16&hidden_size=1024&intermediate_size=2048&vocab_size=8192"
)
MOE = (
    "transformers:Qwen3MoeConfig?num_hidden_layers=12&hidden_size=512&moe_intermediate_size=256&num_experts=64"
    "&num_experts_per_tok=8&num_attention_heads=16&num_key_value_heads=4&vocab_size=8192"
)
LARGE = {
    "dense on 16": (LLAMA, "256", 128, {"pp": 4, "tp": 4}),
    "dense on 128": (LLAMA, "256", 256, {"pp": 4, "dp_shard": 8, "tp": 4}),
    "vision on 16": ("torchvision:resnet50", "3x224x224", 512, {"pp": 4, "dp_replicate": 4}),
    "vision on 128": ("transformers:ViTConfig", "224", 1024, {"pp": 4, "dp_replicate": 16, "tp": 2}),
    "experts on 16": (MOE, "256", 128, {"pp": 2, "ep": 8}),
    "experts on 128": (MOE, "256", 512, {"pp": 2, "dp_shard": 8, "ep": 8}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", LARGE)
def test_plans_for_many_devices_hold(case: str) -> None:
    spec, shape, batch, axes = LARGE[case]
    rehearsal = rehearsed(spec, shape, planned(spec, shape, batch, axes), most_ranks=8, hang_s=60.0)
    assert rehearsal.holds, f"{rehearsal.worlds[-1].culprit} {rehearsal.worlds[-1].output}"
    assert not rehearsal.apart
    assert not rehearsal.missing_kinds


def test_a_pipeline_holds() -> None:
    spec = f"{HERE}blocks"
    rehearsal = rehearsed(spec, "64", planned(spec, "64", 32, {"pp": 8}))
    assert rehearsal.holds, f"{rehearsal.worlds[-1].culprit} {rehearsal.worlds[-1].output}"
    (world,) = rehearsal.worlds
    assert world.messages
    assert [result.bits for result in world.results] == [False, True, True, False, True]


def test_a_pipeline_of_adapters_in_bfloat16_holds() -> None:
    """Weights that are not trained have no gradients, and no place in the optimizer; all are float32 here."""
    spec, lora = f"{HERE}blocks", Lora(4, ("up",))
    plan = planned(spec, "64", 32, {"pp": 8}, lora, "bf16")
    rehearsal = rehearsed(spec, "64", plan, lora=lora)
    assert rehearsal.holds, f"{rehearsal.worlds[-1].culprit} {rehearsal.worlds[-1].output}"
    assert rehearsal.model == "PeftModel"
    assert rehearsal.unlike == ("precision bf16: computed in fp32",)
    (world,) = rehearsal.worlds
    assert [result.bits for result in world.results] == [False, True, True, False, True]
    with pytest.raises(ModelMismatch, match="outsize rehearse MODEL --input SHAPE --lora R"):
        rehearsed(spec, "64", plan)


def exchange_two_messages(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends the values of its first two microbatches in each other's place."""
    send, held = SameHostTransport.send, list[tuple[int, int, int, Tensor]]()

    def exchanged(self: Any, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        if not is_rank(0) or len(held) > 1 or tensor is None or tensor.ndim < 2:
            send(self, peer, channel, microbatch, tensor)
            return
        held.append((peer, channel, microbatch, tensor))
        if len(held) > 1:
            first, second = held
            send(self, *first[:3], second[3])
            send(self, *second[:3], first[3])

    patch.setattr(SameHostTransport, "send", exchanged)


def lose_a_message(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 never sends the values of its second microbatch."""
    send = SameHostTransport.send

    def losing(self: Any, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        if not is_rank(0) or microbatch != 1 or tensor is None or tensor.ndim < 2:
            send(self, peer, channel, microbatch, tensor)

    patch.setattr(SameHostTransport, "send", losing)


def change_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 adds a little to a gradient of its first weight."""
    backward = Stage.backward

    def changed(self: Any, microbatch: int, weight: float, gradients: Any) -> Any:
        sink = backward(self, microbatch, weight, gradients)
        if is_rank(1) and microbatch == 1:
            grads = (weight.grad for weight in self.model.parameters())
            next(grad for grad in grads if grad is not None).view(-1)[0] += 1e-6
        return sink

    patch.setattr(Stage, "backward", changed)


def change_a_forward(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 computes its third microbatch a little wrong."""
    forward = Stage.forward

    def changed(self: Any, microbatch: int, *rest: Any) -> Any:
        result = forward(self, microbatch, *rest)
        if is_rank(0) and microbatch == 2:
            next(iter(result.sent.values())).data[0, 0] += 1e-3
        return result

    patch.setattr(Stage, "forward", changed)


def die(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed in its first step, as by the kernel that runs out of memory."""
    forward = Stage.forward

    def dying(self: Any, microbatch: int, *rest: Any) -> Any:
        if is_rank(1):
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, microbatch, *rest)

    patch.setattr(Stage, "forward", dying)


def forget_a_weight(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 goes on from a checkpoint with another weight."""
    resume = EngineState.resume

    def forgetting(self: Any, *rest: Any) -> Any:
        resumed = resume(self, *rest)
        if is_rank(1):
            with torch.no_grad():
                weights = (w for w in self._run.model.parameters() if not w.is_meta)
                next(weights).mul_(1.5)
        return resumed

    patch.setattr(EngineState, "resume", forgetting)


def leave_a_tensor_out(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 does not write one of its tensors into the checkpoint."""
    write = WrittenSave.write

    def forgetful(self: Any, chunks: Any, group: Any) -> None:
        write(self, chunks[1:] if is_rank(1) else chunks, group)

    patch.setattr(WrittenSave, "write", forgetful)


def forget_the_optimizer(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 goes on from a checkpoint with states of AdamW that are zero."""
    resume = EngineState.resume

    def forgetting(self: Any, *rest: Any) -> Any:
        resumed = resume(self, *rest)
        if is_rank(1):
            for state in self._update.optimizer.state.values():
                state["exp_avg_sq"].zero_()
        return resumed

    patch.setattr(EngineState, "resume", forgetting)


def update_too_far(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 moves its first weight further than AdamW says."""
    update = Engine.update

    def too_far(self: Any, *rest: Any, **named: Any) -> Any:
        result = update(self, *rest, **named)
        if is_rank(1):
            with torch.no_grad():
                next(weight for _, weight in self.weights.named_parameters()).view(-1)[0] += 1e-3
        return result

    patch.setattr(Engine, "update", too_far)


FAULTS = {
    "order": (exchange_two_messages, "messages", 1, "1RECV_F0"),
    "death": (die, "messages", 1, "step 1"),
    "gradient": (change_a_gradient, "numbers", 1, "backward of stage 1"),
    "forward": (change_a_forward, "numbers", 0, "0F2"),
    "deadlock": (lose_a_message, "messages", 1, "1RECV_F1"),
    "resume": (forget_a_weight, "resume", 1, "resume"),
    "checkpoint": (leave_a_tensor_out, "resume", 1, "resume"),
    "optimizer": (forget_the_optimizer, "resume", 1, "step 2 again"),
    "update": (update_too_far, "numbers", 1, "the update"),
}
OFTEN = ("order", "death", "gradient")
CASES = [pytest.param(*FAULTS[n], id=n, marks=[] if n in OFTEN else [pytest.mark.full]) for n in FAULTS]


@pytest.mark.parametrize(("inflict", "proof", "rank", "action"), CASES)
def test_a_fault_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch,
    inflict: Callable[[pytest.MonkeyPatch], None],
    proof: str,
    rank: int,
    action: str,
) -> None:
    """The faults are inherited by the processes of a rehearsal, which are forks of this one."""
    spec = f"{HERE}blocks"
    plan = planned(spec, "64", 32, {"pp": 8})
    inflict(monkeypatch)
    rehearsal = rehearsed(spec, "64", plan)
    (world,) = rehearsal.worlds
    assert not rehearsal.holds
    assert [result.proof for result in world.results if result.holds is False] == [proof], world
    assert world.culprit is not None
    assert world.culprit.action == action, world
    assert world.culprit.rank == rank, world
