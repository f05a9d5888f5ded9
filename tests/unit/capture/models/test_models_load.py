"""MODEL specs: what they build, from which seed, and what a bad one is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.capture.models.imports import import_transformers
from outsize.capture.models.load import import_torchvision, load, parse_spec
from outsize.errors import BadOption, ModelNotImportable, OutsizeError, UnknownModel

pytestmark = pytest.mark.filterwarnings("ignore:torchvision .* is built for another torch")

LLAMA = "transformers:LlamaConfig?num_hidden_layers=2&hidden_size=32&num_attention_heads=4&vocab_size=64"
TINY = "num_hidden_layers=1&hidden_size=16&num_attention_heads=2&intermediate_size=16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with a `mine.py`."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "broken", "torn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn

        def build(width=4):
            return nn.Linear(3, width)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)

        instance = nn.Linear(5, 5)
        number = 3

        def fails():
            raise RuntimeError("no disk left")
        """)
    )
    (tmp_path / "torn.py").write_text("def build(:\n")
    (tmp_path / "broken.py").write_text("import a_package_nobody_has\n")
    return tmp_path


def refused(kind: type[OutsizeError], spec: str) -> str:
    with pytest.raises(kind) as caught:
        load(spec)
    return str(caught.value)


# -- specs -----------------------------------------------------------------------------------------


def test_options_are_read_as_python_values() -> None:
    spec = parse_spec("m:f?a=4&b=1e-3&c=true&d=None&e=[2, 2]&g=gelu")
    assert (spec.provider, spec.name) == ("m", "f")
    assert spec.options == {"a": 4, "b": 1e-3, "c": True, "d": None, "e": [2, 2], "g": "gelu"}


@pytest.mark.parametrize("query", ["a", "a=", "=3", "a=1&a=2", "a b=1"])
def test_a_bad_query_is_a_bad_option(query: str) -> None:
    with pytest.raises(BadOption, match="E106"):
        parse_spec(f"m:f?{query}")


def test_a_spec_without_provider_is_sent_to_torchvision() -> None:
    assert refused(UnknownModel, "resnet50") == (
        "UnknownModel [E101]: 'resnet50' is no model spec. Next: write torchvision:resnet50"
    )


# -- torchvision -----------------------------------------------------------------------------------


