"""`outsize plan`: the document is a plan file, an edited plan is priced as it is, units are listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.ir.plan import Plan

Outsize = Callable[..., Any]


def test_the_json_document_is_a_plan_file(outsize: Outsize, folder: Path) -> None:
    answer = outsize("plan", "toy:build", "--cluster", "3xcpu", "--microbatches", "4", "--exact", "--json")
    assert (answer.code, answer.err) == (0, "")
    (folder / "plan.json").write_text(answer.out)
    plan = Plan.load(folder / "plan.json")
    assert (len(plan.stages), plan.microbatches, plan.batch_size) == (3, 4, 8)


def test_the_table_names_the_stages(outsize: Outsize) -> None:
    answer = outsize("plan", "toy:build", "--cluster", "2xcpu", "--exact")
    assert answer.code == 0
    for word in ("cpu:0", "cpu:1", "bubble", "Why"):
        assert word in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_out_and_check_of_an_edited_plan(outsize: Outsize, folder: Path) -> None:
    made = outsize("plan", "toy:build", "--cluster", "2xcpu", "--schedule", "gpipe", "--out", "plan.json")
    assert made.code == 0
    edited = json.loads((folder / "plan.json").read_text())
    assert edited["schedule"] == "gpipe"
    loss = edited["stages"][1]["units"][-1]
    edited["stages"][0]["units"], edited["stages"][1]["units"] = ["0"], ["1-11", loss]
    (folder / "plan.json").write_text(json.dumps(edited))
    answer = outsize("plan", "toy:build", "--check", "plan.json", "--json")
    priced = json.loads(answer.out)
    assert answer.code == 0, answer.err
    assert priced["stages"] == edited["stages"]
    assert priced["expected"]["stages"][0]["units"] == 1
    assert priced["expected"] != edited["expected"]


def test_units(outsize: Outsize) -> None:
    document = json.loads(outsize("plan", "toy:pair", "--units", "--json").out)
    assert [unit["name"] for unit in document["units"]] == ["0", "1", "cross_entropy"]
    assert {cost["source"] for cost in document["costs"]} == {"roofline"}
    assert "FLOPs" in outsize("plan", "toy:pair", "--units", "--measure").out


def test_weights_on_meta_give_the_same_plan(outsize: Outsize) -> None:
    call = ("plan", "toy:build", "--cluster", "2xcpu", "--json")
    assert outsize(*call, "--meta").out == outsize(*call).out


def test_a_measured_plan_says_so(outsize: Outsize) -> None:
    answer = outsize("plan", "toy:pair", "--cluster", "2xcpu", "--microbatches", "2", "--measure", "--json")
    assert json.loads(answer.out)["expected"]["source"] == "measured"


def test_a_plan_decides_what_options_may_not(outsize: Outsize) -> None:
    outsize("plan", "toy:build", "--cluster", "2xcpu", "--out", "plan.json")
    answer = outsize("plan", "toy:build", "--check", "plan.json", "--stages", "3")
    assert (answer.code, "--stages cannot be used together with --check" in answer.err) == (2, True)
    answer = outsize("plan", "toy:build", "--check", "plan.json", "--batch", "9")
    assert (answer.code, "--batch 9 is not the plan's batch" in answer.err) == (2, True)


def test_the_report_is_a_page_of_the_plan(outsize: Outsize, folder: Path) -> None:
    answer = outsize("plan", "toy:build", "--cluster", "2xcpu", "--report", "plan.html")
    assert answer.code == 0
    page = (folder / "plan.html").read_text()
    for heading in ("One step", "The cuts in the network", "Memory", "Other choices", "Advice"):
        assert f">{heading}<" in page
    answer = outsize("plan", "toy:build", "--cluster", "2xcpu", "--report", "gone/plan.html")
    assert (answer.code, "E106" in answer.err) == (2, True)


def test_no_weights_are_built_to_plan(outsize: Outsize) -> None:
    call = ("plan", "toy:build?width=1000000&layers=2", "--cluster", "64xh200", "--stages", "3")
    answer = outsize(*call, "--optimizer", "sgd")
    assert answer.code == 3
    assert answer.err.startswith("NoFeasiblePlan [E201]: stage ")


def test_a_model_that_runs_by_modules_is_planned_with_weights(outsize: Outsize) -> None:
    seen = outsize("plan", "toy:Deciding", "--cluster", "2xcpu", "--json")
    assert json.loads(seen.out)["form"] == "modules"
    without = outsize("plan", "toy:Deciding", "--cluster", "2xcpu", "--json", "--meta")
    assert json.loads(without.out)["expected"] != json.loads(seen.out)["expected"]


def test_a_schedule_of_ones_own(outsize: Outsize, tmp_path: Path) -> None:
    rows = "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,1F1,2F0,2B0,1B0,2F1,2B1,1B1\n"
    (tmp_path / "mine.csv").write_text(rows)
    made = outsize(
        "plan", "toy:build", "--cluster", "2xcpu", "--schedule", str(tmp_path / "mine.csv"), "--json"
    )
    plan = json.loads(made.out)
    assert (plan["schedule"], plan["microbatches"], len(plan["stages"])) == ("custom", 2, 4)
    assert "\n".join((*plan["actions"], "")) == rows
    (tmp_path / "mine.csv").write_text(rows.replace("2F0,2B0", "2B0,2F0"))
    answer = outsize("plan", "toy:build", "--cluster", "2xcpu", "--schedule", str(tmp_path / "mine.csv"))
    assert answer.code != 0
    assert "2B0 runs before 2F0; rank 1, cell 3 of 8" in answer.err
    missing = outsize("plan", "toy:build", "--schedule", "1f1c")
    assert missing.code == 2
    assert "neither a schedule nor a file" in missing.err


def test_the_cheapest_plan_names_the_devices_to_rent(outsize: Outsize, folder: Path) -> None:
    h100 = [{"kind": "h100-80gb", "name": f"cuda:{n}", "price_per_hour": 3.0} for n in range(2)]
    (folder / "lab.json").write_text(json.dumps({"devices": h100, "inner": "nvlink4", "outer": "eth10"}))
    call = ("plan", "toy:build", "--cluster", "lab.json", "--objective", "cost")
    answer = outsize(*call, "--json")
    assert (answer.code, answer.err) == (0, "")
    why = json.loads(answer.out)["why"][0]
    assert (why["code"], why["devices"], why["of_devices"]) == ("cheapest-devices", 1, 2)
    assert "least money per sample" in " ".join(outsize(*call).out.split())


def test_a_time_limit_ends_the_search_with_a_plan_that_says_so(outsize: Outsize, folder: Path) -> None:
    call = ("plan", "toy:build", "--cluster", "2xcpu", "--time-limit")
    answer = outsize(*call, "0.000001", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert "time-limit-ended" in {why["code"] for why in json.loads(answer.out)["why"]}
    (folder / "plan.json").write_text(answer.out)
    refused = outsize("plan", "toy:build", "--check", "plan.json", "--time-limit", "5")
    assert refused.code == 2
    assert "--time-limit cannot be used together with --check" in refused.err
    assert "time_limit_s=-1.0 makes no sense" in outsize(*call, "-1").err


@pytest.mark.interpreters
def test_recordings_are_kept_in_the_users_cache_unless_off(tmp_path: Path) -> None:
    """In processes of their own: what tests patch in this one has no certain digest, and keeps nothing."""
    main = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"
    model = ["torch.nn:Linear?in_features=8&out_features=8", "--input", "8", "--cluster", "2xl4", "--json"]
    env = {name: text for name, text in os.environ.items() if name != "OUTSIZE_RECORDINGS"}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def planned(*more: str) -> str:
        command = [sys.executable, "-c", main, "plan", *model, *more]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    kept = tmp_path / "cache" / "outsize" / "recordings"
    without = planned("--recordings", "off")
    assert not kept.exists()
    assert planned() == without
    assert list(kept.glob("*.answer"))
    assert planned("--recordings", str(tmp_path / "elsewhere")) == without
    assert list((tmp_path / "elsewhere").glob("*.answer"))
