"""The table of devices: every row has a source and figures that belong together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from outsize.ir.hardware import devices
from outsize.ir.hardware.devices import (
    GIB,
    TABLE,
    Device,
    DeviceKind,
    FigureName,
    families_of,
    figure_of,
    host_bytes_per_s,
    host_link,
    kind_named,
    kinds_like,
    source_of,
)
from outsize.ir.hardware.links import LINKS, NETWORKS

FILE = Path(devices.__file__).with_suffix(".json")
ROWS = pytest.mark.parametrize("kind", TABLE.values(), ids=lambda kind: kind.name)
GPU_ROWS = pytest.mark.parametrize(
    "kind", [k for k in TABLE.values() if k.family != "cpu"], ids=lambda k: k.name
)
ASKED = (
    "v100 p100 p40 a100 a800 h100 h200 b200 l4 l40s a10g t4 rtx3090 rtx4090 cpu gb200 gb300 b300 gh200 "
    "rtx5090 rtxpro6000 a6000 mi300x mi325x mi350x mi355x gaudi3"
)


def test_the_devices_that_people_have_are_there() -> None:
    assert {name.split("-")[0] for name in TABLE} >= set(ASKED.split())
    assert {"v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "a100-80gb-pcie"} <= set(TABLE)


@ROWS
def test_every_row_says_where_it_is_from(kind: DeviceKind) -> None:
    assert "data sheet" in kind.source or "whitepaper" in kind.source or "measured" in kind.source
    assert kind.inner in LINKS
    assert kind.network in NETWORKS


@GPU_ROWS
def test_the_driver_leaves_most_of_what_the_box_says(kind: DeviceKind) -> None:
    assert f"-{kind.vendor_gb:g}gb" in kind.name
    assert 0.9 < kind.usable_gib / kind.vendor_gb < 1
    assert 0 < kind.context_mib < 1024


@GPU_ROWS
def test_peaks_are_in_the_ratios_that_hardware_has(kind: DeviceKind) -> None:
    """Narrower types are never slower; FLOPs per byte lie where those of all GPUs since 2016 do."""
    device = kind.device("d")
    order = [device.flops(dtype) for dtype in ("float64", "float32", "float16", "float8_e4m3fn")]
    assert order == sorted(order) or device.flops("float8") == device.flops("bfloat16")
    assert device.flops("tfloat32") in (
        pytest.approx(device.flops("float16") / 2, rel=0.05),
        device.flops("float32"),
    )
    # The vector processors of a Gaudi have no more than 4, and its matrix engines are beside them.
    assert (3 if kind.family == "gaudi" else 9) < device.flops("float32") / device.bytes_per_s < 160
    assert 10 < device.flops("float16") / device.bytes_per_s < 460
    assert 100e9 <= device.bytes_per_s <= 10e12


@GPU_ROWS
def test_a_link_is_slower_than_the_memory_and_faster_than_the_network(kind: DeviceKind) -> None:
    assert NETWORKS[kind.network].bytes_per_s < kind.link.bytes_per_s < kind.bytes_per_s
    bare = not kind.inner.startswith("pcie")
    assert not bare or "SXM" in kind.source or "superchip" in kind.source or kind.vendor_gb > 100


@GPU_ROWS
def test_the_host_is_over_pcie_or_its_own_link_and_not_faster_than_the_node(kind: DeviceKind) -> None:
    link = host_link(kind.device("d"))
    assert link is not None
    with_grace = kind.name.startswith(("gh", "gb"))
    assert link.name.startswith("c2c" if with_grace else "pcie")
    assert link.bytes_per_s <= kind.link.bytes_per_s
    assert link.bytes_per_s < host_bytes_per_s(kind.name)


def test_generations_of_links_to_the_host() -> None:
    rows = {"v100-32gb": "pcie3", "a100-80gb": "pcie4", "h100-80gb": "pcie5"}
    for name, generation in rows.items():
        assert host_link(TABLE[name].device("d")) == LINKS[generation]
    odd = TABLE["h100-80gb"].device("d").model_copy(update={"kind": "home-made"})
    assert host_link(odd) == LINKS["pcie3"]
    assert host_link(TABLE["cpu"].device("d")) is None


@pytest.mark.parametrize("link", [*LINKS.values(), *NETWORKS.values()], ids=lambda link: link.name)
def test_every_link_has_a_source_and_hops_shorter_than_messages(link: object) -> None:
    assert isinstance(link, type(LINKS["pcie4"]))
    assert "GB/s per direction" in link.source
    assert link.step_s <= link.latency_s < 1e-4


def test_generations_of_a_link_get_faster() -> None:
    for names in (("pcie3", "pcie4", "pcie5"), ("nvlink1", "nvlink2", "nvlink3", "nvlink4", "nvlink5")):
        speeds = [LINKS[name].bytes_per_s for name in names]
        assert speeds == sorted(speeds)


def test_a_dtype_without_a_column_runs_like_float32() -> None:
    v100, h100, a100 = (TABLE[kind].device("d") for kind in ("v100-32gb", "h100-80gb", "a100-80gb"))
    assert v100.flops("bfloat16") == v100.flops("float32") == 15.7e12
    assert h100.flops("float8_e5m2") == 1979e12
    assert a100.flops("float8_e4m3fn") == a100.flops("bfloat16") == 312e12


def test_a_kind_is_found_by_how_its_name_begins() -> None:
    names = {text: kind_named(text) for text in ("a100", "A100-40GB", "v100", "h100", "cpu", "l4", "a1", "")}
    found = {text: kind.name for text, kind in names.items() if kind}
    assert found == {
        "a100": "a100-80gb",
        "A100-40GB": "a100-40gb",
        "v100": "v100-32gb",
        "h100": "h100-80gb",
        "cpu": "cpu",
        "l4": "l4-24gb",
    }
    assert [kind.name for kind in kinds_like("L4")] == ["l4-24gb"]


def test_a_kind_is_found_by_words_of_its_name() -> None:
    words = ("h100-nvl", "H200-NVL", "a100-pcie", "h100-sxm")
    names = [kind.name if kind else None for kind in map(kind_named, words)]
    assert names == ["h100-94gb-nvl", "h200-141gb-nvl", "a100-80gb-pcie", None]


def test_narrow_types_without_a_column_run_as_wider_ones() -> None:
    h100, b200, rtx4090 = (TABLE[kind].device("d") for kind in ("h100-80gb", "b200-180gb", "rtx4090-24gb"))
    assert h100.flops("float4_e2m1fn_x2") == h100.flops("float8_e4m3fn") == 1979e12
    assert b200.flops("float4_e2m1fn_x2") == 9000e12
    assert rtx4090.flops("float16_fp16acc") == pytest.approx(2 * rtx4090.flops("float16"), rel=0.01)
    assert h100.flops("float16_fp16acc") == h100.flops("float16")


MEASURED: tuple[FigureName, ...] = ("context_mib", "matmul", "attention", "host_us", "instructions_per_flop")


@GPU_ROWS
@pytest.mark.parametrize("name", MEASURED)
def test_a_figure_is_a_kinds_own_or_says_whose_it_is(kind: DeviceKind, name: FigureName) -> None:
    """Judged by the file's rows alone."""
    rows = json.loads(FILE.read_text())["figures"]
    at = {word: row["value"] for row in rows if row["name"] == name for word in row["kinds"] or [""]}
    own = kind.name.split("-")[0]
    place = next(p for p in (own, *families_of(own), "") if p in at)
    assert figure_of(name, kind.name) == at[place]
    assert (", of the family " in source_of(name, kind.name)) == (place in families_of(own))


def test_families_lead_to_the_one_that_they_are_like() -> None:
    assert families_of("gb300-288gb") == ("blackwell", "hopper")
    assert families_of("home-made") == ()
    assert source_of("context_mib", "mi355x-288gb").endswith("of the family CDNA 3")


def test_a_device_takes_its_rows_figures() -> None:
    device = TABLE["a100-40gb"].device("cuda:3")
    assert (device.name, device.kind) == ("cuda:3", "a100-40gb")
    assert device.memory_bytes == int(39.39 * GIB)
    assert device.context_bytes == 420 * 2**20
    assert TABLE["a100-40gb"].device("d", 5).memory_bytes == 5


@pytest.mark.parametrize(
    "wrong",
    [{"memory_bytes": 0}, {"memory_bytes": -1}, {"bytes_per_s": 0}, {"flops_per_s": {"bfloat16": 1.0}}],
)
def test_figures_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Device.model_validate({**TABLE["cpu"].device("d").model_dump(), **wrong})
