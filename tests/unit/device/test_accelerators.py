"""The device layer asks torch's generic interface; another vendor's accelerator is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outsize.device import accelerators
from outsize.device.accelerators import (
    accelerator_type,
    all_devices,
    collective_backend,
    current_device,
    device_count,
    device_type,
    float16_sums,
    forked_generators,
    generator_state,
    has_float16_sums,
    is_accelerator,
    lacks,
    properties,
    seed_generators,
    set_generator_state,
    spoken,
    synchronize,
    type_of,
)


@pytest.fixture
def intel(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two devices of a vendor whose calls are noted."""
    noted: dict[str, Any] = {"state": torch.zeros(4, dtype=torch.uint8)}

    def get_memory_info(device: torch.device) -> tuple[int, int]:
        return 5, 7

    module = SimpleNamespace(
        is_initialized=lambda: True,
        manual_seed_all=lambda seed: noted.update(seed=seed),
        get_rng_state=lambda device: noted["state"],
        set_rng_state=lambda state, device: noted.update(state=state, at=device),
    )
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: noted.update(idle=device))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", get_memory_info)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return noted


def test_another_vendors_devices_are_found_by_torchs_own_interface(intel: dict[str, Any]) -> None:
    assert (accelerator_type(), device_type(), device_count()) == ("xpu", "xpu", 2)
    assert current_device() == torch.device("xpu:1")
    assert all_devices() == [torch.device("xpu:0"), torch.device("xpu:1")]
    known = properties(torch.device("xpu:0"))
    assert (known.name, known.memory_bytes) == ("Intel XPU", 7)
    synchronize(torch.device("xpu:1"))
    assert intel["idle"] == torch.device("xpu:1")


def test_generators_of_its_devices_are_seeded_and_restored(intel: dict[str, Any]) -> None:
    seed_generators(11)
    assert intel["seed"] == 11
    state = torch.arange(4, dtype=torch.uint8)
    set_generator_state(state, torch.device("xpu:1"))
    assert intel["at"] == torch.device("xpu:1")
    assert torch.equal(generator_state(torch.device("xpu:1")), state)


def test_without_an_accelerator_everything_answers_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert (accelerator_type(), device_type(), device_count(), all_devices()) == (None, "cpu", 0, [])
    assert current_device() == torch.device("cpu")
    synchronize(torch.device("cpu"))
    seed_generators(3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with forked_generators():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


def test_what_computes_on_its_own_is_an_accelerator() -> None:
    assert [type_of(place) for place in ("cuda:3", "cpu", torch.device("xpu", 0))] == ["cuda", "cpu", "xpu"]
    assert [is_accelerator(place) for place in ("cuda:0", "sim:1", "cpu", "meta")] == [
        True,
        True,
        False,
        False,
    ]
    assert lacks("mps:0", "streams")
    assert not lacks("sim:0", "streams"), "a type without a row lacks nothing"
    assert spoken("npu") == "Ascend"
    assert spoken("sim") == "sim"


def test_sums_in_float16_end_with_their_context() -> None:
    products = torch.backends.cuda.matmul
    before = products.allow_fp16_accumulation
    with float16_sums(), float16_sums():
        assert products.allow_fp16_accumulation
    assert products.allow_fp16_accumulation == before
    with pytest.raises(ZeroDivisionError), float16_sums():
        raise ZeroDivisionError
    assert products.allow_fp16_accumulation == before
    found = [has_float16_sums(place) for place in ("cuda:0", "cpu", "sim:0", torch.device("xpu", 0))]
    assert found == [torch.version.hip is None, False, False, False]


def test_the_backend_for_collectives_is_torchs_own() -> None:
    assert collective_backend("cpu") == "gloo"
    assert collective_backend("nonsense") is None
    assert accelerators.KNOWN["cuda"].devices == "CUDA"
