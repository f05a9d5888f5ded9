"""Copies of repeated blocks: the tape of a recording in which every block was run, field by field."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch
from small_models import Wrapped
from torch import Tensor, nn

from outsize.capture.fakes.precision import casting
from outsize.capture.models.load import example, load
from outsize.capture.recording import fallbacks
from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.capture.recording.leaf_rule import KnownBlocks
from outsize.capture.recording.module_equality import Kinds, Log, watched
from outsize.capture.recording.repeated_blocks import RepeatedBlocks
from outsize.program.tape import Tape

DEEP = 7


class Block(nn.Module):
    """A residual block with settings."""

    def __init__(self, number: int, *, eps: float = 1e-5, p: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=eps)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(p)
        self.number, self.scale = number, scale

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        return x + self.drop(self.down(self.up(self.norm(x)).relu_()) * self.scale)


class Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make(n) for n in range(DEEP)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


class Numbered(Block):
    """The first three and the rest do different things: the number is a value."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice from the fourth on."""
        return super().forward(super().forward(x) if self.number >= 3 else x)


class Scaled(Block):
    """As GPT-2 may divide by the number of a layer: it is in the tape."""

    def forward(self, x: Tensor) -> Tensor:
        """Divided."""
        return super().forward(x) / (self.number + 1)


