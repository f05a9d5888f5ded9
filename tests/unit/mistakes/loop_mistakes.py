"""Loops that are wrong: how a batch is handed over, what is done with a loss, other libraries' calls."""

from __future__ import annotations

import copy
import errno
import pickle
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from mistake import Mistake, X, Y, engine, mlp
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from outsize.run.weights.save import ShardWriter


def step(*args: Any, **kwargs: Any) -> Any:
    """Takes a step of a new engine."""
    return engine().step(*args, **kwargs)


def _loss() -> torch.Tensor:
    return step(X, target=Y).loss


def _without_gradients() -> None:
    with torch.no_grad():
        step(X, target=Y)


def _on_a_full_disk() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with tempfile.TemporaryDirectory() as folder, patch.object(ShardWriter, "write", side_effect=full):
        engine().weights.full_state_dict(to=Path(folder) / "weights")


def _missing(name: str) -> None:
    getattr(engine(), name)()


_CALLED = "engine.step() has run the backward"
LOOP_MISTAKES = {
    "step(x, y)": Mistake(lambda: step(X, Y), "the model rejects", "engine.step(x, target=y)"),
    "step(x, labels=y)": Mistake(
        lambda: step(X, labels=Y), "unexpected keyword argument 'labels'", "engine.step(x, target=labels)"
    ),
    "step(dict)": Mistake(
        lambda: step({"x": X, "label": Y}), "rejects", "engine.step(batch['x'], target=batch['label'])"
    ),
    "step(dict of the arguments)": Mistake(
        lambda: step({"input": X}), "rejects the example batch", "engine.step(**batch)"
    ),
    "step((x, y))": Mistake(
        lambda: step((X, Y)), "rejects the example batch", "x, y = batch; engine.step(x, target=y)"
    ),
    "step([x, y])": Mistake(
        lambda: step([X, Y]), "rejects the example batch", "x, y = batch; engine.step(x, target=y)"
    ),
    "step(x) without a target": Mistake(
        lambda: step(X), "the loss function rejects", "engine.step(x, target=y), with a target"
    ),
    "evaluate(dict)": Mistake(
        lambda: engine().evaluate({"x": X}), "the model rejects", "engine.step(batch['x'])"
    ),
    "a text for a batch": Mistake(lambda: step("hello", target=Y), "not str", "check the shapes"),
    "an array for a batch": Mistake(
        lambda: step(np.ones((8, 8), dtype=np.float32), target=Y), "NumPy array", "torch.as_tensor(array)"
    ),
    "a target that is too short": Mistake(
        lambda: step(X, target=Y[:4]), "another number of samples", "pass a target for each sample"
    ),
    "an empty batch": Mistake(lambda: step(X[:0], target=Y[:0]), "no sample", "tensors"),
    "a batch of another width": Mistake(lambda: step(X[:, :3], target=Y), "rejects", "check the shapes"),
    "a closure": Mistake(lambda: step(lambda: 0.0), "but a function", "engine.step(x, target=y)"),
    "a loss_scale of text": Mistake(
        lambda: step(X, target=Y, loss_scale="a"), "loss_scale='a' is a str", "loss_scale=1 / 4"
    ),
    "gather='all'": Mistake(
        lambda: step(X, target=Y, gather="all"), "gather='all' says nothing", "gather=True"
    ),
    "loss.backward()": Mistake(lambda: _loss().backward(), _CALLED, "delete .backward()"),
    "(loss / 4).backward()": Mistake(lambda: (_loss() / 4).backward(), _CALLED, "loss_scale=1 / 4"),
    "scaler.scale(loss).backward()": Mistake(
        lambda: torch.amp.GradScaler("cpu").scale(_loss()).backward(), _CALLED, "delete .backward()"
    ),
    "a backward of the mean of losses": Mistake(
        lambda: torch.stack([_loss(), _loss()]).mean().backward(), _CALLED, "delete .backward()"
    ),
    "a backward of an evaluation": Mistake(
        lambda: (2 * engine().evaluate(X, target=Y).loss).backward(), "nothing for a backward", "engine.step"
    ),
    "a step under no_grad": Mistake(_without_gradients, "torch.no_grad()", "engine.evaluate"),
    "engine(x)": Mistake(lambda: engine()(X), "not called like a module", "engine.step(x, target=y)"),
    "engine.backward(loss)": Mistake(lambda: _missing("backward"), "has no `backward`", "engine.step"),
    "engine.zero_grad()": Mistake(lambda: _missing("zero_grad"), "has no `zero_grad`", "engine.step"),
    "engine.parameters()": Mistake(lambda: _missing("parameters"), "has no", "engine.weights.parameters()"),
    "engine.state_dict()": Mistake(lambda: _missing("state_dict"), "has no", "weights.full_state_dict()"),
    "engine.eval()": Mistake(lambda: _missing("eval"), "has no `eval`", "engine.evaluate(x)"),
    "engine.to('cuda')": Mistake(lambda: _missing("to"), "has no `to`", "the plan's devices"),
    "engine.generate of a plain model": Mistake(
        lambda: engine().generate(X), "Sequential has no generate()", "engine.evaluate"
    ),
    "an interval in epochs": Mistake(
        lambda: engine().state.checkpoint("run", every="1 epoch"), "every '1 epoch' is no", "500 (steps)"
    ),
    "an object without a state": Mistake(
        lambda: engine().state.attach(step=3), "step is a int, whose state cannot be saved", "state_dict()"
    ),
    "an object without a name": Mistake(
        lambda: engine().state.attach(3), "a name for each object", "engine.state.attach(scheduler=scheduler)"
    ),
    "a class of a scheduler": Mistake(
        lambda: engine().state.attach(scheduler=lr_scheduler.StepLR), "cannot be saved", "state_dict()"
    ),
    "save(None)": Mistake(lambda: engine().save(None), "no path", "engine.save('run')"),  # pyright: ignore
    "save('')": Mistake(lambda: engine().save(""), "root='' is empty", "engine.save('run')"),
    "save(a state)": Mistake(
        lambda: engine().save(engine().model.state_dict()), "no path", "engine.save('run')"  # pyright: ignore
    ),
    "save(keep='all')": Mistake(
        lambda: engine().save("run", keep="all"), "keep='all' makes no sense", "None for all"  # pyright: ignore
    ),
    "save(keep=True)": Mistake(
        lambda: engine().save("run", keep=True), "keep=True makes no sense", "None for all"
    ),
    "checkpoint(None)": Mistake(
        lambda: engine().state.checkpoint(None), "no path", "engine.state.checkpoint('run', every=500)"  # pyright: ignore
    ),
    "resume(a number)": Mistake(
        lambda: engine().state.resume(7), "root=7 is a int, no path", "engine.state.resume('run')"  # pyright: ignore
    ),
    "load_weights(a state)": Mistake(
        lambda: engine().weights.load({}), "reads files", "load_state_dict(state, strict=False)"  # pyright: ignore
    ),
    "weights to a number": Mistake(
        lambda: engine().weights.full_state_dict(3), "to=3 is a int, no path", "to='model'"  # pyright: ignore
    ),
    "shard_bytes='5GB'": Mistake(
        lambda: engine().weights.full_state_dict("w", shard_bytes="5GB"),  # pyright: ignore
        "shard_bytes='5GB' makes no sense", "in bytes"
    ),
    "step(update=None)": Mistake(
        lambda: step(X, target=Y, update=None), "update=None says nothing", "update=True, or False"
    ),
    "a loss_scale that is NaN": Mistake(
        lambda: step(X, target=Y, loss_scale=float("nan")), "scales no loss", "loss_scale=1 / 4"
    ),
    "evaluate(x).logits": Mistake(
        lambda: engine().evaluate(X).logits, "an evaluation has no `logits`", "result.outputs[0]"  # pyright: ignore
    ),
    "evaluate(x)[0]": Mistake(
        lambda: engine().evaluate(X)[0], "an evaluation has no item 0", "result.outputs[0]"  # pyright: ignore
    ),
    "float(evaluate(x))": Mistake(
        lambda: float(engine().evaluate(X)), "an evaluation is no number", "result.loss"  # pyright: ignore
    ),
    "loss, logits = evaluate(x)": Mistake(
        lambda: dict([engine().evaluate(X)]), "one object, not several", "result.outputs"  # pyright: ignore
    ),
    "evaluate(gather='all')": Mistake(
        lambda: engine().evaluate(X, gather="all"), "gather='all' says nothing", "gather=True"  # pyright: ignore
    ),
    "step(loader)": Mistake(
        lambda: step(DataLoader(TensorDataset(X, Y), 8)), "rejects the example batch",
        "for x, y in engine.state.batches(loader): engine.step(x, target=y)",
    ),
    "clip_grad_norm(parameters, 1.0)": Mistake(
        lambda: engine().clip_grad_norm(mlp().parameters(), 1.0),  # pyright: ignore
        "no norm that gradients can have", "engine.clip_grad_norm(1.0)"
    ),
    "clip_grad_norm(-1)": Mistake(
        lambda: engine().clip_grad_norm(-1), "max_norm=-1 is no norm", "engine.clip_grad_norm(1.0)"
    ),
    "clip_grad_norm of a name": Mistake(
        lambda: engine().clip_grad_norm(1.0, "0.weight"), "no list of names", "model.named_parameters()"
    ),
    "clip_grad_norm of unknown names": Mistake(
        lambda: engine().clip_grad_norm(1.0, ["head"]), "names has 'head'", "model.named_parameters()"
    ),
    "torch.save(engine)": Mistake(
        lambda: pickle.dumps(engine()), "neither copied nor pickled", "engine.save('run')"
    ),
    "a copy of an engine": Mistake(
        lambda: copy.deepcopy(engine()), "neither copied nor pickled", "engine.weights.full_state_dict()"
    ),
    "engine.save_checkpoint()": Mistake(
        lambda: _missing("save_checkpoint"), "has no `save_checkpoint`", "engine.save('run')"
    ),
    "engine.load_checkpoint()": Mistake(lambda: _missing("load_checkpoint"), "has no", "resume='run'"),
    "engine.train_batch()": Mistake(lambda: _missing("train_batch"), "has no", "engine.step(x, target=y)"),
    "engine.clip_grad_norm_()": Mistake(lambda: _missing("clip_grad_norm_"), "has no", "clip_norm=1.0"),
    "engine.no_sync()": Mistake(lambda: _missing("no_sync"), "has no `no_sync`", "update=False"),
    "engine.fit()": Mistake(lambda: _missing("fit"), "has no `fit`", "engine.state.batches(loader)"),
    "engine.local_rank": Mistake(lambda: _missing("local_rank"), "has no `local_rank`", "engine.rank"),
    "engine.get_lr()": Mistake(lambda: _missing("get_lr"), "has no", "engine.optimizer.param_groups"),
    "result.backward()": Mistake(
        lambda: step(X, target=Y).backward(), "has no `backward`", "has run the backward"
    ),
    "result.item()": Mistake(lambda: step(X, target=Y).item(), "has no `item`", "result.loss"),
    "result.logits": Mistake(lambda: step(X, target=Y).logits, "has no `logits`", "gather='outputs'"),
    "float(result)": Mistake(
        lambda: float(step(X, target=Y)), "is no number", "result.loss"  # pyright: ignore
    ),
    "result['loss']": Mistake(
        lambda: step(X, target=Y)["loss"], "has no item 'loss'", "result.loss"  # pyright: ignore
    ),
    "loss, outputs = engine.step()": Mistake(
        lambda: dict([step(X, target=Y)]), "one object, not several", "result.loss"  # pyright: ignore
    ),
    "engine.load()": Mistake(lambda: _missing("load"), "has no `load`", "resume='run'"),
    "engine.lr = 0.1": Mistake(
        lambda: setattr(engine(), "lr", 0.1), "no step reads engine.lr", "engine.optimizer.param_groups"
    ),
    "engine.optimizer = other": Mistake(
        lambda: setattr(engine(), "optimizer", torch.optim.SGD(mlp().parameters())),
        "exchanged for another SGD", "parallelize(optimizer=",
    ),
    "batches(dataset)": Mistake(
        lambda: engine().state.batches(TensorDataset(X, Y)), "gives samples, not", "DataLoader(dataset"
    ),
    "a number for a loader": Mistake(
        lambda: engine().state.batches(3), "a int gives no batches", "engine.state.batches(DataLoader"  # pyright: ignore
    ),
    "weights to a file's name": Mistake(
        lambda: engine().weights.full_state_dict(to="model.pt"), "model.pt is a file's name", "to='model'"
    ),
    "weights to a full disk": Mistake(
        _on_a_full_disk, "weights could not be written; OSError: No space left on device", "df -h"
    ),
}  # fmt: skip
