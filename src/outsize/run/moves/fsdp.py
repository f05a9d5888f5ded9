"""Shards weights over replicas (FSDP): a stage is whole while it computes (ZeRO-3), or from its first action
in a step to its last (ZeRO-1).

    UNSHARD      begins the all-gather; the compute action behind it waits
    RESHARD      frees the whole weights; the modules have their shards, DTensors under the user's names
    REDUCE_GRAD  scatters the sum of the replicas' gradients, each replica getting its shard's; with the last
                 one of a step the sums of the other shards (dp_replicate) are added

FSDP2 does all of it, with a group for each stage and dtype. Its hooks are attached to modules that are
called, and a stage runs flat: so FSDP2 gets modules that have the parameter tables of the user's modules and
are never called, and is driven as torch.distributed.pipelining drives it (stage/stage.py,
perform_reduce_grad), through parts of it that are not public (as they are in torch 2.11 and in 2.13): only
`_pieces`, `_insist_on_gradient` and `_release` know them.

Gradients are added, never divided: losses have global shares. A parameter without a gradient on one replica
contributes zeros; without one on any, its gradient is None in the end, and optimizers ignore it. Scalars and
weights that are not contiguous stay whole; train/ranks/replicas.py handles them.

Sources: torch.distributed.fsdp.fully_shard; ZeRO, arXiv 1910.02054; FSDP, arXiv 2304.11277. Oracle:
tests/unit/run/moves/test_fsdp.py, tests/dist/test_sharded_processes.py: the numbers of one process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from outsize.device.accelerators import is_accelerator
from outsize.device.readback import launched_to
from outsize.errors import BadOption
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.program.values.wrapper_tensors import is_wrapper
from outsize.program.weights.beside import insist_on_codes_once
from outsize.run.moves.base import Moves
from outsize.run.stage.cut import Cut
from outsize.run.stage.outer_graph import GatheredWeights
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.run.transport.wire_layout import copied
from outsize.schedules.sharded import with_gathers, with_gathers_of_call

Fill = Callable[[Collection[str]], None]


def is_fully_sharded(module: nn.Module) -> bool:
    """Returns whether the user's own `fully_shard` has divided the weights of a module."""
    return isinstance(module, FSDPModule)


