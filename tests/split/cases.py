"""The models of the matrix with their batches, and what loops make losses of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from split import models
from split.models import CLASSES, TOKENS, WORDS

SAMPLES: Final = 8


@final
@dataclass(frozen=True)
class Example:
    """One batch: what the model is called with, and the target of each sample."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor


@final
@dataclass(frozen=True)
class Case:
    """A model of the matrix.

    `inputs(samples)` draws the arguments of a call, by name; those in `named` are passed by it. `features`
    takes the outputs to [samples, some width], of which loops make losses of their own; `loss` is the usual
    one.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    features: Callable[[Any], Tensor]
    loss: Callable[[Any, Example], Tensor]
    named: frozenset[str] = field(default=frozenset())
    traits: frozenset[str] = field(default=frozenset())

    @property
    def takes_floats(self) -> bool:
        """Whether the first input can have a gradient."""
        return "ids" not in self.traits

    def net(self, seed: int = 0) -> nn.Module:
        """The plain model with the weights of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def example(self, seed: int, samples: int = SAMPLES) -> Example:
        """One batch."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)
            inputs = self.inputs(samples)
            target = torch.randint(0, CLASSES, (samples,))
        args = tuple(value for name, value in inputs.items() if name not in self.named)
        return Example(args, {name: value for name, value in inputs.items() if name in self.named}, target)

    def examples(self, count: int = 3) -> Iterator[tuple[int, Example]]:
        """Numbers of steps with their batches."""
        return ((step, self.example(step)) for step in range(count))


def without(example: Example, name: str) -> Example:
    """The batch without one of its optional inputs."""
    return replace(example, kwargs={n: value for n, value in example.kwargs.items() if n != name})


# -- inputs, features, losses ------------------------------------------------------------------------


def normal(sizes: Mapping[str, tuple[int, ...]], samples: int) -> dict[str, Tensor]:
    """Inputs of normal numbers; the sizes are those of one sample."""
    return {name: torch.randn(samples, *size) for name, size in sizes.items()}


def words(names: tuple[str, ...], samples: int) -> dict[str, Tensor]:
    """Token ids, the same ones under each name."""
    ids = torch.randint(0, WORDS, (samples, TOKENS))
    return dict.fromkeys(names, ids)


def classified(features: Callable[[Any], Tensor], output: Any, example: Example) -> Tensor:
    """The cross entropy of the features as logits."""
    return F.cross_entropy(features(output), example.target)


def same(output: Tensor) -> Tensor:
    """Outputs that are features already."""
    return output


def mean_token(output: Tensor) -> Tensor:
    """[samples, tokens, width] to [samples, width]."""
    return output.mean(1)


def mean_pixel(output: Tensor) -> Tensor:
    """[samples, width, height, length] to [samples, width]."""
    return output.mean((2, 3))


def mean_logits(output: Any) -> Tensor:
    """What GPT-2 says of a text as a whole."""
    return output.logits.mean(1)


def next_words(output: Any, example: Example) -> Tensor:
    """The loss of a language model, outside of it."""
    logits, ids = output.logits[:, :-1], example.args[0][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def own_loss(output: Any, example: Example) -> Tensor:
    """The loss that the model has computed."""
    return output.loss


def routed_words(output: Any, example: Example) -> Tensor:
    """The loss of a language model with experts: how evenly and how surely routers choose counts too."""
    surely = torch.stack([logits.logsumexp(-1).square().mean() for logits in output.router_logits])
    return next_words(output, example) + 0.1 * output.aux_loss + 0.01 * surely.sum()


def dice(output: Tensor, example: Example) -> Tensor:
    """A ratio of sums over the whole batch, and a cross entropy."""
    wanted = F.one_hot(example.target, CLASSES).float()[:, :, None, None]
    shares = output.softmax(1)
    overlap = (shares * wanted).sum() / (shares + wanted).sum()
    return 1 - 2 * overlap + F.cross_entropy(mean_pixel(output), example.target)


def logits_of(output: models.Answer) -> Tensor:
    """The classes of `Several`."""
    return output.logits


def of_several(output: models.Answer, example: Example) -> Tensor:
    """A loss that reads every output."""
    early = output.features["early"].square().mean() + output.features["middle"].abs().mean()
    norms = (output.norms.early - output.norms.late).square().mean()
    return classified(logits_of, output, example) + 0.1 * early + 0.01 * norms + output.balance


# -- the models --------------------------------------------------------------------------------------

_ROW, _TEXT, _IMAGE = (partial(normal, {"x": size}) for size in ((8,), (TOKENS, 8), (3, 6, 6)))
_PAIR = partial(normal, {"x": (8,), "other": (5,)})

CASES: Final = (
    Case("mlp", models.mlp, _ROW, same, partial(classified, same)),
    Case(
        "transformer",
        models.transformer,
        _TEXT,
        mean_token,
        partial(classified, mean_token),
        traits=frozenset({"random"}),
    ),
    Case("resnet", models.resnet, _IMAGE, same, partial(classified, same), traits=frozenset({"statistics"})),
    Case(
        "gpt2",
        models.gpt2,
        partial(words, ("input_ids",)),
        mean_logits,
        next_words,
        traits=frozenset({"ids", "tied"}),
    ),
    Case(
        "gpt2_labels",
        models.gpt2,
        partial(words, ("input_ids", "labels")),
        mean_logits,
        own_loss,
        frozenset({"labels"}),
        frozenset({"ids", "tied"}),
    ),
    Case("unet", models.UNet, _IMAGE, mean_pixel, dice),
    Case(
        "towers",
        models.Towers,
        _PAIR,
        same,
        partial(classified, same),
        frozenset({"other"}),
        frozenset({"optional"}),
    ),
    Case("several", models.Several, _ROW, logits_of, of_several, traits=frozenset({"outputs"})),
    Case("twice", models.Twice, _ROW, same, partial(classified, same)),
    Case("recurrent", models.Recurrent, _TEXT, mean_token, partial(classified, mean_token)),
    Case("shared", models.Shared, _ROW, same, partial(classified, same)),
    Case(
        "checkpointed", partial(models.Checkpointed, reentrant=False), _ROW, same, partial(classified, same)
    ),
    Case("reentrant", partial(models.Checkpointed, reentrant=True), _ROW, same, partial(classified, same)),
)

# Of several axes, and in no other test: what its routers return is [samples x tokens, experts].
EXPERTS: Final = Case(
    "mixtral",
    models.mixtral,
    partial(words, ("input_ids",)),
    mean_logits,
    routed_words,
    traits=frozenset({"ids", "experts"}),
)


def case(name: str) -> Case:
    """A model by its name."""
    return next(each for each in (*CASES, EXPERTS) if each.name == name)
