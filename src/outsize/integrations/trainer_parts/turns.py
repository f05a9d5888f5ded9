"""Problem: a framework's loss calls the model in its own Python, batch by batch, and waits for each answer.

    one by one    loss(0): call, read, backward      loss(1): call, read, backward
    in turns      loss(0): call |                                  | read, backward
                                  loss(1): call | both calls run   |                 loss(1): read, backward

Each task has a thread, and one of them runs at a time: up to its next request, then the next task, in the
order of the tasks. When all wait, their requests are answered together, and they go on in the same order. So
what tasks do with objects that they share happens in one order, the same on every rank.

A task may have changed modules when it asks, such as adapters that are off for the call of a reference, and
changes them back later. What it has changed is taken back until it goes on, and requests are answered
together only where their modules are in one state.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from threading import Lock, Thread, current_thread
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn

from outsize.device.accelerators import accelerator_type, current_device

Answer = Callable[[Sequence[Any]], Sequence[Any]]
_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules", "forward", "generate"})
_VALUES: Final = (bool, int, float, str, tuple, list, dict, set, type(None))


@final
class PythonState(NamedTuple):
    """The attributes of modules, and which of their parameters want gradients."""

    attributes: Mapping[nn.Module, dict[str, Any]]
    wanted: Mapping[nn.Module, dict[str, bool]]
    counts: list[int]  # Of all that each module has, tables among it.

    def is_kept(self) -> bool:
        """Tells whether the modules are in this very state; it costs less than to take theirs and compare."""
        for (module, attributes), count in zip(self.attributes.items(), self.counts, strict=True):
            own = vars(module)
            if len(own) != count or any(own.get(key, own) is not v for key, v in attributes.items()):
                return False
            for name, wanted in self.wanted[module].items():
                weight = module._parameters.get(name)
                if weight is None or weight.requires_grad != wanted:
                    return False
        return True

    def switch(self, other: PythonState) -> None:
        """Sets the modules, which are in this state, to another; what is equal in both is left alone."""
        for module, attributes in other.attributes.items():
            own, before = vars(module), self.attributes.get(module, {})
            for key in before.keys() - attributes.keys():
                own.pop(key, None)
            own.update({k: v for k, v in attributes.items() if k not in before or before[k] is not v})
        for module, flags in other.wanted.items():
            before = self.wanted.get(module, {})
            for name, wanted in flags.items():
                weight = module._parameters.get(name)
                if weight is not None and before.get(name) != wanted:
                    weight.requires_grad_(wanted)

    def take_over(self, before: PythonState, after: PythonState) -> None:
        """Takes over what has changed between two other states, where this one was like the first."""
        for module, attributes in after.attributes.items():
            own, known = self.attributes[module], before.attributes[module]
            for key in known.keys() - attributes.keys():
                own.pop(key, None)
            own.update({k: v for k, v in attributes.items() if k not in known or known[k] is not v})
        for at, (count, known_count) in enumerate(zip(after.counts, before.counts, strict=True)):
            self.counts[at] += count - known_count
        for module, flags in after.wanted.items():
            known_flags = before.wanted[module]
            changed = {name: wanted for name, wanted in flags.items() if known_flags.get(name) != wanted}
            self.wanted[module].update(changed)

    def is_like(self, other: PythonState) -> bool:
        """Tells whether modules in the two states compute the same."""
        return self.wanted == other.wanted and all(
            own.keys() == other.attributes[module].keys()
            and all(_is_same(value, other.attributes[module][key]) for key, value in own.items())
            for module, own in self.attributes.items()
        )


@final
class PythonStates:
    """Takes down what Python has set in some modules."""

    def __init__(self, modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._modules = modules

    def take(self) -> PythonState:
        """Returns the state that the modules are in."""
        every = dict.fromkeys(each for module in self._modules() for each in module.modules())
        return PythonState(
            {each: {key: v for key, v in vars(each).items() if key not in _TABLES} for each in every},
            {
                each: {name: w.requires_grad for name, w in each._parameters.items() if w is not None}
                for each in every
            },
            [len(vars(each)) for each in every],
        )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, _VALUES):
        return False
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # A list of tensors says nothing.
        return False


@final
class _Abandoned(BaseException):
    """Ends a task whose neighbour has failed."""


@final
class _TurnTask:
    """One task and its thread."""

    def __init__(self, run: Callable[[], Any], place: torch.device | None) -> None:
        self._go, self._parked = Lock(), Lock()
        self._go.acquire()
        self._parked.acquire()
        self._run, self._place, self._grad = run, place, torch.is_grad_enabled()
        self._error: BaseException | None = None
        self._is_abandoned = self.has_ended = False
        self.result: Any = None
        self.request: Any = None
        self.answer: Any = None
        self.state: PythonState | None = None
        context = contextvars.copy_context()
        self._thread = Thread(target=lambda: context.run(self._main), daemon=True)
        vars(self._thread)["task"] = self
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._is_abandoned:
                if self._place is not None:  # Each thread of torch begins at the first device.
                    torch.accelerator.set_device_index(self._place)
                with torch.set_grad_enabled(self._grad):
                    self.result = self._run()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        self.has_ended = True
        self._parked.release()

    def go_on(self) -> None:
        """Runs the task until it asks or ends. Raises what it has raised."""
        self._go.release()
        self._parked.acquire()
        if self._error is not None:
            raise self._error

    def ask(self, request: Any) -> Any:
        """Returns the answer to a request, in the task's thread."""
        self.request = request
        self._parked.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned
        answer, self.answer = self.answer, None
        if isinstance(answer, _Failed):
            raise answer.error
        return answer

    def abandon(self) -> None:
        """Ends the task where it is."""
        if not self.has_ended:
            self._is_abandoned = True
            self._go.release()
        self._thread.join()


