"""Which modules are one instruction: the finest that carry weights, and whatever the ladder forced.

A leaf is a layer of torch.nn, a module without children that has parameters, or a module on which the
user hung hooks (they must fire on every step, not only while recording). A parameterless module without
children, such as rotary embeddings, is walked through, so that its ops can be replicated into stages.
"""

from __future__ import annotations

from typing import final

from torch import nn

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


def is_hooked(module: nn.Module) -> bool:
    """True when the user has hung hooks on the module: they must fire on every step."""
    hooks = [hook for kind in HOOKS for hook in (getattr(module, kind, None) or {}).values()]
    return any(getattr(hook, "__module__", None) not in _COLLECTORS for hook in hooks)
