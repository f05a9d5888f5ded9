"""Decides which modules are one instruction: the finest that have weights, and those made leaves by retries.

A leaf is a layer of torch.nn, a module without children that has parameters, or a module with hooks of the
user (they must run on every step, not only while recording). A parameterless module without children, such as
rotary embeddings, is recorded through, so that its ops can be replicated into stages. A loss of torch.nn is
recorded through as well, because its function shows on the tape what its mean is taken over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Final, final

from torch import nn
from torch.nn.modules.loss import _Loss

from outsize.capture.costs.weight_casts import is_of_torch
from outsize.capture.guards.consumed import Consumed
from outsize.capture.guards.symbolic_numbers import PlantedNumbers
from outsize.program.python_reads import LOSS
from outsize.program.sharding.expert_parallel.experts import calls_experts
from outsize.program.sharding.opaque_modules import is_hooked
from outsize.program.tape import Weight
from outsize.program.tree import leaves

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
# A call of any module reads these; a class that uses one of the others may read every attribute.
_OF_ALL_MODULES: Final = frozenset(vars(nn.Module())) - {"training"}
_LOOK_UPS: Final = frozenset(("getattr", "vars", "attrgetter", "__dict__", "__getattribute__", "__getattr__"))


@final
@dataclass(frozen=True, slots=True)
class KnownBlocks:
    """Holds what recordings of one model know of its blocks (repeated_blocks.py).

    `repeated` are blocks that another one was shown to be a copy of. `recorded` maps a block and the key of
    its call to what was recorded. `renewing` maps leaves that retries have made, because they write into
    objects that they make anew at each call, to the reason.
    """

    repeated: set[str] = field(default_factory=set[str])
    recorded: dict[Any, Any] = field(default_factory=dict[Any, Any])
    renewing: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, found: KnownBlocks) -> None:
        """Adds what another recording has found."""
        self.repeated.update(found.repeated)
        self.recorded.update(found.recorded)
        self.renewing.update(found.renewing)


@final
class LeafRule:
    """Decides which modules are leaves.

    `forced` maps the FQN of a module that a retry made a leaf to the reason. `opened` are leaves from which
    tensors leak (rule 10), which are recorded through instead; `traced` asks the recorder to remember which
    tensor was made inside which leaf; `saved` says whether it may ask what autograd saves. `live_loss`: the
    loss function is one instruction. `guards_reads`: somebody will compare what Python code has read.
    `experts` are modules that were called as a collection of experts, and are leaves in every precision.
    `numbers` are in their places while the forward is recorded. `keepers` are leaves whose calls depend on
    the calls before, because they write outside of modules or draw from a generator of their own: all calls
    of one stay in one stage. `used` has the objects that change with each use (capture.guards.consumed), by
    their ids, with what uses them. `is_trial`: what fails on fakes is not run on real tensors. `blocks` is
    what earlier recordings of the model know of its blocks, `found` what this one adds; `renewing` are those
    of the keepers that write into objects that they make anew at each call, so that no call finds what
    another one has written.
    """

    def __init__(
        self,
        *,
        of_loss: frozenset[str] = frozenset(),
        live_loss: bool = False,
        guards_reads: bool = False,
        numbers: PlantedNumbers | None = None,
        is_trial: bool = False,
        blocks: KnownBlocks | None = None,
    ) -> None:
        self.forced: dict[str, str] = {}
        self.opened: dict[str, str] = {}
        # These were opened once; no other fallback exists for what failed then and leaks now.
        self.walked: set[str] = set()
        self.experts: set[str] = set()
        self.traced, self.saved, self.live_loss = False, True, live_loss
        self.guards_reads, self.numbers, self.of_loss = guards_reads, numbers, of_loss
        self.is_trial = is_trial
        self.blocks = KnownBlocks() if blocks is None else blocks
        self.found = KnownBlocks()
        self.keepers: set[str] = set()
        self.renewing: dict[str, None] = {}  # A set would have another order in each process.
        self.used: dict[int, list[Consumed]] = {}

    def begin_with(self, names: Collection[str]) -> None:
        """Makes leaves of those of these modules of which earlier recordings know that they have to be."""
        known = {name: reason for name, reason in self.blocks.renewing.items() if name in names}
        self.forced.update(known)
        self.keepers.update(known)
        self.renewing.update(dict.fromkeys(known))

    def begin_attempt(self) -> None:
        """Forgets what an attempt with other leaves has found."""
        self.found = KnownBlocks()

    def found_leaves(self) -> bool:
        """Notes which leaves the next recording of the model begins with; returns whether it then begins with
        the rule that this one has ended with.
        """
        self.found.renewing.update({n: self.forced[n] for n in self.renewing if n in self.forced})
        others = self.forced.keys() - self.renewing.keys() or self.opened or self.walked or self.used
        return not others and not self.traced and self.saved and not self.live_loss

    def run_loss_live(self) -> None:
        """Lets the loss function be one instruction from the next recording on."""
        self.live_loss = True

    def trace_births(self) -> None:
        """Asks the recorder to remember which tensor was made inside which leaf."""
        self.traced = True

    def forgo_saved(self) -> None:
        """Stops asking what autograd saves."""
        self.saved = False

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
        if fqn in self.experts:
            return True
        return (
            fqn not in self.of_loss
            and not any(True for _ in module.children())
            and any(True for _ in module.parameters())
        )

    def is_called(self, fqn: str, module: nn.Module, args: Sequence[Any]) -> None:
        """Notes a call: what is called as experts is a leaf, whatever its code shows in this precision."""
        if fqn not in self.experts and calls_experts(module, args):
            self.experts.add(fqn)

    def may_open(self, module: nn.Module) -> bool:
        """Returns whether a module may be recorded through: it is the user's and has no hooks."""
        return not is_hooked(module) and not type(module).__module__.startswith("torch.nn.")