class Named(Block):
    """Has settings of its own, its name among them, as layers of peft have."""

    def __init__(self, number: int, *, reads: bool = False) -> None:
        super().__init__(number)
        self.settings: Any = {"name": f"blocks.{number}", "scale": 1.0 + number // 4}
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        """Scaled, where it reads its settings."""
        return super().forward(x * self.settings["scale"] if self.reads else x)


class Counting(Block):
    """A counter of all blocks decides."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        """A sigmoid in every second call."""
        self.calls.append(1)
        return super().forward(x.sigmoid() if len(self.calls) % 2 else x)


class Keeping(Block):
    """Keeps its result."""

    def forward(self, x: Tensor) -> Tensor:
        """Bound anew."""
        self.kept = super().forward(x)
        return self.kept


class Writing(Block):
    """Writes into its argument."""

    def forward(self, x: Tensor) -> Tensor:
        """In place."""
        return super().forward(x.add_(1))


class Viewing(Block):
    """Returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        """The same elements."""
        return super().forward(x).view(-1, 8)


class Storing(nn.Module):
    """Puts a tensor into a cache, at its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner = number, Block(number)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        """What was stored is used."""
        cache.parts[self.number] = self.inner(x)
        return cache.parts[self.number] * 2


class Cached(Chain):
    """Its blocks share a cache, which is read behind them."""

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all that was stored."""
        holder = Holder([None] * DEEP)
        for block in self.blocks:
            x = block(x, holder)
        return torch.stack(holder.parts).sum() + self.head(x).sum()


class Shared(Chain):
    """Its blocks fill a container that is no dict of Python's, as layers of Gemma 4 do."""

    def forward(self, x: Tensor) -> Tensor:
        """Each block sees what the ones before it have stored."""
        stored = UserDict[str, Tensor]()
        for block in self.blocks:
            x = block(x, stored)
        return self.head(x).sum()


class Sharing(nn.Module):
    """Stores its result for the blocks behind it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = Block(number)

    def forward(self, x: Tensor, stored: Any) -> Tensor:
        """Uses what is there."""
        stored["last"] = self.inner(x + stored["last"] if "last" in stored else x)
        return stored["last"]


class Holder:
    """A cache."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


class Refusing(nn.Module):
    """Decides on values in a submodule, which becomes a leaf in a second attempt."""

    def forward(self, x: Tensor) -> Tensor:
        """It rounds by NumPy, which no fake has."""
        return x + float(x.detach().numpy().sum())


def _wrapped(number: int) -> nn.Module:
    block = Block(number)
    block.add_module("up", Wrapped(block.up))
    return block


class Listed(nn.Module):
    """Keeps its results in one list of all blocks."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        """A number more each time."""
        self.seen.append({"rows": len(x)})
        return self.base(x)


def _listed(number: int) -> nn.Module:
    block = Block(number)
    block.add_module("up", Listed(block.up))
    return block


class Processor:
    """Does the work of a block, as processors of attention do in diffusers."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.calls = scale, 0

    def __call__(self, block: Any, x: Tensor) -> Tensor:
        """Scaled."""
        return block.activation(block.up(x)) * self.scale


class CountingProcessor(Processor):
    """Keeps the number of its calls."""

    def __call__(self, block: Any, x: Tensor) -> Tensor:
        """Counted."""
        self.calls += 1
        return super().__call__(block, x)


class SlottedProcessor(Processor):
    """Has its factor where no attribute is seen."""

    __slots__ = ("factor",)

    def __call__(self, block: Any, x: Tensor) -> Tensor:
        """Scaled twice."""
        return super().__call__(block, x) * self.factor


class Processed(Block):
    """Has a processor, a partial and a bound method of its own."""

    def __init__(self, number: int, processor: Processor) -> None:
        super().__init__(number)
        self.processor, self.activation = processor, partial(nn.functional.gelu, approximate="tanh")
        self.lower = self.down_of

    def down_of(self, x: Tensor) -> Tensor:
        """The second product."""
        return self.down(x)

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        return x + self.lower(self.processor(self, x))


def _processed(number: int) -> nn.Module:
    return Processed(number, Processor())


def _odd_processor(number: int) -> nn.Module:
    return Processed(number, Processor(2.0 if number == 4 else 1.0))


def _odd_partial(number: int) -> nn.Module:
    block = Processed(number, Processor())
    if number == 4:
        block.activation = partial(nn.functional.gelu, approximate="none")
    return block


def _slotted(number: int) -> nn.Module:
    block = Processed(number, processor := SlottedProcessor())
    processor.factor = 2.0 if number == 4 else 1.0
    return block


def _looped(number: int) -> nn.Module:
    """Its processor knows an object that knows it, as trainers and their loops do."""
    block = Processed(number, processor := Processor())
    other: Any = Processor(2.0)
    processor.other, other.other = other, processor  # pyright: ignore[reportAttributeAccessIssue]
    return block


def _counting_processor(number: int) -> nn.Module:
    return Processed(number, CountingProcessor())


def _plain(number: int) -> nn.Module:
    return Block(number)


def _odd_eps(number: int) -> nn.Module:
    return Block(number, eps=1e-3 if number == 4 else 1e-5)


def _odd_p(number: int) -> nn.Module:
    return Block(number, p=0.1 * (number % 2))


def _odd_scale(number: int) -> nn.Module:
    return Block(number, scale=2.0 if number > 4 else 1.0)


def _frozen(number: int) -> nn.Module:
    return Block(number).requires_grad_(number > 3)


def _evaluated(number: int) -> nn.Module:
    return Block(number, p=0.5).train(number > 3)


def _twice(_module: nn.Module, _given: Any, out: Any) -> Any:
    return out * 2


def _hooked(number: int) -> nn.Module:
    block = Block(number)
    if number == 4:
        block.up.register_forward_hook(_twice)
    return block


def _tied(number: int, made: list[Block] = []) -> nn.Module:  # noqa: B006
    made.append(Block(number))
    made[-1].up.weight = made[0].up.weight
    return made[-1]


def _both(monkeypatch: pytest.MonkeyPatch, once: Callable[[], Tape]) -> tuple[Tape, Tape, int]:
    """With copies, without, and how many instructions were copied."""
    copied: list[int] = []
    copy = RepeatedBlocks._copy

    def counted(self: RepeatedBlocks, block: Any, call: Any) -> Any:
        copied.append(len(block.instructions))
        return copy(self, block, call)

    monkeypatch.setattr(RepeatedBlocks, "_copy", counted)
    Counting.calls.clear()
    quick = once()
    monkeypatch.setattr(Kinds, "repeated", lambda self, fqn: None)
    Counting.calls.clear()
    return quick, once(), sum(copied)


def _insist_on_equal(quick: Tape, full: Tape) -> None:
    assert [i.name for i in quick.instructions] == [i.name for i in full.instructions]
    for one, other in zip(quick.instructions, full.instructions, strict=True):
        assert one == other, one.name
    assert quick.metas == full.metas
    assert (quick.inputs, quick.loss) == (full.inputs, full.loss)
    assert repr(quick.output) == repr(full.output)  # a cache among it is another object each time


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize(
    "make",
    [
        *(_plain, Scaled, _odd_eps, _odd_p, _odd_scale, _frozen, _evaluated, _hooked),
        *(_processed, _odd_processor, _odd_partial, _slotted, _looped),
    ],
)
@pytest.mark.sample(every=2, first=1)
def test_a_tape_with_copies_is_the_tape_without(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int], nn.Module], precision: str
) -> None:
    model = Chain(make)

    def once() -> Tape:
        with casting(precision):
            return record(model, (torch.zeros(2, 8),), {})

    quick, full, _ = _both(monkeypatch, once)
    _insist_on_equal(quick, full)