@final
class ShardedWeights(Moves):
    """Shards the weights of this rank's stages."""

    def __init__(
        self,
        model: nn.Module,
        home: Mapping[str, int],
        meshes: Mapping[str, DeviceMesh],
        fill: Fill,
        *,
        once: bool = False,
    ) -> None:
        """Shards in place the weights that `home` gives a stage, over the last dim of their mesh.

        A first dim of a mesh replicates. `fill(names)` is called before weights are sharded, so that they
        have values. With `once`, weights are gathered and gradients scattered once a step.
        """
        self._home, self._once = dict(home), once
        self._root = nn.Module()
        self._stages: dict[int, list[_FsdpGroup]] = {}
        self._parameters: dict[str, Any] = {}  # What FSDP2 knows of a weight, by its name.
        mesh = next(iter(meshes.values()))
        for (stage, _, mesh), names in _grouped_names(model, home, meshes).items():
            fill(names)
            insist_on_codes_once(model, names)
            _insist_on_gathers(model, names, mesh)
            holder = _holder(model, names)
            marks = {name: dict(vars(model.get_parameter(name))) for name in names}
            self._root.add_module(str(len(self._root._modules)), holder)
            fully_shard(holder, mesh=mesh, ignored_params=_others(model, names))
            # The loop restores attributes that the user has set on parameters.
            for name, attributes in marks.items():
                vars(model.get_parameter(name)).update(attributes)
            group = _FsdpGroup(holder, mesh, {id(model.get_parameter(n)): each for n, each in marks.items()})
            self._stages.setdefault(stage, []).append(group)
            known = {id(parameter.sharded_param): parameter for parameter in group.parameters}
            self._parameters |= {name: known[id(model.get_parameter(name))] for name in names}
        fully_shard(self._root, mesh=mesh)
        _state(self._root)._lazy_init()

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return with_gathers(schedule, self._uses(cut), once=self._once)

    def of(self, cuts: Sequence[Cut]) -> Moves:
        return _Waiting(self, frozenset(use for cut in cuts for use in self._uses(cut)))

    def of_call(self, cuts: Sequence[Cut]) -> Moves:
        return _OfCall(self, frozenset(use for cut in cuts for use in self._uses(cut)), once=self._once)

    @property
    def gathered(self) -> GatheredWeights:
        return self

    def copy_weight_view(self, value: Tensor | None) -> Tensor | None:
        """Returns a copy where the value is a view of a gathered weight, whose memory goes with RESHARD.

        Learned queries that are expanded for the batch are such a value, which each block of a decoder reads.
        """
        if value is None or not any(group.lends(value) for group in self._all_groups()):
            return value
        return copied(value)

    def gathers(self, name: str) -> bool:
        """Tells whether the weight of this name is sharded."""
        return name in self._parameters

    def insist(self, name: str, weight: Tensor) -> None:
        """Raises BadOption for another weight than the one of which FSDP2 has the shards."""
        known = self._parameters.get(name)
        if known is not None and weight is not known.sharded_param:
            raise BadOption(
                f"{name} is another tensor than the one whose parts the ranks have, so it would not be used",
                next_step="change weights in place (with torch.no_grad(): weight.copy_(...)), or "
                "torch.func.functional_call on the plain model, model.module, or axes='pp'",
            )

    def whole(self, name: str) -> Tensor:
        """Returns FSDP2's whole parameter of this name."""
        return self._parameters[name].unsharded_param

    def scattered(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds up whole gradients over the ranks; returns this rank's shards of the sums."""
        parameters = [self._parameters[name] for name in names]
        groups = self._all_groups()
        every = [parameter for group in groups for parameter in group.parameters]
        with _without_gradients([parameter.sharded_param for parameter in every]):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.unsharded_param.grad = gradient
            for group in groups:
                group.reduce(last=True)
            self._finish()
            return [parameter.sharded_param.grad for parameter in parameters]

    @contextmanager
    def gathered_all(self) -> Iterator[None]:
        for group in self._all_groups():
            group.unshard()
        arrived = self.gathered_for(self._stages)
        try:
            if arrived is not None:
                arrived()
            yield
        finally:
            self.abandon()

    def abandon(self) -> None:
        for group in self._all_groups():
            # Not simulated: only a call that has failed leaves a gather in flight, into memory that is freed.
            group.wait()
            group.reshard()

    def _all_groups(self) -> list[_FsdpGroup]:
        return [group for groups_of_stage in self._stages.values() for group in groups_of_stage]

    def _uses(self, cut: Cut) -> set[tuple[int, int]]:
        """Returns (owner, user) pairs of stages.

        Replicas gather together, so each stage is a user of its own weights even where this replica's
        microbatches do not use them.
        """
        used = ((name, p.stage) for p in cut.programs for name in (*p.weights, *p.spec.foreign))
        pairs = {(self._home[name], user) for name, user in used if name in self._home}
        return pairs | {(stage, stage) for stage in self._home.values()}

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        groups, kind = self._stages.get(row[at].stage, []), row[at].kind
        if kind is Kind.REDUCE_GRAD:
            return self._reduction(groups, last=row[at] not in row[at + 1 :], end=_none_behind(row, at))

        def run() -> None:
            for group in groups:
                group.unshard() if kind is Kind.UNSHARD else group.reshard()

        return run

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return self.gathered_for({a.stage for a in row[:at] if a.kind is Kind.UNSHARD})

    def gathered_for(self, stages: Collection[int]) -> Callable[[], None] | None:
        """Returns the function that waits until the weights of these stages are whole."""

        def wait() -> None:
            for group in coming:
                group.wait()

        coming = [group for stage in sorted(stages) for group in self._stages.get(stage, [])]
        return wait if coming else None

    def _reduction(self, groups: Sequence[_FsdpGroup], *, last: bool, end: bool) -> Callable[[], None]:
        def run() -> None:
            for group in groups:
                group.reduce(last)
            if end:
                self._finish()

        return run

    def _finish(self) -> None:
        """Ends the step: gradients are ready, and those that no replica has computed become None."""
        groups = self._all_groups()
        for mesh in dict.fromkeys(group.mesh for group in groups):
            self._forget(mesh, [group for group in groups if group.mesh is mesh])
        _release(self._root)

    def _forget(self, mesh: DeviceMesh, groups: Sequence[_FsdpGroup]) -> None:
        here = [made for group in groups for made in group.finish()]
        made = launched_to(mesh.device_type, torch.tensor(here, dtype=torch.uint8))
        for dim in range(mesh.ndim):
            RankCollectives.of(mesh.get_group(dim)).all_reduce(made, dist.ReduceOp.MAX)
        # What this replica has made, some replica has: the host reads the device only for what it lacks.
        anywhere = iter(here if all(here) else made.tolist())
        for group in groups:
            group.forget(anywhere)


@final
class _Waiting(Moves):
    """Makes an action wait only for the weights that its stage uses in known programs."""

    def __init__(self, sharded: ShardedWeights, uses: Collection[tuple[int, int]]) -> None:
        self._sharded, self._uses = sharded, uses

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return self._sharded.scheduled(schedule, cut)

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        return self._sharded.action(row, at)

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return self._sharded.gathered_for({owner for owner, user in self._uses if user == row[at].stage})


@final
class _OfCall(Moves):
    """Gathers the weights of a call for its forwards, and again for its backwards."""

    def __init__(self, sharded: ShardedWeights, uses: frozenset[tuple[int, int]], *, once: bool) -> None:
        self._sharded, self._uses, self._once = sharded, uses, once

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return with_gathers_of_call(schedule, self._uses, once=self._once)

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        return self._sharded.action(row, at)

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return self._sharded.gathered_for({owner for owner, user in self._uses if user == row[at].stage})


@final
class _HostGather(AllGather):
    """Gathers weights of FSDP2 in memory that ranks share, where they share some."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = RankCollectives.of(group)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory of this size for whole weights, of which this rank's are a part."""
        return self._ranks.buffer(math.prod(size), dtype, device).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Begins to gather, or gathers."""
        if async_op:
            return self._ranks.begin_all_gather(output_tensor, input_tensor)
        return self._ranks.all_gather(output_tensor, input_tensor)


@final
class _HostReduceScatter(ReduceScatter):
    """Adds up gradients of FSDP2 in memory that ranks share, where they share some."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = RankCollectives.of(group)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory of this size for gradients of all ranks' weights."""
        return self._ranks.buffer(math.prod(size), dtype, device).view(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Adds up; sums are what FSDP2 was set to."""
        return self._ranks.reduce_scatter(output_tensor, input_tensor)


@final
class _FsdpGroup:
    """Drives FSDP2 for the weights of one dtype of one stage, over one mesh.

    `marks` are attributes of weights, by the ids of their shards: gathered weights have them too, since a
    layer of codes may find its scales there.
    """

    def __init__(self, holder: nn.Module, mesh: DeviceMesh, marks: Mapping[int, dict[str, Any]]) -> None:
        self._fsdp, self.mesh = cast(FSDPModule, holder), mesh
        self._fsdp.set_gradient_divide_factor(1.0)
        self._fsdp.set_force_sum_reduction_for_comms(True)
        self._fsdp.set_reshard_after_backward(False)
        if not is_accelerator(torch.device(mesh.device_type)):
            self._fsdp.set_custom_all_gather(_HostGather(mesh.get_group(mesh.ndim - 1)))
            self._fsdp.set_custom_reduce_scatter(_HostReduceScatter(mesh.get_group(mesh.ndim - 1)))
        self._pieces = _pieces(holder)
        self._coming: Any = None
        self._memory = frozenset[int]()  # Storages of the whole weights; they stay, and lose their memory.
        self._made: list[bool] = []
        marked = ((parameter, marks.get(id(parameter.sharded_param))) for parameter in self.parameters)
        self._marked = [(parameter, attributes) for parameter, attributes in marked if attributes]

    @property
    def parameters(self) -> list[Any]:
        """Returns what FSDP2 knows of each weight."""
        return [parameter for group in self._pieces for parameter in group.fsdp_params]

    def unshard(self) -> None:
        self._coming = self._fsdp.unshard(async_op=True)

    def wait(self) -> None:
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
            if not self._memory:
                self._memory = frozenset(_storage(p.unsharded_param) for p in self.parameters)
            for parameter, attributes in self._marked:
                vars(parameter.unsharded_param).update(attributes)

    def lends(self, value: Tensor) -> bool:
        """Tells whether a tensor lies in the memory of a whole weight."""
        return _storage(value) in self._memory

    def reshard(self) -> None:
        """Frees the whole weights; an action that used them has waited for them (schedules/sharded.py)."""
        self._fsdp.reshard()

    def reduce(self, last: bool) -> None:
        """Reduces the gradients; the `last` reduction of a step includes the ranks that replicate
        the shards.
        """
        parameters = self.parameters
        known = self._made or [p.sharded_param.grad is not None for p in parameters]
        here = (p.unsharded_param.grad is not None for p in parameters)
        self._made = [before or now for before, now in zip(known, here, strict=True)]
        for parameter in parameters:
            _insist_on_gradient(parameter)
        self._fsdp.set_requires_all_reduce(last)
        for group in self._pieces:
            group.post_backward()

    def finish(self) -> list[bool]:
        """Waits for all work; returns which parameters have got a gradient here."""
        for group in self._pieces:
            group.finalize_backward()
        return self._made or [False for group in self._pieces for _ in group.fsdp_params]

    def forget(self, made: Iterable[int]) -> None:
        """Drops gradients that are zeros because no replica has `made` one."""
        for group in self._pieces:
            for parameter, there in zip(group.fsdp_params, made, strict=False):
                if not there:
                    parameter.sharded_param.grad = None
        self._made = []


@contextmanager
def _without_gradients(weights: Sequence[Tensor]) -> Iterator[None]:
    """Takes the gradients and the hooks of weights away within the block: FSDP2 would add to the ones, and
    call the others, as the user's backward does behind it.
    """
    hooks: list[Any] = [weight._post_accumulate_grad_hooks for weight in weights]
    held = [(weight, weight.grad, dict(each or ())) for weight, each in zip(weights, hooks, strict=True)]
    for weight, each in zip(weights, hooks, strict=True):
        weight.grad = None
        if each:
            each.clear()
    try:
        yield
    finally:
        for (weight, gradient, known), each in zip(held, hooks, strict=True):
            weight.grad = gradient
            if each is not None:
                each.update(known)


@final
class _Table(nn.Module):
    """Exposes a module's own parameter table: parameters set here are set there."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__["_parameters"] = owner._parameters


@final
class _ForwardingTable(nn.Module):
    """Exposes the table of a module with its own `__setattr__`, such as an LSTM, which lists its weights."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_parameters=owner._parameters, owner=owner)

    def __setattr__(self, name: str, value: Any) -> None:
        known = name in self.__dict__.get("_parameters", ())
        setattr(self.__dict__["owner"], name, value) if known else super().__setattr__(name, value)


def may_be_sharded(weight: Tensor) -> bool:
    """Returns whether FSDP2 can shard a tensor: it divides the first dim of contiguous parameters.

    Codes and scales of a quantized one have dims of their own.
    """
    plain = isinstance(weight, nn.Parameter) and not is_wrapper(weight)
    return plain and weight.ndim > 0 and weight.is_contiguous()


def _insist_on_gathers(model: nn.Module, names: Collection[str], mesh: DeviceMesh) -> None:
    """Raises BadOption for floats of 8 bits on devices whose backend gathers none."""
    narrow = [name for name in names if _is_narrow(model.get_parameter(name).dtype)]
    backend: str = dist.get_backend(mesh.get_group(mesh.ndim - 1))
    if narrow and backend == dist.Backend.GLOO:
        raise BadOption(
            f"dp_shard would gather {narrow[0]}, which is of floats of 8 bits, and gloo gathers none",
            numbers=f"{model.get_parameter(narrow[0]).nbytes:,} bytes",
            next_step="stages (--stages 2) or dp_replicate, or codes in integers of 8 bits",
        )


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _grouped_names(
    model: nn.Module, home: Mapping[str, int], meshes: Mapping[str, DeviceMesh]
) -> dict[tuple[int, torch.dtype, DeviceMesh], list[str]]:
    """Groups names by stage, dtype, which is the dtype of the gradients' sum, and mesh."""
    groups = defaultdict[tuple[int, torch.dtype, DeviceMesh], list[str]](list)
    for name, weight in model.named_parameters():
        if name in home:
            groups[home[name], weight.dtype, meshes[name]].append(name)
    return dict(groups)


def _holder(model: nn.Module, names: Collection[str]) -> nn.Module:
    wanted = {id(model.get_parameter(name)) for name in names}
    holder = nn.Module()
    for number, module in enumerate(model.modules()):
        if wanted.intersection(map(id, module._parameters.values())):
            table = _Table if type(module).__setattr__ is nn.Module.__setattr__ else _ForwardingTable
            holder.add_module(str(number), table(module))
    return holder


def _storage(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, also while it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _others(model: nn.Module, names: Collection[str]) -> set[nn.Parameter]:
    return {p for name, p in model.named_parameters() if name not in names}


def _none_behind(row: Sequence[Action], at: int) -> bool:
    return all(action.kind is not Kind.REDUCE_GRAD for action in row[at + 1 :])


def _state(module: nn.Module) -> Any:
    return fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]


def _pieces(module: nn.Module) -> list[Any]:
    """Returns FSDP2's groups of parameters; the state of torch 2.11 has one."""
    state = _state(module)
    return [state._fsdp_param_group] if hasattr(state, "_fsdp_param_group") else state._fsdp_param_groups


def _insist_on_gradient(parameter: Any) -> None:
    """Gives zeros to a parameter without a gradient here, which another rank may have.

    All ranks then reduce the same. FSDP2's own option for it is not in torch 2.11.
    """
    whole = parameter.unsharded_param
    if whole.requires_grad and whole.grad is None and parameter.unsharded_accumulated_grad is None:
        whole.grad = torch.zeros_like(whole)


def _release(root: nn.Module) -> None:
    """Frees the inputs of the last reduce-scatters, as `_root_post_backward_final_callback` does.

    The current stream is behind them since `finalize_backward`, which waits for what followed them.
    """
    context = _state(root)._comm_ctx
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None  # torch 2.11
