"""`outsize measure`: the document is a profile that plan takes, kept times are used, links give a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.capture.measure.links import LinkMeasurements, LinkSample
from outsize.cli.verbs import measure as verb
from outsize.ir.cluster import Cluster
from outsize.ir.profile import ProfileSet

Outsize = Callable[..., Any]
QUICK = ("--repeats", "1")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outsize" / "profiles"


def test_the_json_document_is_a_profile_file(outsize: Outsize, folder: Path) -> None:
    answer = outsize("measure", "toy:build", "--microbatch-sizes", "4,1", *QUICK, "--out", "p.json", "--json")
    assert (answer.code, answer.err) == (0, "")
    found = ProfileSet.load(folder / "p.json")
    assert json.loads(answer.out) == found.model_dump(mode="json")
    assert (found.sizes, found.model) == ((1, 4), "Sequential")
    assert {u.source for u in found.profiles[0].units} == {"measured"}


def test_sizes_are_powers_of_two_up_to_the_batch(outsize: Outsize) -> None:
    answer = outsize("measure", "toy:pair", "--batch", "6", *QUICK, "--json")
    assert [p["microbatch_size"] for p in json.loads(answer.out)["profiles"]] == [1, 2, 4, 6]


def test_the_table_names_units_and_sizes_at_80_columns(outsize: Outsize) -> None:
    answer = outsize("measure", "toy:build", "--batch", "2", *QUICK)
    for word in ("cross_entropy", "weight", "spread", "a sample", "1 thread"):
        assert word in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_kept_times_are_used_until_fresh(outsize: Outsize, cache: Path) -> None:
    call = ("measure", "toy:pair", "--microbatch-sizes", "2", *QUICK, "--json")
    first = outsize(*call).out
    (kept,) = cache.iterdir()
    assert outsize(*call).out == first
    assert json.loads(outsize(*call, "--fresh").out)["profiles"] != json.loads(first)["profiles"]
    kept.write_text("torn")
    with pytest.warns(UserWarning, match="are not used"):
        assert outsize(*call).code == 0


def test_a_plan_is_made_of_a_profile(outsize: Outsize) -> None:
    outsize("measure", "toy:build", "--microbatch-sizes", "1,2,4", *QUICK, "--out", "p.json")
    call = ("plan", "toy:build", "--cluster", "2xcpu", "--profile", "p.json", "--exact")
    plan = json.loads(outsize(*call, "--json").out)
    assert plan["expected"]["source"] == "measured"
    assert plan["microbatches"] >= 2  # one microbatch of 8 was not measured
    refused = outsize(*call, "--microbatches", "1")
    assert (refused.code, "says nothing about microbatches of 8" in refused.err) == (2, True)
    other = outsize("plan", "toy:pair", "--cluster", "2xcpu", "--profile", "p.json")
    assert (other.code, "ModelMismatch" in other.err) == (3, True)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.sample("bf16-mixed")
def test_a_profile_holds_for_its_precision(outsize: Outsize, precision: str) -> None:
    how = ("--precision", precision)
    made = outsize("measure", "toy:build", "--microbatch-sizes", "1,4", *QUICK, *how, "--out", "p.json")
    assert made.code == 0, made.err
    call = ("plan", "toy:build", "--cluster", "2xcpu", "--profile", "p.json", "--json")
    plan = json.loads(outsize(*call, *how).out)
    assert (plan["precision"], plan["expected"]["source"]) == (precision, "measured")
    assert outsize(*call).code != 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "a MODEL or --links"),
        (("toy:pair", "--links"), "a MODEL or --links"),
        (("toy:pair", "--microbatch-sizes", "2,x"), "'x' is not a possible size"),
        (("toy:pair", "--microbatch-sizes", "0"), "'0' is not a possible size"),
        (("toy:pair", "--cluster", "8xh100-80gb"), "this machine has no device of 8xh100-80gb"),
        (("toy:pair", "--out", "no/where.json", *QUICK), "cannot write"),
    ],
)
def test_bad_input(outsize: Outsize, arguments: tuple[str, ...], word: str) -> None:
    answer = outsize("measure", *arguments)
    assert (answer.code, word in answer.err) == (2, True), answer.err


def links(*_: object) -> LinkMeasurements:
    def line(kind: str, latency_s: float) -> list[LinkSample]:
        sizes = (1024, 65536, 1048576)
        return [
            LinkSample.model_validate(
                {"kind": kind, "size_bytes": n, "seconds": latency_s + n / 1e9, "spread_s": 1e-5}
            )
            for n in sizes
        ]

    return LinkMeasurements(
        ranks=2, device_type="cpu", samples=(*line("p2p", 1e-4), *line("all_reduce", 3e-4))
    )


def test_links_give_a_cluster_file(outsize: Outsize, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "measured_links", links)
    answer = outsize("measure", "--links", "--out", "here.json", "--json")
    found = Cluster.model_validate_json((folder / "here.json").read_text())
    assert (len(found.devices), found.inner.name) == (2, "measured-p2p")
    assert found.inner.latency_s == pytest.approx(1e-4)
    assert found.inner.bytes_per_s == pytest.approx(1e9)
    assert json.loads(answer.out)["links"]["all_reduce"]["latency_s"] == pytest.approx(3e-4)
    plan = json.loads(outsize("plan", "toy:build", "--cluster", "here.json", "--exact", "--json").out)
    assert (plan["cluster"], len(plan["stages"])) == ("here.json", 2)
    table = outsize("measure", "--links").out
    assert "all_reduce" in table
    assert max(map(len, table.splitlines())) <= 80
