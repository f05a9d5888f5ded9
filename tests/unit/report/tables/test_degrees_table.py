"""What each degree of offload costs: the words of the table, its width, and measured / bound in a report."""

from __future__ import annotations

import io
import re

import pytest
import samples
from rich.console import Console, Group

from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.offload import Bound, Degree
from outsize.policies.weights import Weights
from outsize.report.html.page import PageFacts, render
from outsize.report.tables.offload import degree_rows, degrees_table

SUMS = {"compute_s": 13.9, "to_device_s": 123.0, "to_host_s": 61.5, "optimizer_s": 46.0}


def degree(weights: Weights, fits: bool, microbatches: int = 2, scale: float = 1.0) -> Degree:
    bound = Bound(**{name: scale * seconds for name, seconds in SUMS.items()})
    how = {"microbatches": microbatches, "recompute": microbatches > 2}
    return Degree(
        weights=weights, bound=bound, step_s=scale * 170.0, peak_bytes=12_345 << 20, fits=fits, **how
    )


def shown(degrees: list[Degree], chosen: Weights = "host") -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(Group(*degrees_table(degrees, chosen)))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_row_for_each_in_80_columns() -> None:
    three = [degree("resident", False), degree("host-optimizer", True), degree("host", True)]
    lines = shown([*three, degree("host-activations", True)])
    assert lines[0] == "What each degree of offload costs"
    assert " ".join(lines[1].split()) == "degree, s compute H2D D2H optim. bound step peak GiB fits"
    figures = ["13.9", "123", "61.5", "46.0", "123", "170", "12.1"]
    assert [line.split() for line in lines[3:7]] == [
        ["resident", *figures, "no"],
        ["host-optimizer", *figures, "yes"],
        ["host", *figures, "chosen"],
        ["host-activations", *figures, "yes"],
    ]
    assert not any(":" in line and "microbatch" in line for line in lines), "all run alike"


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "s"), (1e-3, "ms"), (1e-4, "ms")])
def test_seconds_have_one_unit(scale: float, unit: str) -> None:
    assert shown([degree("host", True, scale=scale)])[1].startswith(f"degree, {unit} ")


def test_degrees_that_run_in_other_ways_say_so() -> None:
    lines = " ".join(shown([degree("host-optimizer", True, 4), degree("host", True, 1)]))
    assert "host-optimizer: 4 microbatches, recomputed; host: 1 microbatch." in lines


def test_the_disk_is_the_last_row() -> None:
    host = degree("host", True)
    slower = host.bound.model_copy(update={"disk_s": 400.0})
    spilled = host.model_copy(update={"bound": slower, "step_s": 400.0, "disk": True})
    lines = shown([degree("resident", False), host, spilled])
    assert [line.split()[0] for line in lines[3:6]] == ["resident", "host", "disk"]
    assert [line.split()[-1] for line in lines[3:6]] == ["no", "yes", "chosen"]
    assert lines[5].split()[5:7] == ["400", "400"]
    assert "disk: host, and 400 s of a disk." in " ".join(lines)


def test_no_degrees_no_table() -> None:
    assert degrees_table((), "resident") == []


def test_a_page_has_the_same_rows() -> None:
    plan = samples.plan()
    assert plan.expected is not None
    degrees = (degree("resident", False), degree("host", True))
    expected = plan.expected.model_copy(update={"degrees": degrees})
    page = render(PageFacts(plan=plan.model_copy(update={"expected": expected, "weights": "host"})))
    (table,) = re.findall(r'id="h-degrees">.*?</table>', page, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in table.split("<tr>")[1:]]
    found = degree_rows(degrees, "host")
    assert found is not None
    assert cells == [list(found.head), *map(list, found.rows)]
    assert "h-degrees" not in render(PageFacts(plan=plan)), "nothing where there are none"


def test_a_report_says_measured_and_bound() -> None:
    report = Utilisation(step_s=246.0, bound_s=14.0, devices=("cuda:0",), busy=(0.1,), transfer=0.5)
    assert "roofline" not in str(report)
    report = report.model_copy(update={"roofline": Bound(**SUMS)})
    least = "123 s expected at least (copies to the device)"
    assert f"roofline   246 s measured / {least} = 2.00" in str(report).splitlines()
