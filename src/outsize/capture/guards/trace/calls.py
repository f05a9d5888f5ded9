"""Notes what a call reads, and what it returns where that is known before it runs."""

from __future__ import annotations

import functools
import operator
import weakref
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Final, final

from outsize.capture.guards.consumed import is_consumed
from outsize.capture.guards.lookup import UNKNOWN, Method, Place, instance_dict
from outsize.capture.guards.symbolic_numbers import PlantedNumbers, is_symbolic
from outsize.capture.guards.trace.reads import EntryReads
from outsize.capture.guards.trace.shadow_stack import (
    BoundMethod,
    NewIterator,
    ShadowStack,
    StackEntry,
    is_known,
    unproxied,
)
from outsize.capture.guards.trace.user_code import is_torchs, is_user_code
from outsize.capture.guards.values import is_container

_CHANGES: Final = frozenset(
    (
        *("append", "extend", "insert", "add", "update", "clear", "remove", "discard", "appendleft", "sort"),
        *("extendleft", "reverse", "rotate", "difference_update", "intersection_update", "fill", "put"),
        *("symmetric_difference_update", "__setitem__", "__delitem__"),
    )
)
_CHANGES_AND_READS: Final = frozenset(("pop", "popitem", "setdefault", "popleft"))
_LOOKS_AT_NOTHING: Final = (isinstance, issubclass, type, id, callable)
_GETTERS: Final = (operator.attrgetter, operator.itemgetter)


