"""One process, several devices: bit-equal to a plain loop with every layer where the plan has it.

    pytest tests/device                   # on the simulated device, and on CUDA where torch sees it

One GPU is enough: two ranks on it, and the GPU with the CPU as two unequal devices. With two GPUs they are
taken as well. The simulated device has all of these, and the helpers are tried on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerators import CUDA, TWO, everywhere
from torch import Tensor, nn
from turns import in_turns
from zoo import case

import outsize
from outsize.device.streams import TorchStreams
from outsize.program.tree import map_leaves
from outsize.run.transport.device_copies import checked_link

SIM = pytest.mark.sim
PLACES = [
    pytest.param(("cpu", "cpu"), id="cpu-cpu"),
    pytest.param(("cuda:0", "cuda:0"), marks=CUDA, id="gpu-gpu"),
    pytest.param(("cuda:0", "cpu"), marks=CUDA, id="gpu-cpu"),
    pytest.param(("cpu", "cuda:0"), marks=CUDA, id="cpu-gpu"),
    pytest.param(("cuda:0", "cuda:1"), marks=TWO, id="gpu0-gpu1"),
    pytest.param(("sim:0", "sim:0"), marks=SIM, id="sim-sim-seed2"),
    pytest.param(("sim:0", "cpu"), marks=SIM, id="sim-cpu-lazy"),
    pytest.param(("cpu", "sim:0"), marks=SIM, id="cpu-sim-seed3"),
    pytest.param(("sim:0", "sim:1"), marks=SIM, id="sim0-sim1-lazy"),
    pytest.param(("sim:0", "sim:1"), marks=[SIM, pytest.mark.full], id="sim0-sim1-seed1"),
]
WIDTH, LAYERS, SAMPLES, MICROBATCHES = 64, 8, 32, 8


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    """The same kernels with the same order of sums in both runs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))))


def plain_step(model: nn.Sequential, places: list[torch.device], x: Tensor, y: Tensor) -> Tensor:
    """Gradient accumulation, each layer where it is."""
    total: Any = None
    for part, wanted in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        h = part
        for layer, place in zip(model, places, strict=True):
            h = layer(h.to(place))
        loss = F.mse_loss(h, wanted.to(h.device))
        (loss / MICROBATCHES).backward()
        share = loss.detach() / MICROBATCHES
        total = share if total is None else total + share
    return total


@pytest.mark.parametrize(
    ("places", "schedule"), in_turns(PLACES, ["gpipe", "1f1b", "interleaved", "zero-bubble"], each=1)
)
def test_every_schedule_is_bit_equal_to_the_layers_where_they_are(
    places: tuple[str, str], schedule: Any
) -> None:
    insist_on_layers_where_they_are(places, schedule)


@pytest.mark.sim
@pytest.mark.parametrize("order", [pytest.param("sim-lazy", marks=pytest.mark.full), "sim-seed1"])
def test_four_devices_are_bit_equal_to_the_layers_where_they_are(order: str) -> None:
    insist_on_layers_where_they_are(("sim:0", "sim:1", "sim:2", "sim:3"), "1f1b")


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("places", PLACES)
def test_a_split_model_is_equal_to_the_layers_where_they_are(places: tuple[str, str], calls: int) -> None:
    """The loss is over all pairs, torch's own function clips, and the input has a gradient.

    While the backward of a call waits for another device, autograd takes up that of another call, so
    gradients of two calls may be added in another order.
    """
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    model, plain = layers(), layers()
    split = outsize.split(model, (x,), stages=2, microbatches=MICROBATCHES, devices=list(places))
    where = [next(layer.parameters()).device for layer in model]
    for layer, place in zip(plain, where, strict=True):
        layer.to(place)

    def by_layers(value: Tensor) -> Tensor:
        outputs = []
        for part in value.chunk(MICROBATCHES):
            h = part
            for layer, place in zip(plain, where, strict=True):
                h = layer(h.to(place))
            outputs.append(h)
        return torch.cat(outputs)

    traces = []
    for call, weights in ((split, list(split.parameters())), (by_layers, list(plain.parameters()))):
        optimizer, trace = torch.optim.SGD(weights, lr=0.5), []
        for _ in range(2):
            taken = x.clone().requires_grad_()
            views = [F.normalize(call(taken * (1 + n)), dim=1) for n in range(calls)]
            loss = F.cross_entropy(
                views[0] @ views[-1].T / 0.1, torch.arange(SAMPLES, device=views[0].device)
            )
            loss.backward()
            trace += [loss.detach(), taken.grad, nn.utils.clip_grad_norm_(weights, 0.1)]
            optimizer.step()
            optimizer.zero_grad()
        traces.append([*trace, *(weight.detach() for weight in weights)])
    assert {str(weight.device) for weight in model.parameters()} == {str(place) for place in where}
    pairs = [(a.cpu(), b.cpu()) for a, b in zip(*traces, strict=True)]
    if calls == 1 or len(set(places)) == 1:
        assert all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


