"""One rank: weights that are read, kept, averaged and saved by several ranks together.

`weights_worker.py FOLDER small` runs every function named `check_...` (features_worker.py says how);
`weights_worker.py FOLDER large` loads FOLDER/weights into a model on meta and leaves its peaks of memory.
"""

from __future__ import annotations

import copy
import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import pytest
import torch
import torch.distributed as dist
from features_worker import Pair, adamw, outcome
from named_updates import SITUATIONS, Byol, engine_of, follow, follow_all_but_biases
from named_updates import X as NAMED_X
from parity_runs import SEED, fresh, planned
from safetensors.torch import load_file, save_file
from test_weights_over_one_memory import Transposed, Views
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outsize
from outsize.errors import BadOption, RankFailed
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.run.weights.safetensors import INDEX, SINGLE, WeightFiles
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

WIDTH, LAYERS = 3072, 8
FOLDER = Path(sys.argv[1])


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return fresh(name)


def saved(world: World, name: str) -> Path:
    """The zoo model's weights in a file, of tied ones the last name alone."""
    folder = FOLDER / name
    if world.rank == 0:
        folder.mkdir(exist_ok=True)
        last = {id(t): n for n, t in fresh(name).state_dict(keep_vars=True).items()}
        state = fresh(name).state_dict()
        save_file({n: state[n].contiguous().clone() for n in last.values()}, folder / SINGLE)
    dist.barrier(group=world.group)
    return folder


def trained_from_file(world: World, name: str) -> Pair:
    """A pair whose engine began on meta, after two steps of both."""
    pair = Pair(world, name)
    files = WeightFiles(saved(world, name))
    options = {"loss_fn": pair.loss_fn, "optimizer": adamw, "seed": SEED, "weights": files}
    pair.engine = make_engine(on_meta(name), planned(pair.wanted), world.group, EngineOptions(**options))
    for _ in range(2):
        assert torch.equal(pair.step().loss, pair.accumulate())
        pair.update()
    return pair


def insist_on_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


def check_a_model_in_memory_gives_back_the_weights_of_others(world: World) -> None:
    """The first check: from the first engine on, a process keeps what is freed (device/malloc.py)."""
    x = torch.zeros(4, WIDTH)
    options: dict[str, Any] = {"microbatches": 2, "loss_fn": total}
    outsize.plan(nn.Linear(8, 8), (torch.zeros(4, 8),), cluster="2xcpu", stages=1, **options)  # imports
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))  # 288 MiB
    before = resident("VmRSS")
    outsize.parallelize(model, (x,), stages=2, **options)
    others = sum(p.numel() * 4 for p in model.parameters() if p.is_meta)
    assert others > 30 << 20
    freed = before - resident("VmRSS")
    assert freed > 0.9 * others, (freed >> 20, others >> 20)


def check_a_model_on_meta_trains_like_the_plain_one(world: World) -> None:
    for name in ("gpt2", "unet", "llama"):
        pair = trained_from_file(world, name)
        pair.insist_on_equal_parameters()
        flags = {n: p.requires_grad for n, p in pair.plain.named_parameters()}
        assert {n: p.requires_grad for n, p in pair.engine.model.named_parameters()} == flags
        for key, buffer in pair.engine.model.named_buffers():
            assert buffer.is_meta or torch.equal(buffer, pair.plain.get_buffer(key))


def check_the_full_state_is_that_of_the_plain_model(world: World) -> None:
    for name in ("gpt2", "unet"):
        pair = trained_from_file(world, name)
        found = pair.engine.weights.full_state_dict()
        if world.rank:
            assert found == {}
        else:
            insist_on_equal(found, pair.plain.state_dict())
            pointers = {t.data_ptr() for t in pair.engine.model.state_dict().values() if not t.is_meta}
            assert pointers.isdisjoint(t.data_ptr() for t in found.values())


def check_saved_weights_load_into_plain_torch(world: World) -> None:
    for name in ("gpt2", "unet"):
        pair = trained_from_file(world, name)
        folder = FOLDER / f"{name}-saved"
        for shard_bytes in (20_000, 10**9):
            assert pair.engine.weights.full_state_dict(to=folder, shard_bytes=shard_bytes) == {}
            assert (folder / INDEX).exists() is (shard_bytes == 20_000)
            assert len(list(folder.iterdir())) == 1 or shard_bytes == 20_000
            dist.barrier(group=world.group)
        model = fresh(name)
        strict = len(set(model.state_dict(keep_vars=True).values())) == len(model.state_dict())
        model.load_state_dict(load_file(folder / SINGLE), strict=strict)
        insist_on_equal(dict(model.state_dict()), pair.plain.state_dict())


def check_the_module_has_this_ranks_weights_under_the_users_names(world: World) -> None:
    for name in ("gpt2", "unet"):
        pair = trained_from_file(world, name)
        module = pair.engine.weights.module
        assert isinstance(module, type(pair.plain))
        assert dict(module.named_parameters()).keys() == dict(pair.engine.weights.named_parameters()).keys()
        assert [n for n, t in module.state_dict().items() if t.is_meta] == []
        names: list[Any] = [None] * world.world_size
        dist.all_gather_object(names, list(module.state_dict()), group=world.group)
        assert sorted(n for some in names for n in some) == sorted(pair.plain.state_dict())


