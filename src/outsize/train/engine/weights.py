"""Defines EngineWeights: the weights of a model that ranks have divided among them.

    engine.weights.full_state_dict()                                  the whole model, on rank 0
    engine.weights.apply_named(average, "teacher.*", "student.*")     each pair on the rank of its first

Names are the user's own, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.errors.arguments import insist_on_whole_number, path_of
from outsize.program.weights.of_loss import loss_parts
from outsize.run.collectives.tensor_parallel import full_of, mesh_of, own_shard
from outsize.run.weights.pretrained_names import is_pretrained
from outsize.run.weights.safetensors import WeightFiles
from outsize.train.checkpoint.agreement import shared_facts
from outsize.train.checkpoint.checkpoints import Checkpoints
from outsize.train.context.run_context import RunContext
from outsize.train.crew.apply_named import NamedCall, NamedCalls
from outsize.train.crew.crew import Crew
from outsize.train.crew.merged import save_merged, save_plain_config
from outsize.train.crew.module_view import own_module
from outsize.train.crew.pretrained import insist_on_pretrained, save_configs, save_whole
from outsize.train.crew.state_dict import fetcher, gathered, save
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.ranks.divided_weights import DividedWeights

SHARD_BYTES: Final = 5_000_000_000


@final
class EngineWeights:
    """The weights of one engine's model, of which this rank has its part."""

    def __init__(
        self,
        run: RunContext,
        crew: Crew,
        ownership: Ownership,
        tensor: DividedWeights | None,
        checkpoints: Checkpoints,
    ) -> None:
        self._run, self._crew, self._ownership = run, crew, ownership
        self._tensor, self._checkpoints = tensor, checkpoints

    def named_parameters(self, *, loss: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's own parameters, under the user's names, in the model's order.

        `loss`: also those of the loss, which are `loss_fn.*`.
        """
        return self._ownership.own_parameters(loss=loss)

    def parameters(self, *, loss: bool = False) -> Iterator[nn.Parameter]:
        """Yields this rank's own parameters, in the model's order; with `loss` also those of the loss."""
        return (parameter for _, parameter in self.named_parameters(loss=loss))

    def trained(self) -> list[nn.Parameter]:
        """Returns what an optimizer of this rank takes: its own parameters, and those that no batch has used
        yet, which belong to the rank of the first one that does.
        """
        return self._ownership.trained()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the whole of a weight of this rank, or of its gradient, where ranks hold parts of it.

        The result is a copy, or the tensor itself where it is whole already; all ranks of its stage call this
        together.
        """
        tensor_value = full_of(tensor.detach())
        return tensor_value if self._tensor is None else self._tensor.gathered(name, tensor_value)

    @property
    def module(self) -> nn.Module:
        """Returns the model with only this rank's weights, under the user's names.

        It serves optimizers, clipping by value, averaging, `state_dict()`. It is a view of the user's
        modules, built at each access; the model itself where all stages are in one process.
        """
        home, model = self._ownership.placement.home, self._run.model
        if self._crew.world_size == 1:
            return model
        return own_module(model, {n for n, stage in home.items() if stage in self._crew.stages})

    def own_parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what this rank has of a state of the whole model; parts of this rank stay what they are.

        Names that only other ranks have are left out.
        """
        own = self.module.state_dict()
        known = {name: value for name, value in state.items() if name in own}
        return {name: self._own_part(name, value, own[name]) for name, value in known.items()}

    def _own_part(self, name: str, value: Any, own: Any) -> Any:
        if not isinstance(value, Tensor) or not isinstance(own, Tensor) or mesh_of(value) is not None:
            return value
        part = self._ownership.tensor_part(name)
        if part is not None and part.whole(own.shape) == tuple(value.shape):
            value = torch.cat([value.narrow(part.dim, a, b - a) for a, b in part.ranges], part.dim)
        return own_shard(value, own) if value.shape == own.shape else value

    @torch.no_grad()
    def apply_named(
        self,
        function: Callable[..., Any],
        *patterns: str,
        buffers: bool = False,
        gradients: bool = False,
    ) -> None:
        """Calls `function` for parameters by name, each on the rank where it lives; every rank calls this.

        `apply_named(average, "teacher.*", "student.*")` calls `average(teacher, student)` for each pair of
        names that differ in this alone, and sends the second to where the first is. The function changes its
        first argument in place, or its `.grad`; without patterns it gets all parameters. `buffers`: names of
        buffers match as well. `gradients`: the other arguments have their `.grad`. Raises BadOption.
        """
        placement = self._ownership.placement
        calls = NamedCalls(self._run.model, self._crew, placement, self._ownership.division)
        calls.run(NamedCall(function, patterns, buffers, gradients))

    def full_state_dict(
        self, to: str | Path | None = None, *, shard_bytes: int = SHARD_BYTES
    ) -> dict[str, Any]:
        """Returns the whole model's state; every rank calls this.

        Rank 0 gets what `model.state_dict()` would be, in copies on the CPU; other ranks get an empty dict.
        `to` streams the state into a folder instead, in files of at most `shard_bytes` bytes, in the layout
        of `save_pretrained`; then the dict is empty on every rank. Raises BadWeights, BadOption.
        """
        home, model = self._ownership.placement.home, self._run.model
        if to is None:
            return gathered(model, home, self._crew, self._tensor)
        folder = path_of(to, "to", "engine.weights.full_state_dict(to='model')")
        insist_on_whole_number(shard_bytes, "shard_bytes", 1, f"shard_bytes={SHARD_BYTES}, in bytes")
        save(model, home, self._crew, folder, shard_bytes, self._tensor)
        return {}

    def loss_state_dict(self) -> dict[str, Any]:
        """Returns the state of the modules of the loss; every rank calls this.

        Rank 0 gets what `loss_fn.state_dict()` would be, in copies on the CPU; other ranks get an empty dict.
        Of a function that holds modules the names begin with their variables: `criterion.centers`.
        """
        home, whole = self._ownership.placement.home, self._run.whole
        return gathered(whole, home, self._crew, self._tensor, loss_parts(whole))

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that the `from_pretrained` of the model's class reads.

        A model of transformers streams to rank 0; any other with a `save_pretrained` (diffusers, peft, the
        Hub's mixin) is gathered there, and its class writes it. Every rank calls this. Raises BadOption for a
        model without one, BadWeights.
        """
        model = self._run.model
        insist_on_pretrained(model)
        folder = path_of(folder, "folder", "engine.weights.save_pretrained('model')")
        streams = is_pretrained(model)
        state = self.full_state_dict(folder if streams else None)

        def write() -> None:
            if self._crew.global_rank == 0 and streams:
                save_configs(model, folder)
            elif self._crew.global_rank == 0:
                save_whole(model, folder, state)

        shared_facts(self._run.host_group, write)

    def save_merged(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Writes the model with its adapters merged, a weight at a time, as the plain class reads it.

        Weights that are stored in few bits have their values in the type of the others. Adapters are peft's
        LoRA layers. Every rank calls this; rank 0 holds one layer with its values. Raises BadOption for
        adapters that are no sums, and BadWeights.
        """
        folder = path_of(folder, "folder", "engine.weights.save_merged('merged')")
        insist_on_whole_number(shard_bytes, "shard_bytes", 1, f"shard_bytes={SHARD_BYTES}, in bytes")
        home, model = self._ownership.placement.home, self._run.model
        fetch = fetcher(model, home, self._crew, self._tensor)
        save_merged(model, fetch, self._crew, folder, shard_bytes, self._tensor)
        if self._crew.global_rank == 0:
            save_plain_config(model, folder)

    def load(self, path: str | Path) -> None:
        """Sets this rank's weights to those of a folder, an index or a file of safetensors, in place.

        Names are the model's own, as in `full_state_dict(to=path)`. Optimizer and step number stay. Every
        rank calls this. Raises BadWeights.
        """
        if isinstance(path, Mapping):
            raise BadOption(
                "load() reads files, and this is a state",
                next_step="engine.weights.module.load_state_dict(state, strict=False) on every rank",
            )
        path = path_of(path, "path", "engine.weights.load('model.safetensors')")
        self._checkpoints.load_weights(WeightFiles(path))
