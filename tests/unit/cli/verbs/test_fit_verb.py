"""`outsize fit`: the word, its exit code, the document; no weights; precisions change the bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Outsize = Callable[..., Any]
WIDE = "toy:build?width=512"


def document(answer: Any) -> dict[str, Any]:
    return json.loads(answer.out)


def test_yes(outsize: Outsize) -> None:
    answer = outsize("fit", WIDE, "--cluster", "2x0.6GB")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("YES  Sequential (1.58 M parameters) fits 2x0.6GB")
    assert "one device is enough" in answer.out.lower()
    assert max(map(len, answer.out.splitlines())) <= 80


def test_yes_if_names_what_to_type(outsize: Outsize) -> None:
    call = ("fit", WIDE, "--cluster", "2x0.421GB")
    answer = outsize(*call, "--axes", "pp")
    assert answer.code == 1
    said = " ".join(answer.out.split())
    assert said.startswith("YES IF Sequential (1.58 M parameters) fits 2x0.421GB with one of these changes")
    assert "It does not as 2 stages, 1f1b" in said
    assert "--optimizer sgd" in said
    assert outsize(*call, "--optimizer", "sgd").code == 0


def test_where_no_pipeline_fits_it_names_what_plan_would_do(outsize: Outsize) -> None:
    """The same exit code; a table of the pipeline, and one of that way."""
    call = ("fit", WIDE, "--cluster", "2x0.421GB")
    answer = outsize(*call)
    assert (answer.code, answer.out[:6]) == (1, "YES IF")
    said = " ".join(answer.out.split())
    assert "fits 2x0.421GB with --axes all --weights host-optimizer, which outsize plan takes" in said
    assert "nothing else fits; one device, optimizer on the host" in said
    assert "With --axes all --weights host-optimizer" in answer.out
    assert "101 %" in answer.out
    change, other = document(outsize(*call, "--json"))["changes"][:2]
    assert [change["planned"], other["planned"]] == [True, False]
    assert [device["device"] for device in change["devices"]] == ["cuda:0"]
    typed = (word for name, value in change["options"].items() for word in (f"--{name}", str(value)))
    asked = outsize(*call, *typed)
    assert (asked.code, asked.out[:5]) == (0, "YES  ")
    assert "Largest" not in asked.out


def test_axes_of_ones_own_are_answered_in_one_word(outsize: Outsize) -> None:
    yes, no = (outsize("fit", WIDE, "--cluster", f"2x{size}GB", "--axes", "tp=2") for size in (0.6, 0.38))
    assert (yes.code, no.code) == (0, 1)
    assert "1 stage, tp 2" in yes.out
    assert "stage 0 needs" in no.out


def test_no_says_how_many_would_do(outsize: Outsize) -> None:
    answer = outsize("fit", WIDE, "--cluster", "2x0.391GB", "--json")
    assert answer.code == 1
    assert document(answer)["answer"] == "NO"


def test_bytes_of_weights_gradients_and_states(outsize: Outsize) -> None:
    """16 bytes for each parameter under AdamW with weights in float32, mixed or not; 8 all in bfloat16."""
    for precision, each in (("fp32", 16), ("bf16-mixed", 16), ("fp16-mixed", 16), ("bf16", 8)):
        found = document(outsize("fit", WIDE, "--cluster", "1x1GB", "--precision", precision, "--json"))
        device = found["devices"][0]
        held = sum(device[f"{name}_bytes"] for name in ("weights", "gradients", "master", "optimizer"))
        assert held == pytest.approx(each * found["parameters"], rel=1e-3), precision


def test_mixed_precision_saves_half_the_activations_and_copies_of_weights(outsize: Outsize) -> None:
    call = ("fit", WIDE, "--cluster", "1x1GB", "--batch", "2048", "--microbatches", "1", "--json")
    full, mixed = (
        document(outsize(*call, "--precision", p))["devices"][0]["activations_bytes"]
        for p in ("fp32", "bf16-mixed")
    )
    assert 0.4 * full < mixed < 0.8 * full


def test_nothing_is_allocated_for_a_model_that_no_memory_holds(outsize: Outsize) -> None:
    answer = outsize("fit", "toy:build?width=2000000&layers=2", "--cluster", "2xh100-80gb")
    assert (answer.code, answer.err) == (1, "")
    assert answer.out.startswith("NO  Sequential (8.00 T parameters) does not fit 2xh100-80gb")


@pytest.mark.filterwarnings("ignore:torchvision .* is built for another torch")
def test_a_detector_is_answered_without_its_activations_and_that_is_said(outsize: Outsize) -> None:
    answer = outsize("fit", "torchvision:ssdlite320_mobilenet_v3_large", "--cluster", "2x12GB")
    assert answer.code == 0
    assert "This counts only weights, gradients and states: activations are added to it." in answer.out
    answer = outsize("fit", WIDE, "--cluster", "2x0.6GB", "--json")
    assert document(answer)["whole"] is True


def test_the_largest_batch_and_what_one_more_lacks(outsize: Outsize) -> None:
    call = ("fit", WIDE, "--cluster", "1x0.45GB")
    answer = outsize(*call, "--max", "batch")
    found = document(outsize(*call, "--max", "batch", "--json"))
    lines = answer.out.splitlines()
    assert answer.code == 0
    assert lines[0].startswith("YES  Sequential (1.58 M parameters) on 1x0.45GB: the largest batch is ")
    assert f"{found['next_value']:,} lacks" in lines[2]
    assert max(map(len, lines)) <= 80
    more = outsize(*call, "--batch", str(found["next_value"]), "--microbatches", "1", "--axes", "pp")
    assert more.code == 1


def test_the_largest_value_of_an_option_of_the_model(outsize: Outsize) -> None:
    answer = outsize("fit", WIDE, "--cluster", "1x0.45GB", "--max", "width:64", "--json")
    found = document(answer)
    assert (found["quantity"], found["value"] % 64, answer.code) == ("width", 0, 0)
    wider = f"toy:build?width={found['next_value']}"
    assert outsize("fit", wider, "--cluster", "1x0.45GB", "--axes", "pp").code == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--max", "batch", "--batch", "4"), "looks for the batch itself"),
        (("--max", "width:0"), "has no step"),
        (("--max", "layers"), "the number of layers of toy:build is not known"),
        (("--max", "sequence", "--input", "4"), "looks for the length that --input gives"),
    ],
)
def test_a_max_that_makes_no_sense_is_an_error_of_three_parts(
    outsize: Outsize, options: tuple[str, ...], text: str
) -> None:
    answer = outsize("fit", "toy:build", *options)
    assert answer.code == 2
    assert text in answer.err
    assert "Next:" in answer.err


def test_where_not_one_sample_fits(outsize: Outsize) -> None:
    answer = outsize("fit", WIDE, "--cluster", "1x0.36GB", "--max", "batch")
    assert answer.code == 1
    assert answer.out.startswith("NO  Sequential")
    assert "no batch fits" in answer.out


def test_devices_are_ranked_by_price(outsize: Outsize) -> None:
    call = ("fit", WIDE, "--devices", "1xl4,1xh100-80gb", "--microbatches", "1")
    answer = outsize(*call, "--prices", "l4=0.8,h100-80gb=90", "--top", "1")
    lines = answer.out.splitlines()
    assert (answer.code, lines[0].partition(": ")[2]) == (0, "1xl4 is the cheapest per sample")
    assert "1 more fit" in answer.out
    assert max(map(len, lines)) <= 80
    assert "--prices l4: 'l4' is no price" in outsize(*call, "--prices", "l4").err


def test_inference_says_the_seconds_of_a_forward_and_no_optimizer(outsize: Outsize) -> None:
    call = ("fit", WIDE, "--cluster", "1x0.421GB", "--inference")
    answer = outsize(*call)
    lines = answer.out.splitlines()
    assert (answer.code, answer.err) == (0, "")
    assert lines[1].endswith("inference, fp32")
    assert lines[2].startswith("Forward of 8 samples: ")
    assert "optim." not in answer.out
    assert max(map(len, lines)) <= 80
    assert document(outsize(*call, "--json"))["inference"] is True
    plan = document(outsize("plan", WIDE, "--cluster", "2x0.421GB", "--inference", "--json"))
    assert plan["schedule"] == "forward-only"
