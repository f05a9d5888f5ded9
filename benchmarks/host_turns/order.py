"""Plays steps whose stages devices take in turns, by three rules of who takes the next stage.

    in turns     what runs: stage s is on device s mod p in both passes (schedules/families.py)
    first free   the device that has ended its last stage first takes the next one, whose weights come ahead:
                 what a queue of stages does that any device takes from
    soonest      the device that is expected to end the stage first, by the speeds of devices and all that has
                 happened so far; it may pass a slow device over

A visit is a stage in one of the two passes: a step is one chain of them, forwards 0 to S - 1, then backwards
S - 1 to 0. A device has places for two stages: the weights of its next visit come while it computes, into the
place of the stage that it had before, unless they are still there. A microbatch is computed when the weights
are there, and the one before it on the device, and its value of the visit before. A backward may be on
another device than its forward, whose values are taken to be everywhere at no cost, which flatters the two
other rules. Each duration has a factor of its own, whose logarithm is normal.

In a chain visits end in their order, whatever their durations are, since the last microbatch of each needs
that of the visit before; so devices become free in the order of their visits, and "first free" is a fixed
round, too. Only at the turn of the passes it goes on round, where "in turns" goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PLACES: Final = 2
Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """A step: `work[visit]` are seconds of a microbatch and `copies[visit]` those of its weights on a device
    of speed 1; `speeds` and `links` are those of each device.
    """

    work: Seconds
    copies: Seconds
    microbatches: int
    speeds: Seconds
    links: Seconds

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.speeds)

    def bound_s(self) -> float:
        """Computing or copies, whichever is longer, if devices shared both by their speeds."""
        compute_s = self.microbatches * self.work.sum() / self.speeds.sum()
        return float(max(compute_s, self.copies.sum() / self.links.sum()))


@dataclass
class Played:
    """What has been played of a step: when each device's link is free, and which stages each device has, with
    the end of the last visit of each, the last one last.
    """

    chain: Chain
    noise: float
    drawn: np.random.Generator
    link_free_s: Seconds = field(init=False)
    held: list[dict[int, float]] = field(init=False)
    ready_s: Seconds = field(init=False)
    taken_by: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        count = self.chain.devices
        self.link_free_s, self.held = np.zeros(count), [{} for _ in range(count)]
        self.ready_s = np.zeros(self.chain.microbatches)

    def stage(self, number: int) -> int:
        """The stage of a visit."""
        stages = len(self.chain.work) // 2
        return number if number < stages else 2 * stages - 1 - number

    def place_free_s(self, device: int) -> float:
        """When a device has a place for the weights of another stage."""
        held = self.held[device]
        return next(iter(held.values())) if len(held) == PLACES else 0.0

    def ended_s(self, device: int) -> float:
        """When the last visit of a device ends."""
        return max(self.held[device].values(), default=0.0)

    def visit(self, number: int, device: int, factors: Seconds) -> tuple[float, Seconds]:
        """When the weights of a visit have come to a device, and when each microbatch is done there;
        `factors` are those of the copy and of each microbatch.
        """
        chain, come_s = self.chain, float(self.link_free_s[device])
        if self.stage(number) not in self.held[device]:
            come_s = max(come_s, self.place_free_s(device))
            come_s += chain.copies[number] / chain.links[device] * factors[0]
        now_s = max(come_s, self.ended_s(device))
        done = np.empty(chain.microbatches)
        each_s = chain.work[number] / chain.speeds[device] * factors[1:]
        for at in range(chain.microbatches):
            now_s = max(now_s, float(self.ready_s[at])) + float(each_s[at])
            done[at] = now_s
        return float(come_s), done

    def take(self, number: int, device: int) -> None:
        """Plays a visit on a device."""
        factors = np.exp(self.drawn.normal(0.0, self.noise, 1 + self.chain.microbatches))
        come_s, done = self.visit(number, device, factors)
        self.link_free_s[device], self.ready_s = come_s, done
        held, stage = self.held[device], self.stage(number)
        if held.pop(stage, None) is None and len(held) == PLACES:
            del held[next(iter(held))]
        held[stage] = float(done[-1])
        self.taken_by.append(device)


Rule = Callable[[Played, int], int]


def in_turns(played: Played, number: int) -> int:
    """The device of a visit that its stage says."""
    return played.stage(number) % played.chain.devices


def first_free(played: Played, number: int) -> int:
    """The device that has ended first; those that have done nothing come first, in their order. At the turn
    of the passes it is the one that has the last stage.
    """
    stages = len(played.chain.work) // 2
    if number == stages:
        return played.taken_by[-1]
    return min(range(played.chain.devices), key=lambda d: (played.ended_s(d), d))


def soonest(played: Played, number: int) -> int:
    """The device that is expected to end the visit first."""
    even = np.ones(1 + played.chain.microbatches)
    return min(range(played.chain.devices), key=lambda d: played.visit(number, d, even)[1][-1])


RULES: Final[dict[str, Rule]] = {"in turns": in_turns, "first free": first_free, "soonest": soonest}


def played(chain: Chain, rule: Rule, noise: float = 0.0, seed: int = 0) -> Played:
    """A step by a rule; the same seed draws the same factors for a visit, whoever takes it."""
    step = Played(chain, noise, np.random.default_rng(seed))
    for number in range(len(chain.work)):
        step.take(number, rule(step, number))
    return step


def step_s(chain: Chain, rule: Rule, noise: float, seed: int) -> float:
    """The seconds of a step."""
    return float(played(chain, rule, noise, seed).ready_s[-1])


def even(devices: int, stages: int, microbatches: int, copied: float) -> Chain:
    """Equal stages whose backward takes three forwards (with recompute); to copy the weights of a stage takes
    `copied` of what its forwards compute.
    """
    forward, backward = np.ones(stages), np.full(stages, 3.0)
    copies = np.full(2 * stages, copied * microbatches)
    alike = np.ones(devices)
    return Chain(np.concatenate((forward, backward)), copies, microbatches, alike, alike)


def in_proportion(chain: Chain) -> Chain:
    """The same model in as many stages, each as long as its device is fast, or its link where that is what
    the device waits for; taken in turns.
    """
    stages, count = len(chain.work) // 2, chain.devices
    pace_s = np.maximum(
        chain.microbatches * chain.work.sum() / chain.speeds, chain.copies.sum() / chain.links
    )
    own = 1 / pace_s[np.arange(stages) % count]
    share = own / own.sum() * stages
    both = np.concatenate((share, share[::-1]))
    return replace(chain, work=chain.work * both, copies=chain.copies * both)


def slower(chain: Chain, *, speed: float = 1.0, link: float = 1.0) -> Chain:
    """The same where the last device computes or copies at a share of the others' speed."""
    speeds, links = chain.speeds.copy(), chain.links.copy()
    speeds[-1], links[-1] = speed, link
    return replace(chain, speeds=speeds, links=links)


