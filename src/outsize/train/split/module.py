"""Defines SplitModule, which `outsize.split` returns: the user's model, called over the plan's devices.

    model = outsize.split(Net(), (x,))
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()

It shares the tables of the user's model, so parameters, buffers, submodules and the names in `state_dict()`
are that model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol, Self, final

from torch import Tensor, nn

from outsize.axes.registry import PARTS, STAGES, size_of
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.train.split.outputs import Outputs

_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_NONE = "nothing_trained_on_this_rank"


class SplitEngine(Protocol):
    """What a split model needs of the engine that runs its plan."""

    model: nn.Module
    plan: Plan
    calls: Any
    weights: Any
    state: Any
    crew: Any

    def clip_grad_norm(self, max_norm: float, names: Any = None) -> Tensor:
        """Clips by the norm of the gradients of all ranks."""
        ...


@final
class SplitModule(nn.Module):
    """The user's model, split over devices: `model(x)` returns the outputs of the whole batch.

    A call runs the forwards of all microbatches, pipelined; the backward of a loss of its outputs runs their
    backwards, the last microbatch first. The loss may be anything over the whole batch. `module` is the
    user's model, `engine` has its plan, checkpoints and weights over all ranks. `outputs` says which ranks
    get the outputs.
    """

    def __init__(
        self, engine: SplitEngine, again: Callable[[nn.Module], SplitModule], outputs: Outputs = "all"
    ) -> None:
        super().__init__()
        module = engine.model
        vars(self).update({name: vars(module)[name] for name in _TABLES})
        vars(self).update(module=module, engine=engine, _again=again, _outputs=outputs)
        vars(self)["training"] = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns for the whole batch. Raises BadOption, and what the model raises."""
        return self.engine.calls(args, kwargs, self._outputs)

    @property
    def has_outputs(self) -> bool:
        """Returns whether calls give this rank the model's outputs; with `outputs="last"` ranks of other
        stages get zeros.
        """
        return self._outputs == "all" or self.engine.calls.is_last

    @property
    def _parts(self) -> int:
        """Returns over how many processes the weights are divided, by stages or each of them."""
        if self.engine.crew.mesh is None:
            return 1
        return size_of(self.plan.axes.model_dump(), (*STAGES, *PARTS))

    @property
    def plan(self) -> Plan:
        """Returns the plan that calls run."""
        return self.engine.plan

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm over all ranks is at most `max_norm`; returns the norm
        before (0-dim), the same on every rank. Every rank calls this.
        """
        return self.engine.clip_grad_norm(max_norm)

    # -- what a module does, on the user's model ---------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the model and of all its modules."""
        self.module.train(mode)
        vars(self)["training"] = self.module.training
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Says of all parameters, those of other ranks among them, whether they get gradients."""
        self.module.requires_grad_(requires_grad)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this process has; in one process all. A rank that trains none yields one
        without elements.
        """
        every = super().named_parameters(prefix, recurse, remove_duplicate)
        if self.engine.crew.world_size == 1:
            return every
        held = set(map(id, self.engine.weights.trained()))
        own = [(name, parameter) for name, parameter in every if id(parameter) in held]
        if not any(parameter.requires_grad for _, parameter in own):
            own.append((f"{prefix}.{_NONE}" if prefix else _NONE, self.engine.calls.gradients.stand_in))
        return iter(own)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of the model, as far as this process has it; `engine.weights.full_state_dict()`
        is that of all ranks.
        """
        return self.engine.weights.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Sets the weights of this process to those of a state of the whole model, or of its own part."""
        if self._parts == 1:
            return self.module.load_state_dict(state_dict, strict, assign)
        own = self.engine.weights.own_parts(state_dict)
        return self.engine.weights.module.load_state_dict(own, strict, assign)

    def __getattr__(self, name: str) -> Any:
        """Returns what the user's model has of this name: its config, its modules, its methods."""
        tables = vars(self)
        for table in ("_parameters", "_buffers", "_modules"):
            if name in tables.get(table, ()):
                return tables[table][name]
        if "module" not in tables:
            raise AttributeError(name)
        return getattr(tables["module"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitModule:
        """Returns a copy of the model that is split by the same plan.

        Raises BadOption where each process has a part of the weights.
        """
        ranks = self._parts
        if ranks > 1:
            raise BadOption(
                "a split model of several processes cannot be copied within them",
                numbers=f"{ranks} ranks have a part of the weights each",
                next_step="outsize.split(Net(), (x,)) a second time, and load_state_dict(model.state_dict())",
            )
        twin = self._again(copy.deepcopy(self.module, memo))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises BadOption: a process, its devices and its connections cannot be written."""
        raise BadOption(
            "a split model is not pickled",
            next_step="torch.save(model.state_dict(), 'weights.pt'), or model.engine.save('run')",
        )

    def __repr__(self) -> str:
        """Returns the model's own text behind the line of its plan."""
        return f"SplitModule({self.engine!r})\n{self.module!r}"