@pytest.mark.parametrize("make", [Numbered, Counting, Keeping, Writing, Viewing, _tied, _counting_processor])
def test_blocks_that_do_more_than_compute_are_run(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int], nn.Module]
) -> None:
    model = Chain(make)

    def once() -> Tape:
        return record(model, (torch.zeros(2, 8) + 1,), {}) if make is not Writing else _written(model)

    quick, full, copied = _both(monkeypatch, once)
    _insist_on_equal(quick, full)
    assert not copied or make is Numbered  # whose halves are copies among themselves


def _written(model: nn.Module) -> Tape:
    """The example is no leaf's: a layer goes first."""
    return record(nn.Sequential(nn.Linear(8, 8), model), (torch.zeros(2, 8),), {})


def test_equal_blocks_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(_plain)
    *_, copied = _both(monkeypatch, lambda: record(model, (torch.zeros(2, 8),), {}))
    # The first has an input that is no activation; of the second and the third comes the proof.
    assert copied == (DEEP - 3) * 7


_MAKERS = [
    *(_plain, Scaled, _odd_eps, _odd_p, _odd_scale, _frozen, _hooked, Numbered, Counting, Keeping, _tied),
    *(_processed, _odd_processor, _odd_partial, _slotted, _counting_processor),
]


@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize("make", _MAKERS)
def test_a_recording_goes_on_from_what_an_earlier_one_knows_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int], nn.Module], samples: int
) -> None:
    model, known = Chain(make), KnownBlocks()

    def once() -> Tape:
        return record(model, (torch.zeros(samples, 8) + 1,), {}, None, (), TapeOptions(blocks=known))

    record(model, (torch.zeros(2, 8) + 1,), {}, None, (), TapeOptions(blocks=known))
    del model.blocks[4:]
    quick, full, copied = _both(monkeypatch, once)
    _insist_on_equal(quick, full)
    if make is _plain:  # At another size the first two are run, of which the third was shown to be a copy.
        assert copied == (4 if samples == 2 else 2) * 7


def test_what_a_retry_has_recorded_is_not_kept() -> None:
    for model, is_kept in ((Chain(_plain), True), (nn.Sequential(Chain(_plain), Refusing()), False)):
        known = KnownBlocks()
        record(model, (torch.zeros(2, 8),), {}, None, (), TapeOptions(blocks=known))
        assert bool(known.recorded) is is_kept