@pytest.mark.sim
@pytest.mark.parametrize(
    "places", [("sim:0", "sim:1"), ("sim:1", "sim:0", "sim:2"), ("sim:0", "cpu")], ids=str
)
@pytest.mark.sample("('sim:1', 'sim:0', 'sim:2')", "('sim:0', 'cpu')")
def test_clipping_has_the_bits_of_one_device(places: tuple[str, ...]) -> None:
    """torch's own norm adds up device by device, which is another order than that of the layers."""
    found = list[list[Tensor]]()
    x, y = (torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(2))
    for devices in (("sim:0",) * len(places), places):
        how = {"cluster": f"{len(places)}xcpu", "stages": len(places), "schedule": "1f1b"}
        model = layers()
        plan = outsize.plan(model, (x,), target=y, loss_fn=F.mse_loss, microbatches=MICROBATCHES, **how)  # pyright: ignore[reportArgumentType]
        engine = outsize.parallelize(
            model,
            (x,),
            target=y,
            loss_fn=F.mse_loss,
            plan=plan,
            devices=list(devices),
            clip_norm=0.01,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        )
        results = [engine.step(x, target=y) for _ in range(3)]
        norms = [result.grad_norm.cpu() for result in results if result.grad_norm is not None]
        assert len(norms) == 3
        found.append([*norms, *(p.detach().cpu() for p in model.parameters())])
    assert all(map(torch.equal, *found))


def insist_on_layers_where_they_are(places: tuple[str, ...], schedule: Any) -> None:
    """Equal stages, one for each place, and a plain loop."""
    model, plain, count = layers(), layers(), len(places)
    x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    how = {"cluster": f"{count}xcpu", "stages": count, "schedule": schedule, "microbatches": MICROBATCHES}
    plan = outsize.plan(model, (x,), target=y, loss_fn=F.mse_loss, **how)  # halves, whatever the devices
    engine = outsize.parallelize(model, (x,), target=y, loss_fn=F.mse_loss, plan=plan, devices=list(places))
    home = [next(layer.parameters()).device for layer in model]
    assert {str(d) for d in home} == set(places)
    for layer, device in zip(plain, home, strict=True):
        layer.to(device)
    for _ in range(3):
        assert torch.equal(engine.step(x, target=y, update=False).loss, plain_step(plain, home, x, y))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


# With --all alone: statistics of BatchNorm, of which the U-Net has some, on a deeper model.
DEEPER = [
    pytest.param(
        place.values[0],
        "narrow_resnet18",
        id=f"{place.id}-narrow_resnet18",
        marks=[*place.marks, pytest.mark.full],
    )
    for place in PLACES
]


@pytest.mark.parametrize(("places", "name"), [*in_turns(PLACES, ["gpt2", "unet"], each=1), *DEEPER])
@pytest.mark.sample("cpu-cpu", "sim-cpu", "cpu-sim-seed3", "gpu-gpu", "gpu0-gpu1", "gpu-cpu", "cpu-gpu")
def test_models_train_over_places(places: tuple[str, str], name: str) -> None:
    """Tied weights, skips, buffers and masks find their devices; batches come from the CPU or the GPU."""
    found, (args, kwargs), target = case(name), case(name).batch(8), case(name).target(8)
    model, loss = found.build(dropout=False), {"loss_fn": found.loss, "target": target}
    plan = outsize.plan(model, args, kwargs, cluster="2xcpu", stages=2, microbatches=4, **loss)
    engine = outsize.parallelize(
        model,
        args,
        kwargs,
        **loss,
        plan=plan,
        devices=list(places),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        clip_norm=1.0,
    )
    there = map_leaves(
        lambda leaf: leaf.to(places[0]) if isinstance(leaf, Tensor) else leaf, (args, kwargs, target)
    )
    losses = []
    for step in range(4):
        a, k, t = there if step % 2 else (args, kwargs, target)
        losses.append(float(engine.step(*a, target=t, **k).loss))
    assert losses[-1] < losses[0]
    assert {str(p.device) for _, p in engine.weights.named_parameters()} == set(places)
    assert engine.evaluate(*args, target=target, **kwargs).loss is not None
    assert {str(t.device) for t in engine.weights.full_state_dict().values()} == {"cpu"}


@pytest.mark.parametrize("places", [p for p in PLACES if p.id not in ("cpu-cpu", "gpu-gpu", "sim-sim-seed2")])
def test_many_tensors_in_flight_arrive_whole(places: tuple[str, str]) -> None:
    """Random sizes, kernels that overwrite freed memory between, buffers used again and again."""
    streams, draw = TorchStreams(places), torch.Generator().manual_seed(0)
    near, far = places
    link, expected, parcels = checked_link(streams, near, far), [], []
    for n in range(200):
        size = int(torch.randint(1, 1 << 18, (), generator=draw))
        value = torch.full((size,), float(n), device=near)
        parcels.append(link.carry(value.mul_(2)))
        expected.append((size, 2.0 * n))
        del value
        torch.zeros(size, device=near)
        if len(parcels) == 4:
            device_copy, (count, wanted) = parcels.pop(0), expected.pop(0)
            found = device_copy.open()
            assert found.shape == (count,)
            assert bool((found == wanted).all())
            del found
            device_copy.release()
    link.flush()
    assert link.pool.made < 60


@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
def test_copies_overlap_with_kernels(device: str) -> None:
    """The host has launched everything long before the device is through, and no copy waits for a kernel."""
    streams = TorchStreams((device, "cpu"))
    link = checked_link(streams, device, "cpu")
    value = torch.ones(1 << 20, device=device)
    device_copy = link.carry(value)
    busy = (
        torch.randn(8192, 8192, device=device) if device == "cuda:0" else torch.randn(64, 64, device=device)
    )
    for _ in range(50):
        busy = torch.tanh(busy @ busy)
    behind = torch.accelerator.current_stream().record_event()
    device_copy.copied.wait()
    assert not behind.query(), "the copy was over before the kernels that were launched behind it"
    assert bool((device_copy.open() == 1).all())
