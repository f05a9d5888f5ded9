"""A share of memory at the end of a cluster's name: read, written, and refused where it is none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import BadOption, UnknownDevice
from outsize.ir.cluster import parse_cluster
from outsize.ir.hardware.devices import places_in
from outsize.ir.hardware.memory_share import checked_share, split_share, with_share


@given(st.integers(1, 10_000), st.sampled_from(["2x80gb", "2x8xh100@ib400", "1xv100+2xa100-40gb"]))
def test_a_share_is_written_and_read(hundredths: int, name: str) -> None:
    share = hundredths / 10_000
    text = with_share(name, share)
    assert split_share(text) == (name, pytest.approx(share))
    assert with_share(text, 0.5) == with_share(name, 0.5)
    whole, part = parse_cluster(name), parse_cluster(text)
    assert part.name == text
    for all_of_it, some in zip(whole.devices, part.devices, strict=True):
        assert some.memory_bytes == pytest.approx(share * all_of_it.memory_bytes, abs=2)
        assert some.model_copy(update={"memory_bytes": all_of_it.memory_bytes}) == all_of_it
    assert (part.outer, part.devices_per_node, part.parts) == (
        whole.outer,
        whole.devices_per_node,
        whole.parts,
    )


@pytest.mark.parametrize(
    "percent", ["0", "0.0", "200", "100.1", "nan", "inf", "-5", "", "50%", "5e1", "1_0", "٣"]
)
def test_what_is_no_share_is_refused(percent: str) -> None:
    with pytest.raises(
        BadOption, match=r"E106.*makes no sense; .*at most 100 %. Next: --cluster 2x80GB:50%@ib400"
    ):
        parse_cluster(f"2x80GB:{percent}%@ib400")


@pytest.mark.parametrize("share", [0, -1, 1.01, 2, math.nan, math.inf])
def test_a_number_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(BadOption, match=r"memory_share=.*makes no sense; .*Next: memory_share=0.5"):
        checked_share(share)


@given(st.text(alphabet="0123456789xacgbp+@-.:% ,n", max_size=16))
def test_any_text_is_a_cluster_or_is_refused_with_the_next_step(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except (BadOption, UnknownDevice) as error:
        has_next_step = "--cluster" in error.next_step
    else:
        has_next_step = all(device.memory_bytes > 0 for device in cluster.devices)
    assert has_next_step


def test_named_places_may_have_a_share() -> None:
    assert places_in("cuda:0,cpu:50%") == ("cuda:0", "cpu")
    assert places_in("cuda:1") == ("cuda:1",)