def test_leaves_that_write_into_what_they_make_are_copied_and_known_to_the_next_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A retry makes them leaves, at the first size of the model alone."""
    model, known, runs = Chain(_wrapped), KnownBlocks(), list[int]()
    run = fallbacks._run
    monkeypatch.setattr(fallbacks, "_run", lambda *asked: runs.append(1) or run(*asked))

    def once(samples: int, blocks: KnownBlocks | None) -> Tape:
        return record(model, (torch.zeros(samples, 8),), {}, None, (), TapeOptions(blocks=blocks))

    once(2, known)
    assert sum(runs) == 3  # The second is that which shows what is written again.
    names = {f"blocks.{number}.up" for number in range(DEEP)}
    for samples in (2, 5):
        runs.clear()
        with pytest.MonkeyPatch.context() as patched:
            quick, full, copied = _both(patched, partial(once, samples, known))
        assert sum(runs) == 2  # One with copies, and one without.
        _insist_on_equal(quick, full)
        first = once(samples, None)
        _insist_on_equal(quick, first)
        assert (quick.keepers, quick.opaque) == (first.keepers, first.opaque)
        assert quick.keepers == names
        assert copied >= (DEEP - 2) * 6


def test_leaves_that_find_what_they_have_written_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known = Chain(_listed), KnownBlocks()
    Listed.seen.clear()
    quick, full, copied = _both(
        monkeypatch,
        lambda: record(model, (torch.zeros(2, 8),), {}, None, (), TapeOptions(blocks=known)),
    )
    _insist_on_equal(quick, full)
    assert (copied, known.renewing, known.recorded) == (0, {}, {})
    assert quick.keepers == {f"blocks.{number}.up" for number in range(DEEP)}


def test_objects_of_their_own_make_no_block_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(_processed)
    quick, full, copied = _both(monkeypatch, lambda: record(model, (torch.zeros(2, 8),), {}))
    _insist_on_equal(quick, full)
    assert copied == (DEEP - 3) * 5


def test_settings_that_nobody_reads_make_no_block_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(Named)
    quick, full, copied = _both(monkeypatch, lambda: record(model, (torch.zeros(2, 8),), {}))
    _insist_on_equal(quick, full)
    assert copied == (DEEP - 3) * 7


def test_settings_that_are_read_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(partial(Named, reads=True))
    quick, full, copied = _both(monkeypatch, lambda: record(model, (torch.zeros(2, 8),), {}))
    _insist_on_equal(quick, full)
    assert not copied


def test_blocks_that_share_a_container_of_another_kind_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyError before: the container was no object, and its parts were not looked at either."""
    model = Shared(Sharing)
    quick, full, copied = _both(monkeypatch, lambda: record(model, (torch.zeros(2, 8),), {}))
    _insist_on_equal(quick, full)
    assert copied == (DEEP - 3) * 7  # what is inside of them


def test_what_blocks_store_is_stored_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Cached(Storing)
    quick, full, copied = _both(monkeypatch, lambda: record(model, (torch.zeros(2, 8),), {}))
    _insist_on_equal(quick, full)
    assert copied == (DEEP - 3) * 8


def test_an_index_is_told_from_a_value() -> None:
    module, log = Block(3), Log()
    with watched({Block: {"number", "scale"}}, log):
        assert [10, 11, 12, 13][module.number] == 13
        assert not log.values
        assert module.number + 1 == 4
        assert module.scale == 1.0
    assert {name for _, name in log.values} == {"number", "scale"}
    assert "__getattribute__" not in vars(Block)


_LLAMA = "num_hidden_layers=8&hidden_size=32&intermediate_size=48&num_attention_heads=4&num_key_value_heads=2"


@pytest.mark.parametrize(
    ("spec", "shape", "least"),
    [
        ("transformers:GPT2Config?n_layer=8&n_embd=32&n_head=4&vocab_size=64", "16", 130),
        (f"transformers:LlamaConfig?vocab_size=64&{_LLAMA}", "16", 220),
        ("torchvision:resnet101", "3x64x64", 190),
        # No two blocks drop with one probability.
        pytest.param("torchvision:swin_t", "3x32x32", 0, marks=pytest.mark.full),
    ],
)
def test_models_of_libraries(monkeypatch: pytest.MonkeyPatch, spec: str, shape: str, least: int) -> None:
    if find_spec(spec.partition(":")[0]) is None:
        pytest.skip("not installed")
    model = load(spec, meta=True)
    args, kwargs = example(model, shape, 2, 0, spec=spec)
    quick, full, copied = _both(monkeypatch, lambda: record(model, args, kwargs))
    _insist_on_equal(quick, full)
    assert copied >= least
