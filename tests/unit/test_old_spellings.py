"""The table of old keywords: each gives what the new spelling gives, and says how that is typed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outsize
from outsize.api.asked import AskedRun
from outsize.api.old_spellings import OLD, OldSpelling, in_new_spelling
from outsize.api.problem import asked_in
from outsize.api.records import CAPTURES, RECORDS, Lora, Request, fields_of
from outsize.errors import BadOption
from outsize.ops.jobs.requests import job_request
from outsize.ops.renting import rank_clusters
from outsize.train.variants.variant import KEPT

SCALER, SEEN = torch.amp.GradScaler("cpu"), lambda done, total: None
SLURM_0, SLURM_2 = (
    {"SLURM_PROCID": rank, "SLURM_NTASKS": "4", "SLURM_LOCALID": rank, "SLURM_STEP_ID": "0"}
    for rank in ("0", "2")
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "parallelize": outsize.parallelize,
    "plan": outsize.plan,
    "outlook": outsize.api.outlook,
    "job_request": job_request,
    "fit": outsize.fit,
    "largest_batch": outsize.largest_batch,
    "largest": outsize.largest,
    "rank_clusters": rank_clusters,
    "tune": outsize.tune,
    "check": outsize.check,
}
MESH: dict[str, tuple[Any, dict[str, Any]]] = {
    name: (2, {"axes": {name: 2}}) for name in ("dp_replicate", "dp_shard", "tp", "cp", "ep")
}
ASKED: dict[str, Any] = {"bn": "sync", "sequence_parallel": True, "loss_pieces": 4, "module_pieces": 2}
OF_A_RUN: dict[str, Any] = {
    "measured": True,
    "progress": SEEN,
    "batch_size": 8,
    "precision": "bf16",
    "recompute": "full",
    "exact": False,
}
RUN: dict[str, tuple[Any, dict[str, Any]]] = {
    **MESH,
    **{name: (value, {"plan": Request(**{name: value})}) for name, value in (ASKED | OF_A_RUN).items()},
    "weights": ("w.safetensors", {"weight_files": "w.safetensors"}),
    "counting": ("sum", {"loss_fn": outsize.Loss(counting="sum")}),
    "scaler": (SCALER, {"loss_fn": outsize.Loss(scaler=SCALER)}),
    "clipping": ("speculative", {"clip_norm": outsize.Clip(clipping="speculative")}),
    "checkpoint": ("run", {"resume": outsize.Checkpoint(saves_in="run")}),
    "device_graphs": (True, {"compiled": outsize.Compile(device_graphs=True)}),
    "captures": (4, {"compiled": outsize.Compile(captures=4)}),
    "memory_share": (0.5, {"devices": outsize.Ranks(memory_share=0.5)}),
    "on_oom": ("replan", {"devices": outsize.Ranks(on_oom="replan")}),
    "offload_folder": ("/scratch", {"devices": outsize.Ranks(offload_folder="/scratch")}),
    "backend": ("mpi", {"devices": outsize.Ranks(backend="mpi")}),
    "own_batches": (True, {"devices": outsize.Ranks(own_batches=True)}),
    "seed": (3, {"devices": outsize.Ranks(seed=3)}),
    "hang_timeout": (60, {"callbacks": [outsize.Watch(hang_timeout=60)]}),
    "on_hang": ("wait", {"callbacks": [outsize.Watch(on_hang="wait")]}),
    "publish": (True, {"callbacks": [outsize.Watch(publish=True)]}),
    "total_steps": (9, {"callbacks": [outsize.Watch(total_steps=9)]}),
}
QUESTION: dict[str, tuple[Any, dict[str, Any]]] = {
    **MESH,
    **{
        name: (value, {"request": Request(**{name: value})})
        for name, value in (ASKED | {"objective": "cost", "inference": True, "progress": SEEN}).items()
    },
    "lora_rank": (8, {"request": Request(lora=Lora(8))}),
    "lora_targets": (["q_proj"], {"request": Request(lora=Lora(8, ["q_proj"]))}),
}
CHECK = {"weights": RUN["weights"]}
BESIDE: dict[str, dict[str, Any]] = {"lora_targets": {"lora_rank": 8}}
"""What an old keyword makes sense with alone."""


def new_of(function: str, name: str) -> tuple[Any, dict[str, Any]]:
    """A value of an old keyword, and the new spelling, written by hand."""
    value, new = {"parallelize": RUN, "check": CHECK}.get(function, QUESTION)[name]
    return value, dict(new)


def read(function: str, options: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(FUNCTIONS[function]).parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OldSpelling)
        return in_new_spelling(function, options, known)


ROWS = [(function, row.name) for function, rows in OLD.items() for row in rows]


@pytest.mark.parametrize(("function", "name"), ROWS)
def test_an_old_keyword_gives_what_the_new_spelling_gives(function: str, name: str) -> None:
    if name in inspect.signature(FUNCTIONS[function]).parameters:
        pytest.fail(f"{name} of {function} is no old keyword")
    value, new = new_of(function, name)
    found = read(function, {name: value, **BESIDE.get(name, {})})
    assert found == new
    if function == "parallelize":
        plan = found.pop("plan", None), new.pop("plan", None)
        asked = [AskedRun.of(*each) for each in zip(plan, (found, new), strict=True)]  # pyright: ignore
        assert asked[0] == asked[1]
    elif function != "check":
        assert asked_in(found) == asked_in(new) != Request()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("function", "name"), ROWS)
def test_the_warning_says_what_to_type_at_the_users_line(function: str, name: str) -> None:
    value, new = new_of(function, name)
    known = inspect.signature(FUNCTIONS[function]).parameters
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_new_spelling(function, {name: value, **BESIDE.get(name, {})}, known)
    assert issubclass(caught[0].category, FutureWarning), "which Python shows"
    assert caught[0].filename == __file__
    said, _, typed = str(caught[0].message).partition("Next: ")
    assert said.startswith(f"outsize.{function}({name}=")
    assert len(caught) == 1
    if isinstance(value, int | str | float):
        assert eval(f"dict({typed})", {"outsize": outsize}) == new


def test_several_old_keywords_are_in_one_warning_which_can_be_pasted() -> None:
    old = {"clip_norm": 1.0, "clipping": "speculative", "seed": 3, "backend": "mpi", "on_hang": "wait"}
    old |= {"hang_timeout": 60, "tp": 2, "dp_shard": 4, "bn": "sync", "precision": "bf16"}
    known = inspect.signature(FUNCTIONS["parallelize"]).parameters
    with pytest.warns(OldSpelling) as caught:
        new = in_new_spelling("parallelize", old, known)
    assert len(caught) == 1
    said, _, typed = str(caught[0].message).partition("Next: ")
    assert said.startswith("outsize.parallelize(clipping=, seed=, backend=, on_hang=, hang_timeout=")
    assert eval(f"dict({typed})", {"outsize": outsize}) == new
    with pytest.warns(OldSpelling, match=r"Next: loss_fn=outsize\.Loss\(mse_loss, counting='sum'\)"):
        in_new_spelling("parallelize", {"loss_fn": F.mse_loss, "counting": "sum"}, known)
    with pytest.warns(OldSpelling, match=r"Request\(bn='sync', lora=outsize\.Lora\(rank=8\)\)"):
        in_new_spelling("fit", {"bn": "sync", "lora_rank": 8}, known)


@pytest.mark.parametrize(
    ("variables", "speaks"),
    [({}, True), ({"RANK": "0"}, True), ({"RANK": "3"}, False), (SLURM_2, False), (SLURM_0, True)],
)
def test_rank_0_alone_says_it(
    variables: dict[str, str], speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert in_new_spelling("parallelize", {"seed": 3}, ()) == {"devices": outsize.Ranks(seed=3)}
    assert len(caught) == speaks


@pytest.mark.parametrize("name", [row.name for row in OLD["parallelize"]])
def test_old_and_new_together_are_an_error(name: str) -> None:
    value, new = new_of("parallelize", name)
    with pytest.raises(BadOption, match=rf"{name} is an old keyword, and cannot be used together with"):
        read("parallelize", {name: value, **new})


def test_a_plain_value_was_the_old_spelling_of_its_own_subject() -> None:
    found = read(
        "parallelize", {"clip_norm": 1.0, "clipping": "speculative", "loss_fn": F.mse_loss, "seed": 3}
    )
    assert found["clip_norm"] == outsize.Clip(1.0, clipping="speculative")
    assert found["devices"] == outsize.Ranks(seed=3)
    assert read("parallelize", {"resume": "a", "checkpoint": "b"})["resume"] == outsize.Checkpoint("a", "b")
    assert read("plan", {"axes": "pp", "tp": 2}) == {"axes": {"tp": 2, "others": 1}}
    assert read("plan", {"axes": "pp", "tp": None}) == {"axes": "pp"}
    assert read("plan", {"tp": 2, "cp": 2}) == {"axes": {"tp": 2, "cp": 2}}
    assert read("parallelize", {"seed": 3, "backend": "mpi"}) == {
        "devices": outsize.Ranks(seed=3, backend="mpi")
    }


def test_a_policy_is_no_folder_of_weights() -> None:
    with pytest.raises(BadOption, match=r"weights='host' is where a plan keeps .*Request\(weights='host'\)"):
        read("parallelize", {"weights": "host"})


def test_a_plan_has_decided_what_an_old_keyword_asks_for() -> None:
    with pytest.raises(BadOption, match="bn cannot be used together with plan=, which has decided it"):
        read("parallelize", {"bn": "sync", "plan": object()})


def test_a_field_is_given_once() -> None:
    with pytest.raises(BadOption, match="stages is given twice: as a keyword, and in the request; 2, and 3"):
        asked_in({"stages": 2, "request": Request(stages=3)})


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_misspelt_field_is_refused_with_the_nearest(record: Any) -> None:
    name = fields_of(record)[-1]
    with pytest.raises(BadOption) as caught:
        record(**{name[:-1]: 1})
    assert caught.value.what == f"no option `{name[:-1]}`; did you mean `{name}`?"


def test_a_record_of_another_subject_is_refused() -> None:
    with pytest.raises(BadOption, match=r"takes outsize\.Clip, and was given outsize\.Ranks"):
        AskedRun.of(None, {"clip_norm": outsize.Ranks()})  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadOption, match="has 2 fields, and was given 3 values"):
        outsize.Clip(1, 2, 3)  # pyright: ignore


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tpp": 2}, r"axes has 'tpp', .*Next: axes=\{'tp': 2\}"),
        ({"fsdp": 2}, r"axes has 'fsdp', .*Next: axes=\{'dp_shard': 2\}"),
        ({"pp": 2}, r"axes has 'pp', .*Next: stages=2"),
        ({"tp": 2, "others": 2}, "the other axes are searched, or are 1"),
    ],
)
def test_what_is_no_axis_of_a_mesh_is_named(axes: dict[str, int], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        _ = Request(axes=axes).layout


@pytest.mark.parametrize("field", ["inference", "lora", "objective"])
def test_a_run_refuses_what_only_a_plan_follows(field: str) -> None:
    value = {"inference": True, "lora": 8, "objective": "cost"}[field]
    with pytest.raises(BadOption, match=f"{field} of the request is nothing that parallelize can follow"):
        AskedRun.of(Request(**{field: value}), {})


def test_both_numbers_of_kept_programs_are_one() -> None:
    assert CAPTURES == KEPT


def test_the_nearest_field_of_a_record_is_found() -> None:
    with pytest.raises(
        BadOption, match=r"did you mean `hang_timeout`\?.*outsize\.Watch\(hang_timeout=\.\.\.\)"
    ):
        outsize.parallelize(nn.Linear(2, 2), hang_timout=3)  # pyright: ignore[reportCallIssue]
