"""What ranks tell each other: values come back equal, and no message runs code."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outsize.errors import WorldMismatch
from outsize.run.transport.control_messages import (
    INLINE_BYTES,
    all_gather_json,
    all_gather_tensors,
    all_gather_values,
    broadcast_json,
    gather_values,
)
from outsize.run.transport.values import NotSendable, ValueReader, ValueWriter, value_bytes, value_of_bytes

Pair = namedtuple("Pair", ["left", "right"])


@final
class Colour(Enum):
    """A small Enum."""

    RED = "red"


@final
@dataclass
class Output:
    """What a model may return; making one is counted."""

    made: ClassVar[int] = 0
    loss: Any = None
    parts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        Output.made += 1


@final
@dataclass(frozen=True, slots=True)
class Frozen:
    """A record without a dict."""

    number: int


@final
class Cache:
    """An object with attributes; setting one through a property is counted."""

    ran: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.layers: list[Any] = [self]

    @property
    def trap(self) -> int:
        """Is set by no message."""
        return 0

    @trap.setter
    def trap(self, _: int) -> None:
        Cache.ran.append("setter")

    def __setattr__(self, name: str, value: Any) -> None:
        Cache.ran.append("setattr")
        super().__setattr__(name, value)


@final
class Names(OrderedDict[str, Any]):
    """A dict with a class, as ModelOutput is."""


@final
class Refused(Exception):
    """An error with a state."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text, number)
        self.number = number


@final
class Closing:
    """Does something when it goes."""

    def __del__(self) -> None:
        Cache.ran.append("del")


@final
class Reduced:
    """Pickles in a way of its own."""

    def __reduce__(self) -> Any:
        return _ran, ()


def _ran() -> None:
    Cache.ran.append("reduce")


