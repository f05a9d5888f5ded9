"""Takes wheels that a device machine lacks there in parts: it reaches no registry, and a call carries little.

    python benchmarks/device_queue/wheels.py pack .parts             here: .parts/1, .parts/2 ... (not in git)
    python benchmarks/device_queue/wheels.py keep .parts/1 /tmp/w     there, one call for each part
    python benchmarks/device_queue/wheels.py unpack /tmp/w /tmp/site  there, behind the last part

`wheels.json` lists the wheels with their sizes and sha256, which `unpack` insists on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
PART_BYTES: Final = 44_000_000
"""Besides the working tree, which takes 14 MB of the 64 MiB of one call."""


def wheels() -> list[dict[str, Any]]:
    """Returns the rows of wheels.json."""
    return json.loads((HERE / "wheels.json").read_text())


def pack(folder: Path) -> None:
    """Downloads the wheels and writes their bytes, one behind the other, into numbered parts."""
    with TemporaryDirectory() as name:
        for wheel in wheels():
            wanted = f"{wheel['name']}=={wheel['version']}"
            how = ["--no-deps", "--only-binary=:all:", "--platform", wheel["platform"], "-d", name]
            subprocess.run([sys.executable, "-m", "pip", "-q", "download", *how, wanted], check=True)
        data = b"".join(_checked(wheel, (Path(name) / wheel["file"]).read_bytes()) for wheel in wheels())
    for number, first in enumerate(range(0, len(data), PART_BYTES), start=1):
        part = folder / str(number)
        part.mkdir(parents=True, exist_ok=True)
        (part / f"{number:03}.part").write_bytes(data[first : first + PART_BYTES])
        print(f"{part}: {len(data[first : first + PART_BYTES])} bytes")


def keep(part: Path, folder: Path) -> None:
    """Copies a part to where it stays while the machine is held."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.glob("*.part"):
        shutil.copy(file, folder)


def unpack(folder: Path, site: Path) -> None:
    """Unpacks the wheels of all parts into a folder for PYTHONPATH. Raises SystemExit for damaged bytes."""
    data, first = b"".join(file.read_bytes() for file in sorted(folder.glob("*.part"))), 0
    for wheel in wheels():
        file = folder / wheel["file"]
        file.write_bytes(_checked(wheel, data[first : first + wheel["size_bytes"]]))
        first += wheel["size_bytes"]
        with zipfile.ZipFile(file) as archive:
            archive.extractall(site)
    libraries = ":".join(map(str, sorted(site.glob("nvidia/*/lib/*.so*"))))
    print(f"export PYTHONPATH={site} LD_PRELOAD={libraries}")


def _checked(wheel: dict[str, Any], data: bytes) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if len(data) != wheel["size_bytes"] or found != wheel["sha256"]:
        sys.exit(f"{wheel['file']}: {len(data)} bytes, sha256 {found}; wheels.json says otherwise")
    return data


if __name__ == "__main__":
    {"pack": pack, "keep": keep, "unpack": unpack}[sys.argv[1]](*map(Path, sys.argv[2:]))