def test_torchvision_imports_and_its_missing_part_is_said_where_its_models_are_asked_for() -> None:
    code = """
        import warnings
        from outsize.capture.models.imports import TorchvisionNote, import_torchvision, import_transformers
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            transformers = import_transformers()
            from transformers import ViTImageProcessor  # imports torchvision
            ours = [w for w in seen if issubclass(w.category, TorchvisionNote | RuntimeWarning)]
            assert not ours, ours
            models = import_torchvision().models
        from torchvision.extension import _has_ops
        words = [str(w.message) for w in seen if w.category is TorchvisionNote]
        assert len(words) == (0 if _has_ops() else 1), seen
        assert all("/" not in text and "Next: outsize doctor" in text for text in words), words
        assert "resnet50" in models.list_models()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr


def test_torchvision_of_every_task() -> None:
    assert load("torchvision:resnet18?num_classes=5").get_parameter("fc.weight").shape == (5, 512)
    deeplab = load("torchvision:deeplabv3_resnet101?num_classes=5&aux_loss=True", meta=True)
    assert deeplab.get_parameter("classifier.4.weight").shape[0] == 5
    assert deeplab.get_parameter("aux_classifier.4.weight").is_meta
    assert type(load("torchvision:r3d_18", meta=True)).__name__ == "VideoResNet"
    regnet = load("torchvision:regnet_y_400mf", meta=True)  # its builder reads numbers from tensors
    assert all(p.is_meta for p in regnet.parameters())
    assert type(load("torchvision:fasterrcnn_resnet50_fpn", meta=True)).__name__ == "FasterRCNN"


def test_an_unknown_torchvision_model_names_the_close_ones() -> None:
    text = refused(UnknownModel, "torchvision:resnet5")
    assert text.startswith("UnknownModel [E101]: torchvision has no model 'resnet5'; it has ")
    assert "torchvision:resnet50" in text


def test_an_option_that_torchvision_does_not_take_is_a_bad_option() -> None:
    text = refused(BadOption, "torchvision:resnet18?num_clases=5")
    assert "torchvision:resnet18 does not take num_clases=5" in text
    assert "unexpected keyword argument 'num_clases'" in text


# -- transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "head"),
    [
        (f"LlamaConfig?{TINY}", "LlamaForCausalLM"),
        ("GPT2Config?n_layer=1&n_embd=16&n_head=2", "GPT2LMHeadModel"),
        (f"BertConfig?{TINY}", "BertForMaskedLM"),
        (f"BertConfig?{TINY}&is_decoder=True", "BertLMHeadModel"),
        (f"BertConfig?{TINY}&class=BertForSequenceClassification", "BertForSequenceClassification"),
        ("T5Config", "T5ForConditionalGeneration"),
        ("BartConfig", "BartForConditionalGeneration"),
        ("WhisperConfig", "WhisperForConditionalGeneration"),
        ("ViTConfig", "ViTForImageClassification"),
        ("SwinConfig", "SwinForImageClassification"),
        ("VideoMAEConfig", "VideoMAEForVideoClassification"),
        ("ClapConfig", "ClapModel"),
        ("MambaConfig?num_hidden_layers=1", "MambaForCausalLM"),
    ],
)
def test_the_head_follows_from_the_config(spec: str, head: str) -> None:
    model = load(f"transformers:{spec}", meta=True)
    assert type(model).__name__ == head
    assert all(p.is_meta for p in model.parameters())


def test_a_config_file_with_its_architecture(folder: Path) -> None:
    fields = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    (folder / "config.json").write_text(
        json.dumps({**fields, "architectures": ["BertForTokenClassification"]})
    )
    for name in ("./config.json", "."):
        model: Any = load(f"transformers:{name}?num_hidden_layers=3", meta=True)
        assert type(model).__name__ == "BertForTokenClassification"
        assert (model.config.hidden_size, model.config.num_hidden_layers) == (32, 3)


def test_a_config_file_of_an_unknown_type_or_none(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lama"}')
    assert "transformers:llama" in refused(UnknownModel, "transformers:./config.json")
    assert "models are not downloaded" in refused(UnknownModel, "transformers:./other.json")


def test_a_misspelt_config_names_the_close_ones() -> None:
    assert "Next: transformers:LlamaConfig" in refused(UnknownModel, "transformers:LlamaConfg")


def test_a_misspelt_field_is_not_swallowed() -> None:
    text = refused(BadOption, "transformers:LlamaConfig?num_hiden_layers=2")
    assert text.startswith(
        "BadOption [E106]: LlamaConfig has no field 'num_hiden_layers'. Next: num_hidden_layers"
    )


def test_a_value_that_the_config_refuses_is_told_in_its_own_words() -> None:
    text = refused(BadOption, "transformers:LlamaConfig?num_attention_heads=7")
    assert "LlamaConfig does not take num_attention_heads=7" in text
    assert "not a multiple" in text
    assert "\n" not in text


def test_a_class_that_is_none() -> None:
    assert "class=LlamaForCausalLM" in refused(BadOption, "transformers:LlamaConfig?class=LlamaForCausalML")


# -- a builder of the user -------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_a_builder_of_the_working_directory() -> None:
    path = list(sys.path)
    assert load("mine:build").get_parameter("weight").shape == (4, 3)
    assert load("mine:build?width=7").get_parameter("weight").shape == (7, 3)
    assert type(load("mine:Net")).__name__ == "Net"
    instance = load("mine:instance")
    assert load("mine:instance") is instance
    assert load("mine:instance", meta=True).get_parameter("weight").is_meta
    assert not instance.get_parameter("weight").is_meta
    assert sys.path == path


def test_what_a_broken_builder_is_told(folder: Path) -> None:
    raised = refused(ModelNotImportable, "mine:fails")
    assert raised.startswith(
        "ModelNotImportable [E102]: mine:fails cannot be built; RuntimeError: no disk left ("
    )
    assert f"{folder}/mine.py:17)" in raised
    assert f"{folder}/torn.py:1)" in refused(ModelNotImportable, "torn:build")
    assert raised.endswith("Next: python -c 'import mine; mine.fails()' shows the whole traceback")
    missing = refused(ModelNotImportable, "broken:build")
    assert "No module named 'a_package_nobody_has'" in missing
    assert f"{folder}/broken.py:1)" in missing


@pytest.mark.usefixtures("folder")
def test_names_that_are_not_there() -> None:
    assert "Next: mine:build" in refused(UnknownModel, "mine:bild")
    assert "gives a int, not an nn.Module" in refused(UnknownModel, "mine:number")
    assert "write mine:build" in refused(UnknownModel, "./mine.py:build")
    assert "run from the folder" in refused(ModelNotImportable, "no_such_module:build")
    assert "Next: torchvision:resnet50" in refused(ModelNotImportable, "torchvison:resnet50")
    assert "does not take depth=3" in refused(BadOption, "mine:build?depth=3")


# -- weights ---------------------------------------------------------------------------------------


def weights(spec: str, seed: int) -> list[Tensor]:
    return list(load(spec, seed=seed).parameters())


@pytest.mark.parametrize("spec", [LLAMA, "torchvision:squeezenet1_1"])
def test_the_seed_decides_the_weights_and_the_caller_keeps_its_generator(spec: str) -> None:
    before = torch.get_rng_state()
    first, again, other = weights(spec, 1), weights(spec, 1), weights(spec, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_torchvision_is_the_module_itself() -> None:
    assert import_torchvision() is sys.modules["torchvision"]
    assert isinstance(import_transformers().AutoModel, type)
    assert issubclass(import_torchvision().models.ResNet, nn.Module)
