"""Question: does a run that goes on by `engine.state.batches` take the samples that it would have taken?

    python benchmarks/ecosystem/loaders/run.py [NAME ...]     # writes results/loaders.json

Each loader is iterated by a run that nobody interrupts, which saves itself within the first pass, at the last
batch of that pass, behind it, and within the second one. From each save another process goes on, built by the
same script, and must get the same batches (the numbers of samples, and what is drawn for them) until step 16.
Every process has other states of Python's and NumPy's generators, as one that is started anew has.

The packages (`pip install datasets webdataset litdata mosaicml-streaming torchdata`) are those of the
results; a loader of a package that is not there is "not tried".
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    random_split,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import outsize
from outsize.capture.models.load import import_torchvision
from outsize.train.checkpoint.loop.loader_states import LoaderNote

RESULTS: Final = Path(__file__).parent / "results" / "loaders.json"
PACKAGES: Final = ("torch", "torchdata", "datasets", "webdataset", "litdata", "mosaicml-streaming")
SAMPLES, BATCH, STEPS = 24, 4, 16
CUTS: Final = {"within a pass": 3, "at its last batch": 6, "between passes": -6, "in the second pass": 9}
NUMBERS: Final[Any] = list(range(SAMPLES))


class Augmented(Dataset[float]):
    """Draws a random number for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(()))


class Shuffled(IterableDataset[int]):
    """Is shuffled by Python's generator, or by one that nobody can set."""

    def __init__(self, draw: Callable[[list[int]], None] = random.shuffle) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        order = list(NUMBERS)
        self.draw(order)
        yield from order


class Stream(IterableDataset[int]):
    """Has a state, as torchdata's StatefulDataLoader asks for."""

    def __init__(self) -> None:
        self.first = self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"] % SAMPLES

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        for number in range(first, SAMPLES):
            self.at = number + 1
            yield number


def _hugging_face(streamed: bool, seed: int | None = 0) -> Any:
    datasets: Any = import_module("datasets")

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"x": NUMBERS})
    if not streamed:
        return data.with_format("torch")
    return data.to_iterable_dataset(num_shards=2).shuffle(seed=seed, buffer_size=8)


def _webdataset(folder: Path) -> Any:
    webdataset: Any = import_module("webdataset")

    with webdataset.TarWriter(str(folder / "a.tar")) as tar:
        for number in NUMBERS:
            tar.write({"__key__": f"{number:04}", "x.txt": str(number)})
    data = webdataset.WebDataset(str(folder / "a.tar"), shardshuffle=False).shuffle(8).decode()
    return data.map(lambda sample: int(sample["x.txt"])).batched(BATCH, collation_fn=list)


def _mosaic(folder: Path) -> Any:
    import_torchvision()  # which it imports, and which may be built for another torch
    streaming: Any = import_module("streaming")

    if not (folder / "mds").exists():
        with streaming.MDSWriter(out=str(folder / "mds"), columns={"x": "int"}) as writer:
            for number in NUMBERS:
                writer.write({"x": number})
    data = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    return streaming.StreamingDataLoader(data, batch_size=BATCH)


def _litdata(folder: Path) -> Any:
    litdata: Any = import_module("litdata")

    if not (folder / "lit" / "index.json").exists():
        writer_kind: Any = import_module("litdata.streaming.writer").BinaryWriter
        (folder / "lit").mkdir(exist_ok=True)
        writer = writer_kind(str(folder / "lit"), chunk_size=8)
        for number in NUMBERS:
            writer[number] = {"x": number}
        writer.done()
        writer.merge()
    data = litdata.StreamingDataset(str(folder / "lit"), shuffle=True, drop_last=False)
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=1)


def _nodes() -> Any:
    from torchdata import nodes

    node = nodes.MapStyleWrapper(map_dataset=NUMBERS, sampler=RandomSampler(NUMBERS))
    return nodes.Loader(nodes.Batcher(node, BATCH, drop_last=False))


def _loader(data: Any = NUMBERS, **how: Any) -> Any:
    return DataLoader(data, batch_size=BATCH, **how)


def _stateful(data: Any = NUMBERS, **how: Any) -> Any:
    return StatefulDataLoader(data, batch_size=BATCH, **how)