def there_and_back(value: Any) -> Any:
    return value_of_bytes(value_bytes(value))


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary(max_size=9)
)
KEYS = st.one_of(st.integers(), st.text(max_size=5), st.tuples(st.integers(), st.booleans()))
TREES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_trees_come_back_with_their_types(tree: Any) -> None:
    assert repr(there_and_back(tree)) == repr(tree)  # equal, NaN included, 1 is not 1.0, order of keys


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, frozenset({"a"}), slice(1, None), range(2, 9, 3), 3 - 4j, bytearray(b"\0\xff"), ...,
        torch.bfloat16, torch.strided, torch.channels_last, torch.device("cpu"), torch.Size([2, 3]),
        Colour.RED, np.float32(1.5), np.int64(-3), Frozen(4), "\ud800\n\u202e",
    ],
    ids=repr,
)  # fmt: skip
def test_single_values(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value


def test_arrays() -> None:
    array = np.arange(6, dtype=np.uint16).reshape(2, 3).T
    assert np.array_equal(there_and_back(array), array)
    with pytest.raises(NotSendable, match="object"):
        value_bytes(np.array([print], dtype=object))


def tensors() -> list[Tensor]:
    image = torch.rand(2, 3, 4, 5)
    return [
        torch.tensor(1.5),
        torch.empty(0, 3),
        image.to(memory_format=torch.channels_last),
        image[:, ::2].transpose(0, 3),
        torch.rand(3, 1).expand(3, 4),
        torch.rand(3).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        nn.Parameter(torch.rand(2)),
    ]


def test_tensors_keep_bits_dtype_and_memory_order() -> None:
    given_tensors = tensors()
    for back, tensor in zip(there_and_back(given_tensors), given_tensors, strict=True):
        assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
        dense = tensor.detach().clone()
        assert back.clone().stride() == dense.stride()
        bits = (t.contiguous().reshape(-1).view(torch.uint8).tolist() for t in (back, dense))
        assert len(set(map(str, bits))) == 1


def test_sparse_tensors() -> None:
    indices = torch.tensor([[1, 1, 0]])
    for tensor in (
        torch.sparse_coo_tensor(indices, torch.rand(3, 2), (4, 2)),
        torch.sparse_coo_tensor(indices, torch.rand(3, 2), (4, 2)).coalesce(),
    ):
        back = there_and_back(tensor)
        assert back.is_coalesced() == tensor.is_coalesced()
        assert torch.equal(back._indices(), tensor._indices())
        assert torch.equal(back._values(), tensor._values())
        assert back.shape == tensor.shape


def test_objects_are_filled_and_none_of_their_code_runs() -> None:
    cache, output = Cache(), Output(torch.tensor(2.0), [1])
    names = Names(a=1, b=output)
    names.note = cache  # pyright: ignore[reportAttributeAccessIssue]
    shared = [3]
    value = (cache, output, names, shared, shared)
    made, ran = Output.made, len(Cache.ran)
    new_cache, new_output, new_names, first, second = there_and_back(value)
    assert (Output.made, len(Cache.ran)) == (made, ran)
    assert new_cache.layers[0] is new_cache
    assert new_output.loss == 2.0
    assert type(new_names) is Names
    assert new_names["b"] is new_output
    assert new_names.note is new_cache
    assert first is second


def test_errors_come_back_as_their_class() -> None:
    for error in (ValueError("a", 2), Refused("why", 7), FileNotFoundError(2, "no file"), KeyError("k")):
        back = there_and_back(error)
        assert (type(back), str(back), back.args) == (type(error), str(error), error.args)
    assert there_and_back(Refused("why", 7)).number == 7


@pytest.mark.parametrize(
    "value",
    [print, lambda: 0, Cache, json, nn.ReLU(), Closing, Reduced(), torch.Generator(), iter(()), Path("x")],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_word_is_refused(value: Any) -> None:
    with pytest.raises(NotSendable):
        value_bytes([value])


def test_an_object_with_a_finalizer_is_refused() -> None:
    with pytest.raises(NotSendable, match="__del__"):
        value_bytes(Closing())


@pytest.mark.parametrize(
    "message",
    [
        ["object", "subprocess:Popen", None, []],
        ["object", "os:system", None, []],
        ["object", "no.such.module:Thing", None, []],
        ["object", "builtins:type", None, []],
        ["object", "builtins:eval", None, []],
        ["object", f"{__name__}:Closing", None, []],
        ["object", f"{__name__}:Reduced", None, []],
        ["object", f"{__name__}:Cache", None, [["trap", 1], [3, 1]]],
        ["object", f"{__name__}:Frozen", None, [["other", 1]]],
        ["object", "__import__('os'):system", None, []],
        ["error", "builtins:SystemExit.mro", ["tuple", []], []],
        ["error", f"{__name__}:Cache", ["tuple", []], []],
        ["enum", f"{__name__}:Cache", "ran"],
        ["torch", "dtype", "hub"],
        ["torch", "hub", "load"],
        ["array", "O", [1], "AAAA"],
        ["sent", 5],
        ["again", 9],
        ["common", 0],
        ["size", ["a"]],
        ["device", "../x"],
        {"a": 1},
        [],
        [["list", []]],
        ["sparse", [1], True, ["sent", 0], ["sent", 0]],
    ],
    ids=str,
)
def test_hostile_messages_are_refused_and_run_nothing(message: Any) -> None:
    ran = len(Cache.ran)
    with pytest.raises((NotSendable, RuntimeError)):
        ValueReader([torch.ones(1)]).read(message)
    assert len(Cache.ran) == ran


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_a_value(data: st.DataObject) -> None:
    whole = value_bytes({"a": [torch.arange(5), Pair(1, "x")]})
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[: data.draw(st.integers(0, len(whole)))].clone()
    if place < len(damaged):
        damaged[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(NotSendable):
        value_of_bytes(damaged)


def test_a_tuple_that_holds_itself_is_refused() -> None:
    inner: list[Any] = []
    inner.append((inner,))
    back = there_and_back(inner)
    assert back[0][0] is back
    loop: Any = ([],)
    loop[0].append(loop)
    with pytest.raises(NotSendable, match="holds itself"):
        ValueWriter().write(loop)


def _told(group: Any) -> Any:
    rank = group.rank()
    facts = all_gather_json({"rank": rank, "text": "é" * rank, "nan": [1.0, 10**30]}, group, "facts")
    said = broadcast_json({"from": rank} if rank == 1 else print, group, source=1)
    parts = all_gather_tensors([torch.full((n,), rank) for n in range(rank)], group, "parts")
    values = all_gather_values((rank, torch.rand(2, generator=torch.manual_seed(rank))), group, "values")
    first = gather_values([Pair(rank, torch.tensor(rank))] * rank, group, "pairs")
    return facts, said, [[p.tolist() for p in part] for part in parts], [v[0] for v in values], first


def test_ranks_tell_each_other(tmp_path: Path) -> None:
    for rank, (facts, said, parts, values, first) in enumerate(on_ranks(tmp_path, 3, _told)):
        assert facts == [{"rank": r, "text": "é" * r, "nan": [1.0, 10**30]} for r in range(3)]
        assert said == {"from": 1}
        assert parts == [[], [[]], [[], [2]]]
        assert values == [0, 1, 2]
        assert first == (None if rank else [[], [Pair(1, torch.tensor(1))], [Pair(2, torch.tensor(2))] * 2])


def _told_by_length(group: Any) -> list[tuple[int, list[bool]]]:
    """How many collectives each way of telling takes, and whether all arrives, by the length of the text."""
    counted: list[str] = []
    names = "all_gather", "gather", "broadcast"

    def counting(name: str) -> Any:
        call = getattr(dist, name)

        def counted_call(*args: Any, **kwargs: Any) -> Any:
            counted.append(name)
            return call(*args, **kwargs)

        return counted_call

    found, rank = [], group.rank()
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, counting(name))
        # Two quotes are part of the JSON.
        for length in (INLINE_BYTES - 2, INLINE_BYTES - 1):
            own = str(rank) * (length if rank == 1 else 1)
            all_own = ["0", "1" * length]
            value = torch.full((length if rank == 1 else 1,), rank, dtype=torch.uint8)
            gathered = gather_values(value, group, "values", 1)
            is_right = [
                all_gather_json(own, group, "texts") == all_own,
                broadcast_json(own if rank == 1 else None, group, 1) == all_own[1],
                gathered is None if rank == 0 else [len(each) for each in gathered or ()] == [1, length],
            ]
            found.append((len(counted), is_right))
            counted.clear()
    return found


def test_what_fits_in_a_frame_is_told_in_one_collective(tmp_path: Path) -> None:
    """A text of one byte more takes two; a tensor has its layout beside it, and never fits here."""
    for found in on_ranks(tmp_path, 2, _told_by_length):
        assert found == [(1 + 1 + 2, [True] * 3), (2 + 2 + 2, [True] * 3)]


def _at_other_places(group: Any) -> str:
    with pytest.raises(WorldMismatch) as raised:
        all_gather_json([group.rank()], group, "the model" if group.rank() == 2 else "the batch of a step")
    return str(raised.value)


def test_ranks_at_different_places_of_the_program_say_so(tmp_path: Path) -> None:
    assert set(on_ranks(tmp_path, 3, _at_other_places)) == {
        "WorldMismatch [E204]: the ranks of this run are at different places of the program; "
        "rank 0 compares the batch of a step, rank 2 compares the model. "
        "Next: make the same calls of outsize on every rank, in the same order"
    }


def test_a_pickle_of_the_same_object_would_run_code() -> None:
    ran = len(Cache.ran)
    pickle.loads(pickle.dumps(Reduced()))
    assert Cache.ran[ran:] == ["reduce"]
