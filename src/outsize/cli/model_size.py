"""Makes MODEL and its example at several sizes, for `outsize fit --max`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

from outsize.cli.model_input import batch_size, make_model_input
from outsize.errors import BadOption
from outsize.ir.formatting import whole_number

if TYPE_CHECKING:
    from torch import nn

    from outsize.api.options import FitOptions, LossOptions
    from outsize.ir.answers.largest import Largest

    Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], LossOptions]

BATCH: Final = "batch"
SEQUENCE: Final = "sequence"
LAYERS: Final = "layers"
# Lengths of sequences are tried in steps of this many tokens.
TOKENS: Final = 64
# Configs of transformers have this name of their own, or one that stands for it.
NUM_LAYERS: Final = "num_hidden_layers"


@final
@dataclass(frozen=True)
class ModelSize:
    """Holds what is fixed of a model and its example on the command line."""

    model: str
    input: str | None
    batch: int | None
    seed: int

    def largest(self, what: str, asked: FitOptions) -> Largest:
        """Returns the largest size of `NAME[:STEP]` that fits. Raises BadOption and what `fit` raises."""
        from outsize.api import sizes
        from outsize.capture.models.load import with_option

        name, colon, step_text = what.partition(":")
        step = whole_number(step_text)
        if colon and not step:
            raise BadOption(
                f"--max {what} has no step",
                numbers=f"{step_text!r} is no positive number",
                next_step=f"--max {name}:8",
            )
        if name == BATCH:
            return self._largest_batch(what, colon, asked)
        step = step or (TOKENS if name == SEQUENCE else 1)
        most = self._positions(what) if name == SEQUENCE else None
        options = self._layers() if name == LAYERS else (name,)

        def made(size: int) -> Made:
            if name == SEQUENCE:
                return replace(self, input=str(size)).made()
            return replace(self, model=with_option(self.model, options, size)).made()

        if most is None:
            return sizes.largest(made, name, step=step, **asked)
        return sizes.largest(made, name, step=step, most=most, **asked)

    def _largest_batch(self, what: str, colon: str, asked: FitOptions) -> Largest:
        from outsize.api import sizes

        if colon or self.batch is not None:
            raise BadOption(
                f"--max {what} looks for the batch itself",
                numbers="its steps are the microbatches of all replicas",
                next_step="--max batch, without --batch and without a step",
            )
        model, args, kwargs, loss = self.made()
        options: FitOptions = {**asked, **loss}
        return sizes.largest_batch(model, args, kwargs, **options)

    def made(self) -> Made:
        """Returns the model on meta, its example batch and its loss."""
        size = batch_size(self.batch, None)
        inputs = make_model_input(self.model, self.input, size, meta=True, seed=self.seed)
        return *inputs.call, inputs.loss

    def _positions(self, what: str) -> int | None:
        """Returns the longest sequence that the model's config allows; None where it sets no bound."""
        from outsize.capture.models.examples import most_tokens

        if self.input is not None:
            raise BadOption(
                f"--max {what} looks for the length that --input gives",
                numbers=f"--input {self.input}",
                next_step=f"--max {what}, without --input",
            )
        return most_tokens(self.made()[0])

    def _layers(self) -> tuple[str, ...]:
        """Returns the options of MODEL that set the number of layers, the model's own name of it first."""
        config: Any = getattr(self.made()[0], "config", None)
        own: str = getattr(config, "attribute_map", {}).get(NUM_LAYERS, NUM_LAYERS)
        if not hasattr(config, own):
            raise BadOption(
                f"--max {LAYERS}: the number of layers of {self.model.partition('?')[0]} is not known",
                numbers=f"its config has no {NUM_LAYERS}" if config is not None else "it has no config",
                next_step="--max NAME, an option of the model's builder that is a whole number",
            )
        return (own, NUM_LAYERS) if own != NUM_LAYERS else (own,)