@final
class CallReads:
    """Notes what calls look into, through `reads`; `numbers` are followed meanwhile."""

    def __init__(self, reads: EntryReads, numbers: PlantedNumbers | None) -> None:
        self._reads, self._notes, self._numbers = reads, reads.notes, numbers

    def begin(
        self, frame: FrameType, state: ShadowStack, callee: StackEntry, arguments: list[StackEntry]
    ) -> None:
        """Notes what a call looks into; its result is known when it returns."""
        callee = StackEntry(_bound(callee.value), callee.text)
        value = callee.value
        state.begins_call(value)
        result = self._known_call(frame, callee, arguments)
        if result is UNKNOWN and not self._passes_on(frame, callee):
            self._reads.look_into(frame, arguments)
            if value is not len:
                self._reads.hand_over(frame, arguments)
            if value is not UNKNOWN:
                result = self._reads.made_of([callee, *arguments])
        text = f"{callee.text}(...)"
        follows = isinstance(value, FunctionType | Method | MethodType) or value is UNKNOWN

        def push(_offset: int) -> None:
            returned = result if result is not UNKNOWN else state.returned if follows else UNKNOWN
            state.entries.append(StackEntry(returned, text))

        state.behind_instruction(push)

    def _passes_on(self, frame: FrameType, callee: StackEntry) -> bool:
        """Returns whether the call hands its arguments to code that is traced itself."""
        value = callee.value
        if value in _LOOKS_AT_NOTHING if isinstance(value, type | BuiltinFunctionType) else False:
            return True
        if isinstance(value, functools.partial):
            self._reads.look_into(frame, [callee])
            value = value.func
        if isinstance(value, type):
            value = value.__init__
        function = value.function if isinstance(value, Method) else getattr(value, "__func__", value)
        return isinstance(function, FunctionType) and is_user_code(function.__code__)

    def _known_call(self, frame: FrameType, callee: StackEntry, arguments: list[StackEntry]) -> Any:
        """Returns the result of a call that is a look-up or a change by itself; UNKNOWN for others."""
        value = callee.value
        if isinstance(value, BoundMethod):
            return self._call_of_method(frame, value, arguments, callee.text)
        if isinstance(value, Method) and is_consumed(value.owner):
            self._notes.use(value.owner, self._reads.site(frame, callee.text))
        if isinstance(value, weakref.ref) and self._notes.old.has(value) and not is_torchs(frame.f_code):
            return self._notes.referent(value, self._reads.site(frame, f"{callee.text}()"))
        if isinstance(value, _GETTERS) and arguments:
            return self._got(frame, value, arguments[0])
        if value in (iter, next) if isinstance(value, BuiltinFunctionType) and arguments else False:
            return self._iterated(frame, value, arguments[0])
        return self._call_of_builtin(frame, value, arguments)

    def _call_of_builtin(self, frame: FrameType, value: Any, arguments: list[StackEntry]) -> Any:
        if value is object.__getattribute__ and len(arguments) == 2:
            value = getattr
        if value is object.__setattr__:
            value = setattr
        if (value is getattr or value is hasattr) and len(arguments) > 1:
            found = self._look_up(frame, arguments[0], arguments[1].value)
            if value is getattr:
                return found
        if value is setattr and len(arguments) == 3 and isinstance(arguments[1].value, str):
            self._reads.set_attribute(frame, arguments[0], arguments[1].value, arguments[2].value)
        if self._numbers is not None:
            self._insist_on_known_types(self._numbers, value, arguments)
        if value is type and len(arguments) == 1 and self._notes.old.has(arguments[0].value):
            return type(arguments[0].value)
        if value is vars and len(arguments) == 1:
            return self._notes.attribute(arguments[0].value, "__dict__", self._reads.site(frame, "vars(...)"))
        return UNKNOWN

    def _look_up(self, frame: FrameType, owner: StackEntry, name: Any) -> Any:
        """Returns what `getattr(owner, name)` is; all attributes count where the name is not known."""
        if isinstance(name, str):
            return self._notes.attribute(owner.value, name, self._reads.site(frame, f"{owner.text}.{name}"))
        table = instance_dict(owner.value) if self._notes.old.has(owner.value) else None
        if table is not None and not isinstance(owner.value, type | ModuleType):
            self._notes.items(table, self._reads.site(frame, owner.text))
        return UNKNOWN

    def _insist_on_known_types(
        self, numbers: PlantedNumbers, callee: Any, arguments: list[StackEntry]
    ) -> None:
        """Checks that `type` is not asked of a symbolic number, which has a type of its own."""
        values = [argument.value for argument in arguments]
        if callee is type and len(values) == 1:
            asks = is_symbolic(values[0]) or not is_known(values[0])
        else:  # map(type, numbers)
            asks = callee is not isinstance and callee is not issubclass and any(v is type for v in values)
        if asks:
            numbers.refuse_all()

    def _got(self, frame: FrameType, getter: Any, owner: StackEntry) -> Any:
        """Notes what an attrgetter or itemgetter reads, and returns it where it is one value."""
        results: list[Any] = []
        for wanted in getter.__reduce__()[1]:
            value: Any = owner.value
            steps = wanted.split(".") if isinstance(getter, operator.attrgetter) else (wanted,)
            for step in steps:
                value = self._got_one(frame, getter, StackEntry(value, owner.text), step)
            results.append(value)
        return results[0] if len(results) == 1 else UNKNOWN

    def _got_one(self, frame: FrameType, getter: Any, owner: StackEntry, step: Any) -> Any:
        if owner.value is UNKNOWN or not self._notes.old.has(owner.value):
            return UNKNOWN
        if isinstance(getter, operator.attrgetter):
            return self._notes.attribute(owner.value, step, self._reads.site(frame, f"{owner.text}.{step}"))
        if is_container(owner.value):
            return self._notes.item(owner.value, step, self._reads.site(frame, f"{owner.text}[{step!r}]"))
        return UNKNOWN

    def _iterated(self, frame: FrameType, function: Any, argument: StackEntry) -> Any:
        """Returns what `iter(argument)` or `next(argument)` is."""
        value = argument.value
        if function is iter:
            return self._reads.iterator_over(frame, argument)
        if isinstance(value, NewIterator):
            return next(iter(value.container), UNKNOWN)
        self._reads.use(frame, [argument])
        return UNKNOWN

    def _call_of_method(
        self, frame: FrameType, method: BoundMethod, arguments: list[StackEntry], text: str
    ) -> Any:
        name, container = method
        if is_consumed(container):
            self._notes.use(container, self._reads.site(frame, text))
            return UNKNOWN
        if isinstance(container, ContextVar):
            return self._call_of_context(frame, method, text)
        container = unproxied(container)
        if isinstance(method.owner, MappingProxyType) and name != "get":
            self._notes.items(container, self._reads.site(frame, text))
            return UNKNOWN
        if name == "get" and arguments and is_known(arguments[0].value):
            return self._notes.item(container, arguments[0].value, self._reads.site(frame, text))
        if name in _CHANGES:
            for argument in arguments:
                self._notes.log(argument.text)
            self._notes.writes.mutate(container, self._reads.site(frame, text))
        else:
            self._notes.content(container, self._reads.site(frame, text))
            if name in _CHANGES_AND_READS:
                self._notes.writes.mutate(container, self._reads.site(frame, text))
        return UNKNOWN

    def _call_of_context(self, frame: FrameType, method: BoundMethod, text: str) -> Any:
        variable, site = method.owner, self._reads.site(frame, text)
        if method.name == "get":
            return self._notes.read(Place("context", variable, None), site)
        if method.name == "set":
            self._notes.writes.set_context(variable, site)
        return UNKNOWN


def _bound(function: Any) -> Any:
    """Returns what a method written in C is bound to, with its name."""
    if not isinstance(function, BuiltinFunctionType | MethodWrapperType):
        return function
    owner = function.__self__
    is_bound = owner is not None and not isinstance(owner, ModuleType | type)
    return BoundMethod(function.__name__, owner) if is_bound else function