Make = Callable[[Any, Path], Any]
LOADERS: Final[dict[str, Make]] = {
    "DataLoader(shuffle=True)": lambda _, __: _loader(shuffle=True),
    "DataLoader(num_workers=2)": lambda _, __: _loader(Augmented(), shuffle=True, num_workers=2),
    "DataLoader(persistent_workers=True)": lambda _, __: _loader(
        shuffle=True, num_workers=2, persistent_workers=True
    ),
    "DataLoader(persistent_workers=True), augmented": lambda _, __: _loader(
        Augmented(), shuffle=True, num_workers=2, persistent_workers=True
    ),
    "DataLoader(generator=)": lambda _, __: _loader(shuffle=True, generator=torch.Generator()),
    "DataLoader(sampler=WeightedRandomSampler)": lambda _, __: _loader(
        sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    ),
    "DataLoader(batch_sampler=)": lambda _, __: DataLoader(
        Augmented(), batch_sampler=BatchSampler(RandomSampler(NUMBERS), BATCH, drop_last=False)
    ),
    "DataLoader(sampler=DistributedSampler)": lambda _, __: _loader(
        NUMBERS * 2, sampler=DistributedSampler(NUMBERS * 2, num_replicas=2, rank=1)
    ),
    "DataLoader(batch_sampler=engine.batch_sampler)": lambda engine, _: DataLoader(
        Augmented(), batch_sampler=engine.batch_sampler(NUMBERS, shuffle=True)
    ),
    "DataLoader over random_split": lambda _, __: _loader(
        random_split(NUMBERS * 2, [24, 24])[0], shuffle=True
    ),
    "DataLoader over an IterableDataset": lambda _, __: _loader(Shuffled()),
    "DataLoader over a stream that nobody can seed": lambda _, __: _loader(
        Shuffled(random.SystemRandom().shuffle)
    ),
    "StatefulDataLoader": lambda _, __: _stateful(shuffle=True),
    "StatefulDataLoader, augmented": lambda _, __: _stateful(Augmented(), shuffle=True),
    "StatefulDataLoader(num_workers=2)": lambda _, __: _stateful(shuffle=True, num_workers=2),
    "StatefulDataLoader over a stream": lambda _, __: _stateful(Stream()),
    "torchdata.nodes.Loader": lambda _, __: _nodes(),
    "datasets.Dataset in DataLoader": lambda _, __: _loader(_hugging_face(False), shuffle=True),
    "datasets.IterableDataset in DataLoader": lambda _, __: _loader(_hugging_face(True)),
    "datasets.IterableDataset, no seed": lambda _, __: _loader(_hugging_face(True, None)),
    "datasets.IterableDataset in StatefulDataLoader": lambda _, __: _stateful(_hugging_face(True)),
    "webdataset.WebDataset, shuffled": lambda _, folder: _webdataset(folder),
    "streaming.StreamingDataLoader (mosaicml)": lambda _, folder: _mosaic(folder),
    "litdata.StreamingDataLoader": lambda _, folder: _litdata(folder),
}


def train(name: str, folder: Path, save: int | None, told: Any) -> None:
    """Trains in a process of its own, from a save or from the start, and sends batches and notes."""
    torch.set_num_threads(1)
    random.seed()
    np.random.seed()
    torch.manual_seed(3)
    batches_seen, x = list[Any](), torch.ones(4, 1)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        engine = engine_of(x, None if save is None else folder / str(save))
        made = LOADERS[name](engine, folder)
        batches = engine.state.batches(made)
        for epoch in range(batches.epoch, 9):
            holders: list[Any] = [getattr(made, "sampler", None), getattr(made, "batch_sampler", None)]
            for holder in holders:
                if hasattr(holder, "set_epoch"):
                    holder.set_epoch(epoch)
            for batch in batches:
                values = batch["x"] if isinstance(batch, dict) else batch
                batches_seen.append(torch.as_tensor(values).tolist())
                engine.step(x, target=x)
                if save is None and engine.steps in CUTS.values():
                    engine.save(folder / str(engine.steps))
                if engine.steps >= STEPS:
                    break
            if save is None and -engine.steps in CUTS.values():
                engine.save(folder / str(-engine.steps))
            if engine.steps >= STEPS:
                break
    said = [str(note.message) for note in notes if issubclass(note.category, LoaderNote)]
    told.send((batches_seen, said))
    told.close()
    sys.stdout.flush()
    os._exit(0)


def engine_of(x: torch.Tensor, resume: Path | None) -> Any:
    """Returns an engine of the smallest model."""
    how: dict[str, Any] = {"target": x, "loss_fn": nn.functional.mse_loss, "stages": 1, "microbatches": 1}
    make = partial(torch.optim.SGD, lr=0.1)
    return outsize.parallelize(nn.Linear(1, 1), (x,), optimizer=make, resume=resume, **how)


def in_a_process(name: str, folder: Path, save: int | None) -> tuple[list[Any], list[str]]:
    """Returns the batches of a run, and what it was told; raises EOFError where the process ended early."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(name, folder, save, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(120):
            raise EOFError
        return receiver.recv()
    finally:
        process.kill()
        process.join()


def outcomes(name: str) -> dict[str, str]:
    """Returns for each cut whether the rest of the run has the batches of one that nobody interrupts."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        try:
            LOADERS[name](None, folder) if "engine" not in name else None
        except (ImportError, OSError) as error:
            return dict.fromkeys(CUTS, f"not tried: {error}")
        whole, said = in_a_process(name, folder, None)
        found: dict[str, str] = {}
        for cut, save in CUTS.items():
            expected = whole[abs(save) :]
            rest, _ = in_a_process(name, folder, save)
            if rest == expected:
                found[cut] = "equal"
            elif said:
                found[cut] = f"refused: {said[0].partition('. Next')[0]}"
            else:
                first = next(
                    (i for i, pair in enumerate(zip(rest, expected, strict=False)) if pair[0] != pair[1]), 0
                )
                found[cut] = f"wrong: other samples from step {abs(save) + first + 1}"
        return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main(names: list[str]) -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        engine_of(torch.ones(4, 1), None).save(folder)  # Processes that are forked later need not import.
    for name in names or LOADERS:
        try:
            rows[name] = outcomes(name)
        except EOFError:
            rows[name] = dict.fromkeys(CUTS, "wrong: the run ended early, or hung")
        print(f"{name:50} {json.dumps(rows[name])}", flush=True)
    document = {
        "question": "Does a run that goes on by engine.state.batches take the samples that it would "
        "have taken?",
        "versions": {package: _version(package) for package in PACKAGES},
        "loaders": rows,
    }
    if not names:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
