"""Decides which transformers class to build for a config, and what its labels look like.

A config names a body (`LlamaConfig`), not a head. The head is, in this order:
1. the one asked for: `?class=BertForSequenceClassification`;
2. the config's own `architectures`, which a `config.json` holds;
3. the first of HEADS whose Auto class knows the config: causal LM, sequence to sequence, masked LM, image
   classification and so on down to the bare body. Two corrections, since many configs fit several: an
   encoder-decoder config (BART, Whisper) takes its sequence-to-sequence head before its decoder alone, and
   an encoder (BERT: masked LM fits, `is_decoder` is off) its masked LM head before the causal one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, final

from torch import nn

from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption, UnknownModel
from outsize.errors.interruptions import raise_interruption

Labels = Literal["tokens", "class", "class per token", "none"]


@final
@dataclass(frozen=True)
class Head:
    """Names one of transformers' Auto classes and the kind of `labels` its models compute their loss from."""

    auto: str
    labels: Labels


_CAUSAL = Head("AutoModelForCausalLM", "tokens")
_SEQ2SEQ = Head("AutoModelForSeq2SeqLM", "tokens")
_SPEECH = Head("AutoModelForSpeechSeq2Seq", "tokens")
_MASKED = Head("AutoModelForMaskedLM", "tokens")

HEADS: tuple[Head, ...] = (
    _CAUSAL,
    _SEQ2SEQ,
    _SPEECH,
    _MASKED,
    Head("AutoModelForImageClassification", "class"),
    Head("AutoModelForVideoClassification", "class"),
    Head("AutoModelForAudioClassification", "class"),
    Head("AutoModelForSequenceClassification", "class"),
    Head("AutoModelForTokenClassification", "class per token"),
    Head("AutoModelForImageTextToText", "tokens"),
    Head("AutoModel", "none"),
)
# Configs accept these through **kwargs without a field of that name.
_HIDDEN_FIELDS = frozenset({"attn_implementation", "experts_implementation", "rope_theta"})


def transformers_builder(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """Returns a function that builds the model of a config class or a config.json, with some fields replaced.

    Raises UnknownModel (no such config), BadOption (no such field, a value the config refuses, a class that
    is none) and ModelNotImportable (transformers is not installed).
    """
    transformers = import_transformers()
    fields = {key: value for key, value in options.items() if key != "class"}
    is_file = name.endswith(".json") or Path(name).is_dir()
    config = (
        _config_of_file(transformers, Path(name), fields) if is_file else _config(transformers, name, fields)
    )
    cls = _model_class(transformers, config, options.get("class"))
    return lambda: cls._from_config(config)


def labels_of(model: nn.Module) -> Labels:
    """Returns what `labels` of a transformers model are: token ids, one class per sample, per
    token, or none.
    """
    transformers = import_transformers()
    config = type(getattr(model, "config", None))
    fitting = [head for head in HEADS if isinstance(model, _classes(transformers, head, config))]
    return fitting[0].labels if fitting else "none"


def from_hub(name: str) -> str:
    """Returns how a model of the Hub is named, which nothing here downloads: by its config, saved once."""
    return (
        f'of the Hub: python -c "from transformers import AutoConfig as C; C.from_pretrained({name!r})'
        ".save_pretrained('.')\", then transformers:./config.json"
    )


# -- configs ---------------------------------------------------------------------------------------


def _config(transformers: Any, name: str, fields: dict[str, Any]) -> Any:
    known = [n for n in dir(transformers) if n.endswith("Config")]
    if name not in known:
        raise UnknownModel(
            f"transformers has no config class {name!r}",
            next_step=_nearest(name, known) or f"transformers:LlamaConfig; {from_hub(name)}",
        )
    cls = getattr(transformers, name)
    _check_fields(cls, fields, ())
    config = _made(lambda: cls(**fields), name, fields)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # T5's own config.json has the same value; without it no class can make decoder inputs of its labels.
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _config_of_file(transformers: Any, path: Path, fields: dict[str, Any]) -> Any:
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModel(
            f"{path} cannot be read as JSON",
            numbers=str(error),
            next_step="give the path of a config.json; models are not downloaded",
        ) from error
    kind = data.pop("model_type", None) if isinstance(data, dict) else None
    if kind not in transformers.CONFIG_MAPPING:
        raise UnknownModel(
            f"{path} is of model_type {kind!r}, which this transformers does not know",
            next_step=_nearest(str(kind), list(transformers.CONFIG_MAPPING)) or "pip install -U transformers",
        )
    _check_fields(transformers.CONFIG_MAPPING[kind], fields, data)
    return _made(lambda: transformers.AutoConfig.for_model(kind, **{**data, **fields}), str(path), fields)


def _check_fields(cls: Any, fields: dict[str, Any], more: Any) -> None:
    """Raises BadOption for a misspelt field, since configs accept any keyword."""
    known = {*inspect.signature(cls).parameters, *cls.attribute_map, *dir(cls), *_HIDDEN_FIELDS, *more}
    for key in fields:
        if key not in known:
            near = get_close_matches(key, known, n=3)
            raise BadOption(
                f"{cls.__name__} has no field {key!r}",
                next_step=" or ".join(near) or f"python -c 'help(transformers.{cls.__name__})'",
            )


def _made(make: Callable[[], Any], name: str, fields: dict[str, Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise_interruption(error)
        values = ", ".join(f"{k}={v!r}" for k, v in fields.items()) or "its own values"
        raise BadOption(
            f"{name} does not take {values}", numbers=_one_line(error), next_step="change these values"
        ) from error


# -- heads -----------------------------------------------------------------------------------------


def _model_class(transformers: Any, config: Any, asked: str | None) -> Any:
    if asked is not None:
        return _asked_class(transformers, asked)
    for name in config.architectures or ():
        if _is_model(getattr(transformers, name, None)):
            return getattr(transformers, name)
    fitting = [head for head in HEADS if _classes(transformers, head, type(config))]
    if not fitting:
        raise UnknownModel(
            f"no Auto class builds a model from {type(config).__name__}",
            next_step="name one: ?class=BertForSequenceClassification",
        )
    first = _favoured(config)
    # The first of the preferred heads that fits is taken, else the first of HEADS.
    head = min(fitting, key=lambda h: h not in first)
    return _classes(transformers, head, type(config))[0]


def _favoured(config: Any) -> tuple[Head, ...]:
    if config.is_encoder_decoder:
        return (_SEQ2SEQ, _SPEECH)
    return () if getattr(config, "is_decoder", False) else (_MASKED,)


def _asked_class(transformers: Any, name: str) -> Any:
    cls = getattr(transformers, name, None)
    if not _is_model(cls):
        near = _nearest(name, [n for n in dir(transformers) if "For" in n or n.endswith("Model")], "class=")
        raise BadOption(
            f"transformers has no model class {name!r}", next_step=near or "class=LlamaForCausalLM"
        )
    return cls


def _is_model(cls: Any) -> bool:
    return inspect.isclass(cls) and issubclass(cls, nn.Module) and hasattr(cls, "_from_config")


def _classes(transformers: Any, head: Head, config: Any) -> tuple[Any, ...]:
    """Returns the model classes that an Auto class has for a config class."""
    classes = getattr(transformers, head.auto)._model_mapping.get(config, ())
    return classes if isinstance(classes, tuple) else (classes,)


def _nearest(name: str, names: list[str], prefix: str = "transformers:") -> str:
    return " or ".join(prefix + match for match in get_close_matches(name, names, n=3))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