def common_module(names: Iterable[str]) -> str:
    """Returns the FQN of the smallest module that has all of these as parts, or is one of them."""
    parts = [name.split(".") if name and name != LOSS else [] for name in names]
    common = itertools.takewhile(lambda level: len({*level}) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in common)


def may_read(leaf: nn.Module, name: str) -> bool:
    """Returns whether the classes of a leaf's modules name an attribute, or look up computed names.

    What functions outside of these classes read is seen while they run (capture.guards).
    """
    kinds = {type(module) for module in leaf.modules()}
    return name in _OF_ALL_MODULES or any(
        name in names or names & _LOOK_UPS for names in map(_names_in, kinds)
    )


def _names_in(kind: type) -> frozenset[str]:
    """Returns the names and texts in the code of a class and its bases, other than nn.Module."""
    bases = (base for base in kind.__mro__ if base not in (nn.Module, object))
    return frozenset(name for base in bases for name in _own_names_in(base))


def _own_names_in(kind: type) -> set[str]:
    codes = [code for value in vars(kind).values() for code in _codes_in(value)]
    names = set[str]()
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        names |= {*code.co_names, *(const for const in code.co_consts if isinstance(const, str))}
    # Layers of torch compute the names of weights alone.
    return names - _LOOK_UPS if kind.__module__.startswith("torch.nn.") else names


def _codes_in(value: Any) -> list[CodeType]:
    """Returns the code of a method, or of a property."""
    functions = (value, *(getattr(value, name, None) for name in ("fget", "func", "__func__", "__wrapped__")))
    codes = (getattr(function, "__code__", None) for function in functions)
    return [code for code in codes if isinstance(code, CodeType)]


def takes_copy(
    target: str | Callable[..., Any], named: Collection[Weight], modules: Mapping[str, nn.Module]
) -> Callable[[Weight], bool]:
    """Returns the function that says whether a call can be given the copy that autocast makes of a parameter
    in place of the parameter: among its arguments, or in the tables of the called module.

    `named` are the weights among the arguments.
    """
    if not isinstance(target, str):
        is_torch = is_of_torch(target)
        return lambda weight: is_torch and weight in named and weight.kind == "parameter"
    if any(is_hooked(module) or _lists_weights(module) for module in modules[target].modules()):
        return lambda _: False
    return lambda weight: weight.kind == "parameter"


def _lists_weights(module: nn.Module) -> bool:
    """Returns whether a module has parameters outside of its tables, as an LSTM has."""
    lists = (value for value in vars(module).values() if isinstance(value, list | tuple))
    return any(isinstance(leaf, nn.Parameter) for value in lists for leaf in leaves(value))
