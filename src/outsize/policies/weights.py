"""Defines where weights, gradients and optimizer states are while no action uses them.

    resident          on their devices; over dp_shard        ZeRO-1: Rajbhandari et al., arXiv 1910.02054
                      states are divided, and weights are    sec. 5.1, and FSDP2 with
                      whole from their first use in a step   reshard_after_forward=False
                      to their last
    sharded           over dp_shard x cp; a block is whole   ZeRO-3: the same, sec. 5.3, and FSDP2
                      while it computes
    host-optimizer    states on the host: gradients go       ZeRO-Offload: Ren et al., arXiv 2101.06840
                      there, weights come once a step
    host              weights and gradients as well: they    ZeRO-Infinity: Rajbhandari et al.,
                      come stage by stage                    arXiv 2104.07857, sec. 6.2
    host-activations  and values that stages send each       L2L: Pudipeddi et al., arXiv 2002.05645
                      other; stages recompute the rest
    host-computed     some stages stay on the host, which    KTransformers: Chen et al., SOSP 2025
                      computes them; their inputs and        (doi 10.1145/3731569.3764843)
                      outputs move, their weights never

Those from host-optimizer to host-activations are the degrees of offload, the least first. Everything that the
package knows of a policy is in its record below: over how many devices its bytes are divided, how often a
step copies them, the actions that it adds to a row, what it composes with, and what a report calls it. To add
a policy, write its name and its record here.

A policy is stored by its name, as a schedule is. Oracle: tests/unit/policies/test_policies.py compares the
actions with those of the rows, and tests/house/test_policy_names.py finds names elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, final

from outsize.policies.activations import RECOMPUTE, Recompute, activation_policy

Weights = Literal["resident", "sharded", "host-optimizer", "host", "host-activations", "host-computed"]

_GATHERS: Final = frozenset({"UNSHARD", "RESHARD", "REDUCE_GRAD"})
_LOADS: Final = frozenset({"LOAD", "UNLOAD"})
_COPIES: Final = frozenset({"OFFLOAD_F", "FETCH_F", "OFFLOAD_B", "FETCH_B"})


@final
@dataclass(frozen=True, kw_only=True)
class WeightPolicy:
    """Everything that the package knows of one place for weights, gradients and states.

    name            its name in plans and on the command line
    paper           where it comes from
    shards_weights  replicas divide weights and gradients as well as states, and gather a block for each use
    gathers_once    where replicas divide states, a step gathers weights once and scatters gradients once
    stays_loaded    weights come from the host once a step, and stay until the last backward
    lists_stages    the plan says which stages the host computes (`Stage.on_host`); the others are resident
    loads           how often a pass over all stages copies their weights to the device
    gradient_copies how often it copies their gradients to the host
    actions         the actions that it adds to a row, in the grammar of ir/schedule.py
    activations     the one policy of activations that runs with it; None where several do
    leaner          the policy that needs less of the device, which an error proposes
    text            what a report says of it; empty where a stage's devices hold all
    help            what the command line says of it
    """

    name: Weights
    paper: str
    shards_weights: bool = False
    gathers_once: bool = False
    stays_loaded: bool = False
    lists_stages: bool = False
    loads: int = 0
    gradient_copies: int = 0
    actions: frozenset[str]
    activations: Recompute | None = None
    leaner: Weights | None = None
    text: str
    help: str

    @property
    def on_host(self) -> bool:
        """Tells whether the host keeps at least the states of weights; one device has those of a stage."""
        return "LOAD" in self.actions

    @property
    def values_on_host(self) -> bool:
        """Tells whether values between stages are on the host until a stage needs them."""
        return "FETCH_F" in self.actions

    def state_shards(self, ranks: int, *, is_asked: bool) -> int:
        """Returns over how many devices the optimizer's states of a stage are divided.

        `ranks` hold the same weights and can divide them, those that share sequences as replicas do;
        `is_asked`: replicas that do so were asked for.
        """
        shared = not self.on_host and (is_asked or self.shards_weights)
        return ranks if shared else 1

    def copies(self, passes: int) -> tuple[int, int]:
        """Returns how often a step copies all weights to the device, and all gradients to the host, where it
        passes over the stages so many times.
        """
        times = 1 if self.stays_loaded else passes
        return self.loads * times, self.gradient_copies * times

    def allows(self, activations: Recompute) -> bool:
        """Tells whether stages with this policy of activations run; where the host keeps weights, activations
        cannot go there.
        """
        if self.activations is not None:
            return activations == self.activations
        return not (self.on_host and activation_policy(activations).uses_host)

    def allowed(self, activations: Iterable[Recompute]) -> tuple[Recompute, ...]:
        """Returns those of these policies of activations that run with it."""
        return tuple(name for name in activations if self.allows(name))


RESIDENT: Final = WeightPolicy(
    name="resident",
    paper="Rajbhandari et al., arXiv 1910.02054, sec. 5.1",
    gathers_once=True,
    actions=_GATHERS,
    text="",
    help="gathered once per step",
)
SHARDED: Final = WeightPolicy(
    name="sharded",
    paper="Rajbhandari et al., arXiv 1910.02054, sec. 5.3",
    shards_weights=True,
    actions=_GATHERS,
    text="weights sharded",
    help="gathered block by block",
)
HOST_OPTIMIZER: Final = WeightPolicy(
    name="host-optimizer",
    paper="Ren et al., arXiv 2101.06840",
    stays_loaded=True,
    loads=1,
    gradient_copies=1,
    actions=_LOADS,
    text="optimizer on the host",
    help="the optimizer's states",
)
HOST: Final = WeightPolicy(
    name="host",
    paper="Rajbhandari et al., arXiv 2104.07857, sec. 6.2",
    # Once for the forwards and once for the backwards.
    loads=2,
    gradient_copies=1,
    actions=_LOADS,
    leaner="host-activations",
    text="weights on the host",
    help="also weights and gradients, which are copied stage by stage",
)
HOST_ACTIVATIONS: Final = WeightPolicy(
    name="host-activations",
    paper="Pudipeddi et al., arXiv 2002.05645",
    loads=2,
    gradient_copies=1,
    actions=_LOADS | _COPIES,
    # What stages receive is on the host, and they compute the rest from it.
    activations=RECOMPUTE.name,
    text="weights and activations on the host",
    help="also values between stages",
)
HOST_COMPUTED: Final = WeightPolicy(
    name="host-computed",
    paper="Chen et al., SOSP 2025, doi 10.1145/3731569.3764843",
    lists_stages=True,
    actions=frozenset(),
    text="some stages computed on the host",
    help="large frozen weights stay in host memory, and the host computes with them",
)

_RECORDS: Final = (RESIDENT, SHARDED, HOST_OPTIMIZER, HOST, HOST_ACTIVATIONS, HOST_COMPUTED)
_POLICIES: Final[Mapping[str, WeightPolicy]] = MappingProxyType({policy.name: policy for policy in _RECORDS})
# In these degrees something is on the host; the least comes first.
HOSTED: Final[tuple[Weights, ...]] = tuple(p.name for p in _POLICIES.values() if p.on_host)
# The degrees of offload; in the first one nothing is on the host.
DEGREES: Final[tuple[Weights, ...]] = (RESIDENT.name, *HOSTED)


def weight_policies() -> tuple[WeightPolicy, ...]:
    """Returns all records."""
    return tuple(_POLICIES.values())


def weight_policy(name: Weights) -> WeightPolicy:
    """Returns the record of the policy of this name."""
    return _POLICIES[name]
