"""Explains derived styles as data: a style and a reason per module, and the sizes that ranks must divide.

The plan that a transformers model ships is compared with what was derived, and never followed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from outsize.ir.units.tensor_styles import DivisibleSize, ModuleStyle, Style, TensorStyles
from outsize.program.sharding.stored_weight import stored_weights
from outsize.program.sharding.tensor_parallel.calls import ByHeads
from outsize.program.sharding.tensor_parallel.styles import Derived
from outsize.program.tape import Tape

_KNOWN_HINTS: Mapping[str, Style] = {
    "colwise": "column", "rowwise": "row", "colwise_gather_output": "column", "colwise_rep": "column",
    "packed_colwise": "column", "packed_rowwise": "row", "embedding_rowwise": "vocabulary",
    "rowwise_rep": "row", "colwise_allreduce_output": "column",
}  # fmt: skip


def explain(tape: Tape, model: nn.Module, derived: Derived) -> TensorStyles:
    """Returns the styles of all modules that hold parameters, in the order of the model."""
    modules = tuple(_modules(model, derived))
    divided = _divided(tape, model, derived)
    styles: dict[str, Style] = {m.module: m.style for m in modules}
    return TensorStyles(modules=modules, divided=divided, hints=tuple(_hints(model, styles)))


def _modules(model: nn.Module, derived: Derived) -> Iterator[ModuleStyle]:
    added = _added_up_by(derived)
    canonical = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    canonical |= {id(p): name for name, p in model.named_parameters()}
    for fqn, module in model.named_modules():
        names = [canonical[id(p)] for p in module._parameters.values() if p is not None]
        if not names:
            continue
        role = next((derived.roles[n] for n in names if n in derived.roles), None)
        name = next((n for n in names if n in derived.roles), names[0])
        if role is None:
            why = next((derived.reasons[n] for n in names if n in derived.reasons), "")
            why = why or f"{type(module).__name__} is no product of a divided pair"
            style: Style = "whole"
        elif isinstance(module, nn.Embedding):
            style, why = "vocabulary", f"{role.share.size} rows; what ranks look up is added up"
        elif name in derived.heads or role.kind == "vocabulary":
            style, why = "column", f"{role.share.size} classes of the vocabulary"
        elif role.kind == "heads":
            style, why = "heads", "a rank has some of its heads"
        elif role.kind == "experts":
            style, why = "experts", "a rank has a part of each expert; what they give is added up (tried out)"
        elif role.kind == "row":
            style, why = "row", f"adds up {_names(derived.feeds[name])}"
        else:
            style, why = "column", _why_column(role.share.parts, added.get(name, set()))
        yield ModuleStyle(module=fqn, style=style, why=why)


def _added_up_by(derived: Derived) -> dict[str, set[str]]:
    rows_of: dict[str, set[str]] = defaultdict(set)
    for row, columns in derived.feeds.items():
        for column in columns:
            rows_of[column].add(row)
    return rows_of


def _why_column(parts: tuple[int, ...], rows: set[str]) -> str:
    fused = f"{len(parts)} parts of {parts[0]}, " if len(parts) > 1 else ""
    return f"{fused}added up by {_names(rows)}"


def _names(weights: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(name.rpartition(".")[0] or name for name in weights)) or "nothing"


def _divided(tape: Tape, model: nn.Module, derived: Derived) -> tuple[DivisibleSize, ...]:
    """Returns the sizes of sharded dims that imply all others; a vocabulary may be sharded unevenly."""
    size_names: dict[int, str] = {}
    named, stored = _named_sizes(model), stored_weights(model)
    for step in derived.steps.values():
        if isinstance(step.call, ByHeads):
            size_names[step.call.heads.module.num_heads] = "num_heads"
    for name, role in derived.roles.items():
        if role.kind == "experts":
            size_names.setdefault(role.share.parts[0], named.get(role.share.parts[0]) or f"a size of {name}")
        if name in stored:
            least, last = stored[name].least_part(role.share.dim), name.rpartition(".")[0].rpartition(".")[2]
            what = f"blocks of {stored[name].stored.block} along {last}"
            for part in role.share.parts if least > 1 else ():
                size_names.setdefault(part // least, what)
    for slot, share in derived.shares.items():
        if share.origins <= derived.heads:
            continue  # The share is that of a vocabulary.
        place = tape.instructions[tape.producer[slot]].name
        for part in share.parts:
            size_names.setdefault(part, named.get(part) or f"a size of {place}")
    least = [
        size
        for size in sorted(size_names)
        if not any(size % other == 0 for other in size_names if other != size)
    ]
    return tuple(DivisibleSize(size=size, what=size_names[size]) for size in least)


def _named_sizes(model: nn.Module) -> dict[int, str]:
    """Maps sizes to their names in the configuration; the most specific name wins."""
    config: Any = getattr(model, "config", None)
    table = config.to_dict() if hasattr(config, "to_dict") else {}
    for module in reversed(list(model.modules())):
        table = {**table, **{k: v for k, v in vars(module).items() if not k.startswith("_")}}
    ranked = sorted(table.items(), key=lambda item: _rank(item[0]), reverse=True)
    return {v: k for k, v in ranked if type(v) is int and _rank(k) < len(_SPEAKING)}


_SPEAKING = (
    r"key_value_head|kv_head",
    r"heads|(^|_)n_head$|nhead",
    r"intermediate|inner|ffn|d_ff|mlp",
    r"hidden|embed|d_model",
    r"features",
)


def _rank(name: str) -> int:
    return next((n for n, pattern in enumerate(_SPEAKING) if re.search(pattern, name)), len(_SPEAKING))


def _hints(model: nn.Module, styles: Mapping[str, Style]) -> Iterator[str]:
    """Yields where the plan that the model ships differs from the derived one."""
    for pattern, hint in (getattr(model, "_tp_plan", None) or {}).items():
        wanted = _KNOWN_HINTS.get(hint)
        regex = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"\w+") + "$")
        others = sorted({styles[name] for name in styles if regex.match(name)} - {wanted})
        if wanted is not None and others:
            yield f"the model's own plan says {hint} for {pattern}; derived: {', '.join(others)}"