CASES: Final[dict[str, Callable[[Chain], Chain]]] = {
    "equal devices": lambda chain: chain,
    "one computes at 0.5": lambda chain: slower(chain, speed=0.5),
    "one link at 0.25": lambda chain: slower(chain, link=0.25),
}
NOISES: Final = (0.0, 0.1, 0.3)
# Copies far below what forwards compute, and above it.
COPIED: Final = (0.2, 1.2)


def compared(seeds: int) -> list[dict[str, Any]]:
    """A row for each case: medians over seeds, as shares of the step in turns."""
    rows = list[dict[str, Any]]()
    for devices, stages, count in ((4, 32, 8), (8, 64, 16)):
        for name, change in CASES.items():
            for copied in COPIED:
                chain = change(even(devices, stages, count, copied))
                for noise in NOISES:
                    rows.append({"devices": devices, "stages": stages, "microbatches": count, "case": name})
                    rows[-1] |= {"copied": copied, "noise": noise} | _shares(chain, noise, range(seeds))
    return rows


def _shares(chain: Chain, noise: float, seeds: Sequence[int]) -> dict[str, float]:
    seeds = seeds[:1] if not noise else seeds
    found = {name: [step_s(chain, rule, noise, seed) for seed in seeds] for name, rule in RULES.items()}
    found["in proportion"] = [step_s(in_proportion(chain), in_turns, noise, seed) for seed in seeds]
    base = np.array(found["in turns"])
    shares = {name: float(np.median(np.array(each) / base)) for name, each in found.items()}
    return shares | {"bound": float(np.median(chain.bound_s() / base))}
