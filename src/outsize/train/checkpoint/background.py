"""Writes a checkpoint, in the step or beside it.

    step 100   copied to the host, so that the run goes on      a thread writes, and rank 0 publishes
    step 200   waits where the last one is still being written, so that memory does not grow

The thread's facts travel in a process group of its own: collectives of two threads in one group would meet
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from outsize.device.accelerators import CPU
from outsize.run.checkpoint.chunk import Chunk
from outsize.run.checkpoint.manifest import PartFacts
from outsize.run.checkpoint.overwrite import MappedWriter
from outsize.run.checkpoint.write import abandon, publish, write_part
from outsize.run.progress import SAVER
from outsize.train.checkpoint.agreement import shared_facts
from outsize.train.checkpoint.progress import SaveProgress, shown


@final
@dataclass(frozen=True, slots=True)
class WrittenSave:
    """One checkpoint as a rank writes it: its folder, and what rank 0 publishes it with.

    `mapped` writes it where it is a copy in memory.
    """

    folder: Path
    rank: int
    values: dict[str, Any]
    keep: int | None
    mapped: MappedWriter | None = None

    def write(
        self,
        chunks: Sequence[Chunk],
        group: dist.ProcessGroup | None,
        written_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Writes this rank's chunks; when all ranks have, rank 0 publishes the folder. Raises NotSaved."""

        def part() -> str:
            if self.mapped is not None:
                return self.mapped.write_part(self.folder, self.rank, chunks)
            return write_part(self.folder, self.rank, chunks, written_bytes=written_bytes).to_json()

        try:
            texts = shared_facts(group, part)
        except BaseException:
            if self.rank == 0:
                abandon(self.folder)
            raise

        def finish() -> None:
            if self.rank == 0 and self.mapped is not None:
                self.mapped.publish(self.folder, texts, self.values)
            elif self.rank == 0:
                parts = [PartFacts.model_validate_json(text) for text in texts]
                publish(self.folder, parts, self.values, self.keep)

        shared_facts(group, finish)


@final
class BackgroundSaves:
    """Writes checkpoints in a thread, one at a time."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None
        self._last: Future[None] | None = None
        self.progress: SaveProgress | None = None
        self.tell: Callable[[SaveProgress], None] = shown

    def write(self, save: WrittenSave, chunks: Sequence[Chunk], group: dist.ProcessGroup | None) -> None:
        """Copies the chunks to the host and lets the thread write them; all ranks call this together."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, SAVER)
            if group is not None:
                ranks = dist.get_process_group_ranks(group)
                own: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
                self._group = own
        copies = [replace(chunk, tensor=chunk.tensor.detach().to(CPU, copy=True)) for chunk in chunks]
        total_bytes = sum(chunk.tensor.nbytes for chunk in copies)
        tell = self.tell if save.rank == 0 else _nothing
        self.progress = SaveProgress(save.folder, save.values["steps"], total_bytes, tell)
        self._last = self._pool.submit(_written, save, copies, self._group, self.progress)

    def tell_by(self, tell: Callable[[SaveProgress], None]) -> None:
        """Takes what is called with the progress of a save."""
        self.tell = tell

    def finish(self) -> None:
        """Waits for the save that is being written; raises what it raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


def _nothing(_: SaveProgress) -> None:
    """Says nothing: rank 0 does."""


def _written(
    save: WrittenSave, chunks: Sequence[Chunk], group: dist.ProcessGroup | None, progress: SaveProgress
) -> None:
    """Writes a checkpoint, and says how far it is."""
    progress.add(0)
    try:
        save.write(chunks, group, progress.add)
    except BaseException:
        progress.end(failed=True)
        raise
    progress.end()
