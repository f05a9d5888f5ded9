"""Which modules are one instruction: the finest that carry weights, and whatever the ladder forced.

A leaf is a layer of torch.nn, a module without children that has parameters, or a module on which the
user hung hooks (they must fire on every step, not only while recording). A parameterless module without
children, such as rotary embeddings, is walked through, so that its ops can be replicated into stages.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.costs import flops_of
from outsize.capture.fakes import FakeModel, fake_like
from outsize.capture.intercept import really_seeing
from outsize.program.tree import leaves, map_leaves

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks from here fill lists of the forward that runs (router logits, hidden states) and do nothing outside
# of it: what they do is part of that forward and is recorded with it.
_COLLECTORS = frozenset({"transformers.utils.output_capturing"})


@final
class LeafRule:
    """`forced` maps the FQN of a module that the ladder made a leaf to the reason.

    `opened` are leaves that hand out tensors by the way (rule 10), which are walked through instead;
    `traced` asks the recorder to remember which tensor was made inside which leaf; `saved` says whether
    it may ask what autograd keeps.
    """

    def __init__(self) -> None:
        self.forced: dict[str, str] = {}
        self.opened: dict[str, str] = {}
        self.walked: set[str] = set()  # ever opened: what fails then and leaks now has no rung
        self.traced, self.saved = False, True

    def is_leaf(self, fqn: str, module: nn.Module) -> bool:
        """True when the call of this module is one instruction."""
        if fqn in self.forced or is_hooked(module):
            return True
        if type(module) in _CONTAINERS or fqn in self.opened:
            return False
        if type(module).__module__.startswith(("torch.nn.", "torch.jit.")) or hasattr(
            module, "parametrizations"
        ):
            return True
        return not any(True for _ in module.children()) and any(True for _ in module.parameters())

    def may_open(self, module: nn.Module) -> bool:
        """A module of the user without hooks may be walked through."""
        return not is_hooked(module) and not type(module).__module__.startswith("torch.nn.")

    def probe(self, module: nn.Module, args: Any, kwargs: Any, fakes: FakeModel) -> tuple[Any, int, bool]:
        """Output structure and FLOPs of a leaf that decides on its input, and whether it draws random
        numbers: a real copy on random inputs. What it hands to others by the way must not be taken for data.
        """
        probe = _Probe()

        def fake(leaf: Any) -> Any:
            return fake_like(leaf, fakes.mode, fakes.device) if isinstance(leaf, Tensor) else leaf

        with really_seeing(probe.see), self._unsaved():
            out, draws = _run_copy(module, args, kwargs)
        # Made fakes first: the autograd graph of the real results would hold everything.
        out = map_leaves(fake, out)
        fakes.strays += probe.survivors()
        return out, probe.flops, draws

    def _unsaved(self) -> AbstractContextManager[object]:
        """Nobody asks what autograd keeps in a probe: its memory is not the recording's, and goes."""
        return torch.autograd.graph.saved_tensors_hooks(_same, _same) if self.saved else nullcontext()


def is_hooked(module: nn.Module) -> bool:
    """True when the user has hung hooks on the module: they must fire on every step."""
    hooks = [hook for kind in HOOKS for hook in (getattr(module, kind, None) or {}).values()]
    return any(getattr(hook, "__module__", None) not in _COLLECTORS for hook in hooks)


@final
class _Probe:
    """What the real copy does. (FlopCounterMode hooks every module, and fails on some views of weights.)"""

    def __init__(self) -> None:
        self.flops = 0
        self._made: list[weakref.ref[Tensor]] = []

    def see(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.flops += flops_of(op, args, kwargs, out)
        self._made += [weakref.ref(leaf) for leaf in leaves(out) if isinstance(leaf, Tensor)]

    def survivors(self) -> list[Tensor]:
        """Tensors made in the probe that somebody holds."""
        return [tensor for made in self._made if (tensor := made()) is not None]


def _run_copy(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Autograd watches: which results require grad is the module's affair, and known only from a real run."""
    generator = torch.Generator().manual_seed(0)

    def real(leaf: Any) -> Any:
        return _random_like(leaf, generator) if isinstance(leaf, Tensor) else leaf

    def given(leaf: Any) -> Any:
        # An alias, as an activation is one: the module may write into it in place.
        wanted = isinstance(leaf, Tensor) and leaf.requires_grad
        return real(leaf).requires_grad_().clone() if wanted else real(leaf)

    memo: dict[int, Any] = {
        id(t): _parameter_like(t, real(t)) for t in [*module.parameters(), *module.buffers()]
    }
    clone = copy.deepcopy(module, memo)
    with torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        out = clone(*map_leaves(given, args), **map_leaves(given, kwargs))
        draws = not torch.equal(before, torch.random.get_rng_state())
    return out, draws


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _parameter_like(fake: Tensor, real: Tensor) -> Tensor:
    return nn.Parameter(real, requires_grad=fake.requires_grad) if isinstance(fake, nn.Parameter) else real


def _random_like(fake: Tensor, generator: torch.Generator) -> Tensor:
    if not fake.dtype.is_floating_point:
        # Indices: zero is in range everywhere.
        return torch.zeros(fake.shape, dtype=fake.dtype)
    return torch.randn(fake.shape, generator=generator).mul_(0.02).to(fake.dtype)
