"""Puts off Python's search for garbage in cycles while many objects are made that stay.

Python looks at all objects again whenever a quarter more of them have survived. A process that has imported
torch and a model's library has a million, so that a search takes a third of a second, and a recording or an
import, which make hundreds of thousands that stay, would wait for it in their middle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within the block nothing is freed but what nobody refers to; the search is as it was behind it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
