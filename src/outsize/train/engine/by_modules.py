"""Runs a plan of form "modules": the plain loop, with every module called where its weights live.

    for part in microbatches:  output = model(part);  (loss(output) * weight).backward()

This loop runs on every rank under run/by_module/run.py; in one process it is the plain loop itself.
Generators are seeded once per microbatch, and the owner of a module that draws random numbers tells the other
ranks the generators' states after it.

In the same way the user's own code runs (`engine.by_modules`), and `generate` of transformers: blocks run on
the stage that owns them, one after the other, and each keeps its part of the cache; sampling, beams and
stopping are transformers' code on the same values. So every rank returns the tokens of one device.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.capture.fakes.untouched import untouched
from outsize.capture.graph.by_modules import module_graph
from outsize.capture.recording.fallbacks import find_loss
from outsize.errors import BadOption, NotCapturable, OutsizeError
from outsize.ir.plan import Plan
from outsize.ir.timeline import Lane
from outsize.program.replaying.modes import casting_devices, outside_autocast
from outsize.program.source_line import raising_line
from outsize.program.tree import map_leaves
from outsize.program.weights.of_loss import of_loss
from outsize.run.by_module import broadcast
from outsize.run.by_module.run import OwnedRun
from outsize.run.interpreter.trace import Marks
from outsize.run.stage.kept_casts import KeptCasts
from outsize.run.stage.rng import Seed, seeder
from outsize.run.stage.stage import zero_gradients
from outsize.run.stage.unchanged_weights import UnchangedWeights
from outsize.run.weights.placement import Placement, placement_of_modules
from outsize.train.batch.batch import Batch, evaluating_loss
from outsize.train.batch.checks import insist_on_gradient, insist_on_model, insist_on_values
from outsize.train.batch.loss_of_outputs import OutputLoss
from outsize.train.batch.loss_weights import ShareWarnings
from outsize.train.context.run_context import RunContext
from outsize.train.crew.crew import Crew
from outsize.train.crew.devices import insist_on_one_device
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.engine.executor import EvaluationGather, Executor
from outsize.train.ranks.divided_weights import DividedWeights, insist_on_whole
from outsize.train.ranks.replicas import Piece
from outsize.train.variants.results import BatchLoss, EvalResult


@final
class ByModules(Executor):
    """Runs the microbatches of one model in order, without overlap; in one process, the plain loop.

    Raises BadOption for a plan with recompute or deferred BatchNorm.
    """

    def __init__(self, run: RunContext, crew: Crew, ownership: Ownership) -> None:
        model, plan, options = run.model, run.plan, run.options
        recompute = {policy.name for policy in plan.activation_policies if not policy.keeps_all}
        if plan.bn == "deferred" or recompute:
            raise BadOption(
                "a model that runs by modules keeps its activations, and BatchNorm counts microbatches",
                numbers=f"the plan says recompute {', '.join(sorted(recompute)) or 'none'}, bn {plan.bn!r}",
                next_step="plan without them; torch.utils.checkpoint inside the model works",
            )
        self._model, self._plan, self._crew, self._ownership = model, plan, crew, ownership
        self._whole = run.whole
        self._loss_fn, self._seed = options.loss_fn, options.seed
        self._counts = OutputLoss(options.loss_fn, options.counting)
        self._shares = ShareWarnings(speaks=crew.global_rank == 0)
        self._grad_scale: Tensor | None = None
        self._unchanged = UnchangedWeights(model)
        self._kept = KeptCasts()
        self._kept.add("model", model.parameters)
        self._is_casting = False

    def prepare(self, parts: Sequence[Batch]) -> None:
        self._ownership.settle(self._placement)

    def train(
        self,
        parts: Sequence[Batch],
        scale: float,
        step: int,
        optimizer: Optimizer | None = None,
        grad_scale: Tensor | None = None,
        *,
        outputs: bool = False,
    ) -> BatchLoss:
        self._grad_scale = grad_scale
        loss, returned = self._run(parts, scale, step, keeps=outputs)
        assert loss is not None
        return replace(loss, outputs=self._everywhere(returned)) if outputs else loss

    def evaluate(self, parts: Sequence[Batch], step: int, *, gather: EvaluationGather = False) -> EvalResult:
        loss, outputs = self._run(parts, 1.0, step, keeps=gather != "losses")
        total, replicas = None if loss is None else loss.total, self._crew.replicas
        if gather == "losses":
            return EvalResult(total, None, self._losses(loss))
        if gather:
            return EvalResult(total, self._everywhere(outputs))
        if self._crew.rank < self._crew.world_size - 1:
            return EvalResult(total, None)
        first_outputs = replicas.on_first(outputs)
        return EvalResult(total, None if first_outputs is None else tuple(first_outputs))

    def _losses(self, loss: BatchLoss | None) -> tuple[Tensor, ...] | None:
        return None if loss is None else tuple(self._crew.by_microbatch(loss.own))

    def _everywhere(self, outputs: list[Any]) -> tuple[Any, ...]:
        """Returns the outputs of all replicas; every rank of one has run the model's own Python, and has
        them.
        """
        replicas = self._crew.replicas
        every = [outputs] if replicas.own_batches else replicas.of_all(outputs)
        return tuple(chain.from_iterable(every))

    def _placement(self) -> Placement:
        """Returns which stage owns which weight.

        Raises ModelMismatch and BadPlan for a plan of another model.
        """
        graph = module_graph(self._model)
        insist_on_model(self._plan, graph)
        if self._crew.world_size > 1:
            _insist_on_constant_loss(self._whole)
        return placement_of_modules(graph, self._plan.owners(graph), self._whole)

    def _run(
        self, parts: Sequence[Batch], scale: float, step: int, *, keeps: bool
    ) -> tuple[BatchLoss | None, list[Any]]:
        """Returns the loss of the batch and, if it `keeps` them, the outputs by microbatch, detached; with
        grad on, gradients (times `scale`) add up.
        """
        self._ownership.settle(self._placement)
        insist_on_values(self._ownership.used(), parts[0])
        self._crew.start_step()
        run, replicas, grad = self._ownership.own_run(), self._crew.replicas, torch.is_grad_enabled()
        pieces, _ = replicas.pieces(self._counts.by_samples(parts), frozenset())
        gradient_context = (
            untouched(self._model) if not grad else replicas.summing(self._ownership.trained_by_stage)
        )
        self._is_casting = bool(casting_devices())
        keeping = self._kept.step() if self._is_casting else nullcontext()
        with gradient_context, nullcontext() if run is None else run.active(), keeping:
            total, losses, outputs = self._loop(parts, pieces, scale, step, run, keeps)
        if grad:
            replicas.spread(self._ownership.own({name for name, _ in self._model.named_buffers()}))
        return None if total is None else BatchLoss(replicas.total(total), losses), outputs

    def _loop(
        self,
        parts: Sequence[Batch],
        pieces: Sequence[Piece],
        scale: float,
        step: int,
        run: OwnedRun | None,
        keeps: bool,
    ) -> tuple[Tensor | None, tuple[tuple[int, Tensor], ...], list[Any]]:
        total: Tensor | None = None
        losses, outputs, shares = [], [], list[float]()
        trained = [p for p in self._model.parameters() if p.requires_grad and torch.is_grad_enabled()]
        self._unchanged.begin(trained)
        for at, piece in enumerate(pieces):
            part, number = parts[piece.part].mapped(self._crew.here), piece.number
            with _rewording_errors(self._model, run):
                output, loss = self._forward(number, part, seeder(self._seed, step, number), run)
            if run is not None:
                run.insist_on_same("the loss", loss)
            share = (shares := shares or self._shares_of(output, parts, loss))[at]
            if torch.is_grad_enabled():
                self._backward(number, loss, share * scale, run)
                output = map_leaves(_detached, output) if keeps else None
            if piece.counts and keeps:
                outputs.append(output)
            if loss is not None:
                # A mean over nothing is NaN, and has no share.
                weighted = loss.detach() * share if piece.counts and share else torch.zeros_like(loss)
                total = weighted if total is None else total + weighted
                if piece.counts:
                    losses.append((number, loss.detach()))
        return total, tuple(losses), outputs

    def _shares_of(self, output: Any, parts: Sequence[Batch], loss: Tensor | None) -> list[float]:
        """Returns the shares of this replica's pieces in the loss, which the first output tells."""
        counted = self._counts.counted(output, parts)
        self._shares.warn(None if loss is None else self._counts.doubt)
        return [piece.share for piece in self._crew.replicas.pieces(counted, frozenset())[0]]

    def _forward(
        self, number: int, part: Batch, seed: Seed, run: OwnedRun | None
    ) -> tuple[Any, Tensor | None]:
        start = time.perf_counter()
        self._unchanged.insist()
        if self._is_casting:
            self._kept.begin_forward()
        seed(0)
        output = self._model(*part.args, **part.kwargs)
        loss_fn = self._loss_fn if torch.is_grad_enabled() else evaluating_loss(self._loss_fn, part)
        loss = find_loss(output) if loss_fn is None else loss_fn(output, *part.target)
        if self._is_casting:
            self._kept.end_forward(() if loss is None else (loss,))
        self._keep(f"F{number}", start, run)
        return output, loss

    def _backward(self, number: int, loss: Tensor | None, weight: float, run: OwnedRun | None) -> None:
        insist_on_gradient(loss)
        assert loss is not None
        start = time.perf_counter()
        share = nullcontext() if weight else zero_gradients(self._model.parameters())
        with outside_autocast(forgets=not self._kept.keeps), self._unchanged.looking(), share:
            weighted = loss * weight
            if self._grad_scale is not None:
                weighted = weighted * self._grad_scale.to(loss.device)
            weighted.backward()
        self._keep(f"B{number}", start, run)

    def _keep(self, action: str, start_s: float, run: OwnedRun | None) -> None:
        """Records what was computed since `start_s`, piece by piece between the waits for other ranks'
        modules.
        """
        rank, end_s = self._crew.rank, time.perf_counter()
        waits = [wait for wait in (run.take_waits() if run is not None else ()) if wait[0] >= start_s]
        ends = [wait[0] for wait in waits] + [end_s]
        times = [start_s, 0.0, ends[0]]
        for (asked_s, had_s), until_s in zip(waits, ends[1:], strict=True):
            times += [asked_s, had_s, until_s]
        name: tuple[str, Lane] = (f"{rank}{action}", "compute")
        self._crew.keep(rank, Marks([name] * len(ends), times))