def check_clipping_by_value_and_averaging_are_those_of_plain_torch(world: World) -> None:
    pair = Pair(world, "mlp")
    pair.step(update=False)
    module, average = pair.engine.weights.module, get_ema_multi_avg_fn(0.5)
    ours, theirs = (AveragedModel(m, multi_avg_fn=average) for m in (module, pair.plain))
    pair.accumulate()
    for _ in range(3):
        for m in (module, pair.plain):
            torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3)
        pair.engine.update()
        pair.update()
        ours.update_parameters(module)
        theirs.update_parameters(pair.plain)
        pair.step(update=False)
        pair.accumulate()
    pair.insist_on_equal_parameters()
    expected, found = dict(theirs.named_parameters()), dict(ours.named_parameters())
    assert len(found) == len(list(pair.engine.weights.named_parameters())) > 0
    assert [n for n, p in found.items() if not torch.equal(p, expected[n])] == []
    assert any(not torch.equal(p, dict(pair.plain.named_parameters())[n[7:]]) for n, p in found.items())


@final
class Late(nn.Module):
    """The last layers are used only where the input is positive, and only one of them in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.late = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x[0, 0] > 0)
        for layer in self.layers:
            x = layer(x)
        return self.late(x) if positive else x


def halves(model: nn.Module, x: Tensor) -> outsize.Plan:
    """Two microbatches, two of the four layers in each stage."""
    graph = outsize.capture(model, (x[:2],), loss_fn=total)
    bounds = (0, 2, len(graph.units))
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="2xcpu",
        axes=Axes(pp=2),
        batch_size=len(x),
        microbatches=2,
        schedule="1f1b",
        stages=stages_from_bounds(graph, bounds, ("cpu:0", "cpu:1")),
    )


def check_a_weight_that_is_first_used_later_trains_where_it_is_used(world: World) -> None:
    torch.manual_seed(0)
    plain, x = Late(), torch.randn(4, 4).abs()
    options: dict[str, Any] = {"loss_fn": total, "optimizer": adamw}
    engine = outsize.parallelize(copy.deepcopy(plain), (-x,), plan=halves(plain, -x), **options)
    optimizer = adamw(plain.parameters())
    for batch in (-x, x, x, -x, x):
        found = engine.step(batch).loss
        losses = [total(plain(part)) * 0.5 for part in batch.split(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(found, (losses[0] + losses[1]).detach())
    state = engine.weights.full_state_dict()
    if world.rank == 0:
        insist_on_equal(state, dict(plain.state_dict()))
    assert ("late.0.weight" in dict(engine.weights.named_parameters())) is (world.rank == 1)
    result = engine.evaluate(x)
    plain.eval()
    if world.rank == 1:
        outputs = torch.cat(list(result.outputs or ()))
        assert torch.equal(outputs, torch.cat([plain(part) for part in x.split(2)]))


def check_weights_are_changed_by_name_wherever_they_are(world: World) -> None:
    for situation in SITUATIONS.values():
        situation()


def check_weights_of_other_ranks_fail_where_they_are_used(world: World) -> None:
    engine = engine_of(Byol(), "student")
    model: Any = engine.model
    other = "student" if world.rank == 0 else "teacher"
    freed = model.get_parameter(f"{other}.0.weight")
    real = next(p for _, p in engine.weights.named_parameters() if p.shape == freed.shape)
    owner = f"{other}.0.weight is a weight of rank {1 - world.rank} "
    words = owner + r".*`\w+` uses.*Next: engine.weights.apply_named"
    pairs = list(zip(model.teacher.parameters(), model.student.parameters(), strict=True))
    uses: list[Callable[[], Any]] = [
        lambda: [teacher.data.mul_(0.9).add_(student.data) for teacher, student in pairs],
        lambda: [teacher.mul_(0.9) for teacher in getattr(model, other).parameters()],
        lambda: real.detach().add_(freed),
        lambda: torch.stack([real, freed]),
        lambda: freed.norm(),
        lambda: freed.data.sum().item(),
        lambda: torch._foreach_add_([real.detach(), freed], 1.0),
        lambda: nn.init.zeros_(freed),
        lambda: getattr(engine.weights.module, other)[0].weight.detach().mul_(2),
        lambda: torch.save(model.state_dict(), FOLDER / "never.pt"),
    ]
    for use in uses:
        with pytest.raises(BadOption, match=words), torch.no_grad():
            use()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Byol().parameters())
    assert copy.deepcopy(model).get_parameter(f"{other}.0.weight").is_meta
    state = Byol().state_dict()
    model.load_state_dict(state)
    assert all(torch.equal(p, state[n]) for n, p in engine.weights.named_parameters())
    assert torch.isfinite(engine.step(NAMED_X).loss)


def check_an_error_of_the_function_is_one_of_all_ranks(world: World) -> None:
    """The teacher lives on rank 0, where the function raises; rank 1 has the student and learns of it."""
    engine = engine_of(Byol(), "student")
    words = (
        r"apply_named raised ValueError: no bias \(.*named_updates\.py:\d+\) for teacher\.0\.bias on rank 0; "
        r"1 of 6 tensors were changed"
    )
    with pytest.raises(RankFailed, match=words) as found:
        engine.weights.apply_named(follow_all_but_biases, "teacher.*", "student.*")
    assert found.value.shared
    cause = found.value.__cause__
    assert isinstance(cause, ValueError) if world.rank == 0 else "ValueError: no bias" in str(cause)
    with pytest.raises(BadOption, match=r"returns a new tensor for teacher\.0\.weight") as refused:
        engine.weights.apply_named(torch.add, "teacher.*", "student.*")
    assert refused.value.shared
    assert torch.isfinite(engine.step(NAMED_X).loss)
    engine.weights.apply_named(follow, "teacher.*", "student.*")


def check_pairs_of_submodules_are_those_of_one_process_or_refused(world: World) -> None:
    """The cut is in the middle of the student, and the teacher is whole on one rank."""
    torch.manual_seed(0)
    plain = Byol()
    plain_pairs = list(zip(plain.teacher.parameters(), plain.student.parameters(), strict=True))
    for cut_before in ("student", "student.3", "head"):
        engine = engine_of(copy.deepcopy(plain), cut_before)
        module: Any = engine.weights.module
        teacher, student = module.teacher, module.student
        pairs = list(zip(teacher.parameters(), student.parameters(), strict=True))
        assert [(a.shape, b.shape) for a, b in pairs] == [(a.shape, b.shape) for a, b in plain_pairs]
        for (t, s), (expected_t, expected_s) in zip(pairs, plain_pairs, strict=True):
            assert t.is_meta or torch.equal(t, expected_t)
            assert s.is_meta or torch.equal(s, expected_s)
        assert len(list(teacher.buffers())) == len(list(student.buffers())) == 3
        own = {id(p) for _, p in engine.weights.named_parameters()}
        assert {id(p) for p in module.parameters()} == own, "an optimizer wants this rank's weights alone"
        if any(a.is_meta or b.is_meta for a, b in pairs):
            with pytest.raises(BadOption, match=r"Next: engine.weights.apply_named"), torch.no_grad():
                _ = [t.mul_(0.9).add_(s, alpha=0.1) for t, s in pairs]
        groups = [{"params": module.student.parameters()}, {"params": module.head.parameters(), "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        engine.step(NAMED_X, update=False)
        before = {n: p.detach().clone() for n, p in engine.weights.named_parameters() if p.grad is not None}
        optimizer.step()
        assert not any(torch.equal(p, dict(engine.weights.named_parameters())[n]) for n, p in before.items())


def check_weights_over_one_memory_are_refused_before_training(world: World) -> None:
    words = r"encoder.weight and decoder.weight are two tensors over one memory.*Next: one tensor"
    for cut_before in ("middle", "decoder"):
        with pytest.raises(BadOption, match=words):
            engine_of(Transposed(), cut_before)
    with pytest.raises(BadOption, match=r"table and row are two tensors over one memory"):
        engine_of(Views(writes=True), "second")
    assert torch.isfinite(engine_of(Views(writes=False), "second").step(NAMED_X).loss)


# -- the large model -----------------------------------------------------------------------------------


def total(output: Tensor) -> Tensor:
    return output.square().mean()


def large() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def resident(line: str) -> int:
    """Bytes: VmRSS is now, VmHWM the most since `forget_peak`.

    Free chunks of the heap that the fork inherited from the test process (where an engine may have run with
    `keep_freed_memory`) may hold the weights: their pages go back first.
    """
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) * 1024


def forget_peak() -> int:
    """Resident bytes now, from which the next peak counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def measured(world: World) -> dict[str, Any]:
    tiny = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    engine = outsize.parallelize(tiny, (torch.zeros(4, 2),), stages=4, microbatches=1, loss_fn=total)
    engine.weights.full_state_dict(to=FOLDER / "tiny")  # what is imported late is imported now
    x = torch.zeros(4, WIDTH)
    base = forget_peak()
    options: dict[str, Any] = {"stages": 4, "microbatches": 1, "loss_fn": total}
    engine = outsize.parallelize(large(), (x,), weight_files=FOLDER / "weights", **options)
    loaded = resident("VmHWM") - base
    corners = {n: [float(p[0, 0]), float(p[-1, -1])] for n, p in engine.weights.named_parameters()}
    own = sum(p.nbytes for _, p in engine.weights.named_parameters())
    before = forget_peak()
    engine.weights.full_state_dict(to=FOLDER / "again", shard_bytes=75 << 20)
    return {"loaded": loaded, "saved": resident("VmHWM") - before, "own": own, "corners": corners}


def main(size: str) -> None:
    torch.set_num_threads(1)
    world = join()
    found: Any = measured(world) if size == "large" else {}
    checks = {n: f for n, f in globals().items() if n.startswith("check_")} if size == "small" else {}
    for name, check in checks.items():
        found[name.removeprefix("check_")] = outcome(check, world)
        dist.barrier(group=world.group)
    (FOLDER / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(sys.argv[2])
