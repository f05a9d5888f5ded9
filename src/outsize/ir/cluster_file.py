"""Reads a cluster from JSON of the Cluster record, of which a person may leave out what tables contain.

    {"devices": ["a100-40gb", {"kind": "rtx3090", "memory_bytes": 12000000000}], "inner": "pcie4"}

A device may be the name of a kind, or an object: what it leaves out is taken from the table's row of its
`kind`. A link may be the name of a kind of link. Without `devices_per_node` all devices are in one node;
`inner` and `outer` default to what the first device's kind is sold with, and `name` to the file's path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outsize.errors import BadOption, UnknownDevice
from outsize.files.strict_json import BadJson, parse, read_text
from outsize.ir.cluster import KINDS, KNOWN, Cluster
from outsize.ir.hardware.devices import TABLE, DeviceKind, kind_named
from outsize.ir.hardware.links import LINKS, NETWORKS

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.+-]+")
_REQUIRED = ("memory_bytes", "flops_per_s", "bytes_per_s", "source")
_EXAMPLE = '{"devices": ["a100-40gb", "a100-40gb"], "inner": "nvlink3", "outer": "ib200"}'


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file.

    Raises BadOption that names the wrong field, and UnknownDevice for a kind that is not in the table and
    lacks some of its figures.
    """
    try:
        return Cluster.of_document(_filled(parse(read_text(path)), path))
    except (OSError, BadJson) as error:
        raise _no_cluster(path, str(error)) from None


def _filled(document: Any, path: str | Path) -> dict[str, Any]:
    """Returns the record's JSON, with the defaults of what the file leaves out.

    A report that contains a cluster (`outsize doctor --gpu --out`, `measure --links --json`) stands for it.
    """
    if isinstance(document, dict) and isinstance(document.get("cluster"), dict):
        document = document["cluster"]
    if isinstance(document, dict) and "results" in document and "devices" not in document:
        raise BadOption(
            f"{path}: this report has no rates of its devices",
            numbers="the check named rates failed, or did not run",
            next_step=f"outsize doctor --gpu --only rates,links --width 32 --out {path}",
        )
    devices = document.get("devices") if isinstance(document, dict) else None
    if not isinstance(devices, list) or not devices:
        raise _no_cluster(path, "devices: a list of at least one device is missing")
    full = [_device(each, rank, path) for rank, each in enumerate(devices)]
    first = TABLE.get(full[0]["kind"], TABLE["cpu"])
    filled = {
        "name": str(path),
        "devices_per_node": len(full),
        "inner": first.inner,
        "outer": first.network,
        **document,
        "devices": full,
    }
    filled["inner"] = _link(filled["inner"], "inner", path)
    filled["outer"] = _link(filled["outer"], "outer", path)
    if isinstance(filled.get("parts"), list):
        filled["parts"] = [_part(part, path) for part in filled["parts"]]
    return filled


def _device(entry: Any, rank: int, path: str | Path) -> dict[str, Any]:
    fields = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise _no_cluster(path, f"devices.{rank}: a kind such as {KINDS[-1]!r} is missing")
    kind = kind_named(fields["kind"])
    if kind is None:
        missing = [field for field in _REQUIRED if field not in fields]
        if missing:
            raise _unknown(fields["kind"], rank, missing[0], path)
        return {"name": f"{re.sub(_NOT_IN_NAMES, '-', fields['kind'])}:{rank}", **fields}
    return {**_row(kind, rank), **fields, "kind": kind.name}


def _row(kind: DeviceKind, rank: int) -> dict[str, Any]:
    return kind.device(f"{kind.torch_device}:{rank}").model_dump()


def _part(part: Any, path: str | Path) -> Any:
    if not isinstance(part, dict) or "inner" not in part:
        return part
    return {**part, "inner": _link(part["inner"], "parts.inner", path)}


def _link(entry: Any, field: str, path: str | Path) -> Any:
    """Returns the record of a link that is given by name; the record itself validates anything else."""
    if not isinstance(entry, str):
        return entry
    known = {**LINKS, **NETWORKS}
    if entry not in known:
        raise _no_cluster(path, f"{field}: {entry!r} is none of {', '.join(known)}")
    return known[entry].model_dump()


def _no_cluster(path: str | Path, numbers: str) -> BadOption:
    return BadOption(f"{path} is no cluster", numbers=numbers, next_step=f"a file such as {_EXAMPLE}")


def _unknown(kind: str, rank: int, missing: str, path: str | Path) -> UnknownDevice:
    return UnknownDevice(
        f"{path}: devices.{rank} is a {kind!r}, which is not known",
        numbers=f"known devices: {', '.join(KNOWN)}",
        next_step=f"take one of them, or give all its figures; {missing} is missing",
    )