@final
class _Failed(NamedTuple):
    """The answer to requests that have failed together: the first of the tasks raises it."""

    error: Exception


@final
class Turns:
    """Runs tasks in turns; `answer` returns the answers to several requests."""

    def __init__(self, answer: Answer, states: PythonStates) -> None:
        self._answer, self._states = answer, states

    def ask(self, request: Any) -> Any:
        """Returns the answer to a request, which is answered with those of the other tasks; outside of a task
        it is answered by itself.
        """
        task: _TurnTask | None = vars(current_thread()).get("task")
        return self._answer([request])[0] if task is None else task.ask(request)

    def run(self, runs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Returns what each task returns. Raises what one of them raises; the others end where they are."""
        if len(runs) == 1 or "task" in vars(current_thread()):
            return [run() for run in runs]
        place = None if accelerator_type() is None else current_device()
        tasks = [_TurnTask(run, place) for run in runs]
        base = self._states.take()
        try:
            for task in tasks:
                base = self._go_on(task, base)
            while waiting := [task for task in tasks if not task.has_ended]:
                self._answer_all(waiting, base)
                for task in waiting:
                    base = self._go_on(task, base)
        finally:
            for task in tasks:
                task.abandon()
            self._states.take().switch(base)
        return [task.result for task in tasks]

    def _go_on(self, task: _TurnTask, base: PythonState) -> PythonState:
        """Runs a task until it asks or ends; returns the state of the modules for others."""
        if task.state is not None:
            base.switch(task.state)
            task.state = None
        task.go_on()
        if base.is_kept():
            return base
        now = self._states.take()
        if task.has_ended or now.is_like(base):
            return now
        task.state = now
        now.switch(base)
        return base

    def _answer_all(self, waiting: Sequence[_TurnTask], base: PythonState) -> None:
        """Answers the requests of tasks, together where the modules are in one state."""
        kinds: list[PythonState] = []

        def kind_of(task: _TurnTask) -> int:
            own = base if task.state is None else task.state
            found = next((at for at, each in enumerate(kinds) if each.is_like(own)), None)
            if found is None:
                kinds.append(own)
            return len(kinds) - 1 if found is None else found

        for kind, members in groupby(waiting, kind_of):
            group = list(members)
            base.switch(kinds[kind])
            try:
                answers = self._answer([task.request for task in group])
            except Exception as error:
                answers = [_Failed(error) for _ in group]
            finally:
                self._keep_changes(kinds, kind, waiting, base)
                kinds[kind].switch(base)
            for task, answer in zip(group, answers, strict=True):
                task.answer = answer

    def _keep_changes(
        self, kinds: Sequence[PythonState], kind: int, waiting: Sequence[_TurnTask], base: PythonState
    ) -> None:
        """Takes what an answer has changed into all states: a model that is recorded first may get hooks, and
        a flag that it has them.
        """
        if kinds[kind].is_kept():
            return
        now = self._states.take()
        before = PythonState(
            {module: dict(attributes) for module, attributes in kinds[kind].attributes.items()},
            {module: dict(flags) for module, flags in kinds[kind].wanted.items()},
            list(kinds[kind].counts),
        )
        states = [*kinds, base, *(task.state for task in waiting if task.state is not None)]
        for state in {id(state): state for state in states}.values():
            state.take_over(before, now)