def own_run(
    plan: Plan, crew: Crew, ownership: Ownership, tensor: DividedWeights | None, what: str
) -> OwnedRun | None:
    """Returns the model over the ranks of the run, for code of the user's; None where all of it is here.

    Raises BadOption where a model's own Python cannot run.
    """
    insist_on_one_device(crew, len(plan.stages), what)
    insist_on_whole(tensor, what)
    return ownership.own_run()


def generate(model: nn.Module, run: OwnedRun | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what `model.generate(*args, **kwargs)` does, and restores buffers, attributes and hooks.

    `run` is the model over several ranks, None where all of it is here. Raises BadOption for a model without
    `generate`.
    """
    if not callable(getattr(model, "generate", None)):
        raise BadOption(
            f"{type(model).__name__} has no generate()",
            next_step="engine.evaluate(...) for its outputs; generate() is of transformers' models",
        )
    with untouched(model), nullcontext() if run is None else run.active():
        generated = model.generate(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        if run is not None:
            run.insist_on_same("what is generated", generated)
        return generated


def _insist_on_constant_loss(model: nn.Module) -> None:
    """Raises BadOption where a loss that every rank computes has weights to train."""
    trained = of_loss(model, (name for name, p in model.named_parameters() if p.requires_grad))
    if trained:
        raise BadOption(
            "a model that runs by modules computes its loss on every rank, and this one has weights to train",
            numbers=f"{len(trained)} weights, such as {min(trained)}",
            next_step="call the loss in the model's forward, as its last module, or train with --stages 1",
        )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


@contextmanager
def _rewording_errors(model: nn.Module, run: OwnedRun | None) -> Iterator[None]:
    """Turns an error of the model into NotCapturable when it comes from running on several ranks.

    The usual cause: the forward reads an attribute that another rank's module has set.
    """
    try:
        yield
    except OutsizeError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if run is None or any(frame.filename == broadcast.__file__ for frame in frames):
            raise  # there is one process only, or another rank has ended
        raise NotCapturable(
            f"the forward of {type(model).__name__} cannot run by modules: {type(error).__name__}: {error}; "
            "perhaps it reads what a module of another rank left behind",
            numbers=f"at {raising_line(error)}",
            next_step="return that value from the module, or train with --stages 1",
        ) from error
