"""A sample of `make mutations`: some waits of outsize are left out in turn, and each of them is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ordering_proof import Proof
from ordering_sites import Site, sites

from simdev import build

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        build.compiler() is None, reason="the simulated device needs a C++ compiler: g++ or clang++"
    ),
]
EACH = 6
PAGE = Path(__file__).parents[3] / "docs" / "waits.md"


def test_each_call_of_a_sample_is_found() -> None:
    """Every sixth call in the module of copies between devices, which need no engine."""
    with Proof(["links"]) as proof:
        proof.learn()
        sample = [site for site in sites() if site.module.endswith(".device_copies")][::EACH]
        found = {site.name: proof.judge(site).by for site in sample}
    assert len(found) > 2
    assert all(found.values()), found


def test_the_page_has_every_call() -> None:
    """A new one is judged by `make mutations`, which writes the page."""
    rows = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE)
    assert rows == [site.name for site in sites()]


def test_each_call_has_a_name_of_its_own() -> None:
    names = [site.name for site in sites()]
    assert len(names) == len(set(names))
    assert {"after", "record", "wait", "wait_stream", "record_stream", "synchronize"} <= {
        site.call for site in sites()
    }


def test_a_note_is_read_above_its_call() -> None:
    noted = [site for site in sites() if site.note]
    assert all(isinstance(site, Site) and site.note[0].isalpha() for site in noted)
    assert noted
