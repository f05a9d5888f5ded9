"""Decides which modules are one instruction: the finest that have weights, and those made leaves by retries.

A leaf is a layer of torch.nn, a module without children that has parameters, or a module with hooks of the
user (they must run on every step, not only while recording). A parameterless module without children, such as
rotary embeddings, is recorded through, so that its ops can be replicated into stages. A loss of torch.nn is
recorded through as well, because its function shows on the tape what its mean is taken over.
"""

from __future__ import annotations

from typing import final

from torch import nn
from torch.nn.modules.loss import _Loss

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
# Hooks of these modules fill lists of the running forward (router logits, hidden states) and do nothing else,
# so they are recorded with that forward.
_COLLECTORS = frozenset({"transformers.utils.output_capturing"})


@final
class LeafRule:
    """Decides which modules are leaves.

    `forced` maps the FQN of a module that a retry made a leaf to the reason. `opened` are leaves from which
    tensors leak (rule 10), which are recorded through instead; `traced` asks the recorder to remember which
    tensor was made inside which leaf; `saved` says whether it may ask what autograd saves. `live_loss`: the
    loss function is one instruction. `guards_reads`: somebody will compare what Python code has read.
    `keepers` are leaves whose calls depend on the calls before, because they write outside of modules or draw
    from a generator of their own: all calls of one stay in one stage.
    """

    def __init__(self) -> None:
        self.forced: dict[str, str] = {}
        self.opened: dict[str, str] = {}
        # These were opened once; no other fallback exists for what failed then and leaks now.
        self.walked: set[str] = set()
        self.traced, self.saved, self.live_loss = False, True, False
        self.guards_reads = False
        self.keepers: set[str] = set()

    def is_leaf(self, fqn: str, module: nn.Module) -> bool:
        """Returns whether the call of this module is one instruction."""
        if fqn in self.forced or is_hooked(module):
            return True
        if type(module) in _CONTAINERS or isinstance(module, _Loss) or fqn in self.opened:
            return False
        if type(module).__module__.startswith(("torch.nn.", "torch.jit.")) or hasattr(
            module, "parametrizations"
        ):
            return True
        return not any(True for _ in module.children()) and any(True for _ in module.parameters())

    def may_open(self, module: nn.Module) -> bool:
        """Returns whether a module may be recorded through: it is the user's and has no hooks."""
        return not is_hooked(module) and not type(module).__module__.startswith("torch.nn.")


def is_hooked(module: nn.Module) -> bool:
    """Returns whether the user has set hooks on the module, which must run on every step."""
    hooks = [hook for kind in HOOKS for hook in (getattr(module, kind, None) or {}).values()]
    return any(getattr(hook, "__module__", None) not in _COLLECTORS for hook in hooks)
