"""Follows Python's instructions on the shadow stack of a frame, one method for each kind."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, FrameType, MappingProxyType
from typing import Any, Final, final

from torch import Tensor

from outsize.capture.guards.consumed import is_consumed
from outsize.capture.guards.lookup import UNKNOWN, Place
from outsize.capture.guards.symbolic_numbers import PlantedNumbers
from outsize.capture.guards.trace.calls import CallReads
from outsize.capture.guards.trace.opcodes import (
    CALLS_NAME_FUNCTION_FIRST,
    FIRST_IN_PLACE,
    LOADS_METHODS_AS_ATTRIBUTES,
    LOOPS_LEAVE_THEIR_ITERATOR,
    Operation,
)
from outsize.capture.guards.trace.reads import EntryReads
from outsize.capture.guards.trace.shadow_stack import (
    NULL,
    NULL_ENTRY,
    UNKNOWN_ENTRY,
    BoundMethod,
    MadeOf,
    ShadowStack,
    StackEntry,
    cells_of,
    is_known,
    keys_in,
    unproxied,
)
from outsize.capture.guards.values import is_container

# Instructions that take values from an iterator on the stack.
_TAKES_VALUES: Final = frozenset(
    (
        "UNPACK_EX",
        "LIST_EXTEND",
        "SET_UPDATE",
        "DICT_UPDATE",
        "DICT_MERGE",
        "CONTAINS_OP",
        "GET_YIELD_FROM_ITER",
    )
)
_PLAIN_TEXTS: Final = (str, int, float, bool, type(None))
_ADD, _REMAINDER = 0, 6  # Operators of BINARY_OP.


@final
class Instructions:
    """Follows instructions of frames, and notes what they read and write through `reads`.

    `born` has the code of functions that the recording itself has made.
    """

    def __init__(self, reads: EntryReads, numbers: PlantedNumbers | None) -> None:
        self._reads, self._notes, self._calls = reads, reads.notes, CallReads(reads, numbers)
        self.born: set[CodeType] = set()

    def run(self, frame: FrameType, state: ShadowStack, offset: int) -> None:
        """Follows the instruction at `offset` of the frame, which is about to run."""
        state.next_instruction(offset)
        operation = state.operations.get(offset)
        if operation is None:
            return
        handler = _HANDLERS.get(operation.name)
        if handler is not None:
            handler(self, frame, state, operation)
        elif operation.pops is None:
            self._reads.look_into(frame, state.entries)
            state.entries.clear()
        else:
            if operation.pops:
                popped = state.pop(operation.pops)
                self._reads.look_into(frame, popped)
                if operation.name in _TAKES_VALUES:
                    self._reads.use(frame, popped)
            if operation.pushes > 0:
                state.entries.extend([UNKNOWN_ENTRY] * operation.pushes)

    def _load_fast(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        name = operation.value
        state.entries.append(StackEntry(state.local(frame, name), name))

    def _load_const(self, _frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        state.entries.append(StackEntry(operation.value, repr(operation.value)))

    def _make_function(self, _frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        *_, code = state.pop(operation.pops or 1)
        if isinstance(code.value, CodeType):
            self.born.add(code.value)
        state.entries.append(UNKNOWN_ENTRY)

    def _load_two_fast(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        for name in operation.value:
            state.entries.append(StackEntry(frame.f_locals.get(name, UNKNOWN), name))

    def _store_load_fast(self, _frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        (entry,) = state.pop(1)
        state.changed_locals()
        stored, loaded = operation.value
        state.entries.append(
            entry if stored == loaded else StackEntry(_frame.f_locals.get(loaded, UNKNOWN), loaded)
        )

    def _store_two_fast(self, _frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        state.pop(2)
        state.changed_locals()

    def _load_and_clear(self, _frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        state.entries.append(UNKNOWN_ENTRY)
        state.changed_locals()

    def _push_null(self, _frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        state.entries.append(NULL_ENTRY)

    def _load_global(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        state.push(self._global(frame, operation.value), is_called=bool(operation.arg & 1))

    def _load_name(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        state.push(self._global(frame, operation.value))

    def _global(self, frame: FrameType, name: str) -> StackEntry:
        table = frame.f_globals
        if name in table:
            return StackEntry(
                self._notes.read(Place("item", table, name), self._reads.site(frame, name)), name
            )
        return StackEntry(frame.f_builtins.get(name, UNKNOWN), name)

    def _load_deref(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        name, value = operation.value, frame.f_locals.get(operation.value, UNKNOWN)
        for cell in cells_of(state, name):
            value = self._notes.read(Place("cell", cell, None), self._reads.site(frame, name))
        state.entries.append(StackEntry(value, name))

    def _load_attribute(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        if LOADS_METHODS_AS_ATTRIBUTES and operation.arg & 1:
            self._load_method(frame, state, operation)
            return
        (owner,) = state.pop(1)
        self._load(frame, state, owner, operation.value)

    def _load_of_super(self, _frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        state.pop(3)
        state.push(UNKNOWN_ENTRY, is_called=bool(operation.arg & 1))

    def _load(
        self, frame: FrameType, state: ShadowStack, owner: StackEntry, name: str, *, is_called: bool = False
    ) -> None:
        text = f"{owner.text}.{name}"
        value: Any = UNKNOWN
        if owner.value is object:
            value = getattr(object, name, UNKNOWN)
        elif owner.value is not UNKNOWN and self._notes.old.has(owner.value):
            value = self._notes.attribute(owner.value, name, self._reads.site(frame, text))
        if value is not UNKNOWN:
            state.push(StackEntry(value, text), is_called=is_called)
            return
        state.got(UNKNOWN)

        def push(_offset: int) -> None:
            # A property or `__getattr__` has run as a frame of its own.
            returned = state.returned
            if returned is UNKNOWN and isinstance(owner.value, Tensor | MadeOf):
                returned = self._reads.made_of([owner])
            state.push(StackEntry(returned, text), is_called=is_called)

        state.behind_instruction(push)

    def _load_method(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        (owner,) = state.pop(1)
        name = operation.value
        is_in_c = is_container(owner.value) or isinstance(owner.value, ContextVar | MappingProxyType)
        if (is_in_c or is_consumed(owner.value)) and self._notes.old.has(owner.value):
            method = BoundMethod(name, owner.value)
            state.push(StackEntry(method, f"{owner.text}.{name}"), is_called=True)
        else:
            self._load(frame, state, owner, name, is_called=True)

    def _binary_subscr(self, frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        owner, key = state.pop(2)
        value: Any = UNKNOWN
        text = f"{owner.text}[{key.text}]"
        container = unproxied(owner.value)
        if container is not UNKNOWN and is_container(container) and self._notes.old.has(owner.value):
            site = self._reads.site(frame, text)
            if not is_known(key.value):
                self._reads.look_into(frame, [owner])
            else:
                value = self._notes.item(container, key.value, site)
        if value is not UNKNOWN:
            state.entries.append(StackEntry(value, text))
            return
        state.got(UNKNOWN)
        state.behind_instruction(lambda _offset: state.entries.append(StackEntry(state.returned, text)))

    def _call(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        self._call_of(frame, state, state.pop(operation.arg + 2))

    def _call_with_keywords(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        *entries, _names = state.pop(operation.arg + 3)
        self._call_of(frame, state, entries)

    def _call_of(self, frame: FrameType, state: ShadowStack, entries: list[StackEntry]) -> None:
        first, second, *arguments = entries
        if CALLS_NAME_FUNCTION_FIRST:
            callee = first
            arguments = arguments if second.value is NULL or second.value is UNKNOWN else [second, *arguments]
        elif first.value is NULL or first.value is UNKNOWN:
            callee = second
        else:
            callee, arguments = first, [second, *arguments]
        self._calls.begin(frame, state, callee, arguments)

    def _call_with_star(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        first, second, *arguments = state.pop(operation.pops or 3)
        self._calls.begin(frame, state, first if CALLS_NAME_FUNCTION_FIRST else second, arguments)

    def _binary_op(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        left, right = state.pop(2)
        in_place = operation.arg >= FIRST_IN_PLACE
        if in_place and isinstance(left.value, list | set | dict) and self._notes.old.has(left.value):
            self._notes.writes.mutate(left.value, self._reads.site(frame, left.text))
            self._reads.look_into(frame, [right])
            state.entries.append(left)
            return
        self._reads.look_into(frame, [left, right])
        text = None if in_place else _computed_text(operation.arg, left.value, right.value)
        value = self._reads.made_of([left, right]) if text is None else text
        state.entries.append(StackEntry(value, "?" if text is None else repr(text)))

    def _format(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        """Follows the parts of an f-string, which may be the name of an attribute or a key."""
        value, *spec = popped = state.pop(operation.pops or 1)
        self._reads.look_into(frame, popped)
        conversion = operation.arg & 3 if operation.name in ("FORMAT_VALUE", "CONVERT_VALUE") else 0
        text = _formatted(value.value, conversion, spec[0].value if spec else "")
        state.entries.append(UNKNOWN_ENTRY if text is None else StackEntry(text, repr(text)))

    def _build_string(self, _frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        parts = [entry.value for entry in state.pop(operation.arg)]
        is_text = all(type(part) is str for part in parts)
        state.entries.append(StackEntry("".join(parts), repr("".join(parts))) if is_text else UNKNOWN_ENTRY)

    def _drop(self, _frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        """Takes values from the stack without a look into them."""
        state.pop(operation.pops or 0)
        state.entries.extend([UNKNOWN_ENTRY] * max(0, operation.pushes))

    def _store_fast(self, _frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        state.pop(1)
        state.changed_locals()

    def _delete_fast(self, _frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        state.changed_locals()

    def _store_attribute(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        value, owner = state.pop(2)
        self._reads.set_attribute(frame, owner, operation.value, value.value)

    def _delete_attribute(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        (owner,) = state.pop(1)
        self._reads.set_attribute(frame, owner, operation.value, UNKNOWN)

    def _store_subscr(self, frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        value, owner, key = state.pop(3)
        self._reads.look_into(frame, [value])
        self._reads.set_item(frame, owner, key.value, value.value)

    def _delete_subscr(self, frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        owner, key = state.pop(2)
        self._reads.set_item(frame, owner, key.value, UNKNOWN)

    def _store_global(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        (entry,) = state.pop(1)
        place = Place("item", frame.f_globals, operation.value)
        self._notes.writes.write(
            place, entry.value, self._reads.site(frame, operation.value), keys_in(entry.value)
        )

    def _store_deref(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        (entry,) = state.pop(1)
        site = self._reads.site(frame, operation.value)
        for cell in cells_of(state, operation.value):
            self._notes.writes.write(Place("cell", cell, None), entry.value, site, keys_in(entry.value))

    def _unpack(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        entry = state.pop(1)[0]
        self._reads.look_into(frame, [entry])
        self._reads.use(frame, [entry])
        items = list(entry.value) if isinstance(entry.value, tuple | list) else []
        if len(items) != operation.arg:
            items = [UNKNOWN] * operation.arg
        state.entries.extend(
            StackEntry(item, f"{entry.text}[{n}]") for n, item in reversed(list(enumerate(items)))
        )

    def _get_iterator(self, frame: FrameType, state: ShadowStack, _operation: Operation) -> None:
        (entry,) = state.pop(1)
        state.entries.append(StackEntry(self._reads.iterator_over(frame, entry), entry.text))

    def _match_class(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        subject, kind, names = state.pop(3)
        wanted = names.value if isinstance(names.value, tuple) else ()
        wanted += getattr(kind.value, "__match_args__", ())[: operation.arg]
        for name in wanted if subject.value is not UNKNOWN and self._notes.old.has(subject.value) else ():
            self._notes.attribute(subject.value, name, self._reads.site(frame, f"{subject.text}.{name}"))
        state.entries.append(UNKNOWN_ENTRY)

    def _for_iter(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        self._reads.use(frame, state.entries[-1:])

        def after(offset: int) -> None:
            if offset == operation.next:
                state.entries.append(UNKNOWN_ENTRY)
            elif not LOOPS_LEAVE_THEIR_ITERATOR:
                state.pop(1)

        state.behind_instruction(after)

    def _jump_or_pop(self, frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        self._reads.look_into(frame, state.entries[-1:])

        def after(offset: int) -> None:
            if offset != operation.value:
                state.pop(1)

        state.behind_instruction(after)

    def _copy(self, _frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        depth = operation.arg
        entry = state.entries[-depth] if depth <= len(state.entries) else UNKNOWN_ENTRY
        if isinstance(entry.value, MadeOf):
            entry = state.entries[-depth] = UNKNOWN_ENTRY  # It also goes elsewhere.
        state.entries.append(entry)

    def _swap(self, _frame: FrameType, state: ShadowStack, operation: Operation) -> None:
        depth = operation.arg
        missing = depth - len(state.entries)
        if missing > 0:
            state.entries[:0] = [UNKNOWN_ENTRY] * missing
        state.entries[-depth], state.entries[-1] = state.entries[-1], state.entries[-depth]


_HANDLERS: Final[dict[str, Callable[[Instructions, FrameType, ShadowStack, Operation], None]]] = {
    "LOAD_FAST": Instructions._load_fast,
    "LOAD_FAST_CHECK": Instructions._load_fast,
    "LOAD_FAST_LOAD_FAST": Instructions._load_two_fast,
    "LOAD_FAST_AND_CLEAR": Instructions._load_and_clear,
    "STORE_FAST_LOAD_FAST": Instructions._store_load_fast,
    "STORE_FAST_STORE_FAST": Instructions._store_two_fast,
    "LOAD_SUPER_ATTR": Instructions._load_of_super,
    "LOAD_CONST": Instructions._load_const,
    "PUSH_NULL": Instructions._push_null,
    "MAKE_FUNCTION": Instructions._make_function,
    "LOAD_GLOBAL": Instructions._load_global,
    "LOAD_DEREF": Instructions._load_deref,
    "LOAD_CLASSDEREF": Instructions._load_deref,
    "LOAD_ATTR": Instructions._load_attribute,
    "LOAD_METHOD": Instructions._load_method,
    "BINARY_SUBSCR": Instructions._binary_subscr,
    "CALL": Instructions._call,
    "CALL_KW": Instructions._call_with_keywords,
    "CALL_FUNCTION_EX": Instructions._call_with_star,
    "BINARY_OP": Instructions._binary_op,
    "FORMAT_VALUE": Instructions._format,
    "FORMAT_SIMPLE": Instructions._format,
    "FORMAT_WITH_SPEC": Instructions._format,
    "CONVERT_VALUE": Instructions._format,
    "BUILD_STRING": Instructions._build_string,
    "IS_OP": Instructions._drop,
    "POP_TOP": Instructions._drop,
    "STORE_FAST": Instructions._store_fast,
    "DELETE_FAST": Instructions._delete_fast,
    "STORE_NAME": Instructions._drop,
    "RETURN_VALUE": Instructions._drop,
    **{f"POP_JUMP_{way}_IF_NONE": Instructions._drop for way in ("FORWARD", "BACKWARD")},
    **{f"POP_JUMP_{way}_IF_NOT_NONE": Instructions._drop for way in ("FORWARD", "BACKWARD")},
    "POP_JUMP_IF_NONE": Instructions._drop,
    "POP_JUMP_IF_NOT_NONE": Instructions._drop,
    "RETURN_CONST": Instructions._drop,
    "SET_FUNCTION_ATTRIBUTE": Instructions._drop,
    "STORE_ATTR": Instructions._store_attribute,
    "DELETE_ATTR": Instructions._delete_attribute,
    "STORE_SUBSCR": Instructions._store_subscr,
    "DELETE_SUBSCR": Instructions._delete_subscr,
    "STORE_GLOBAL": Instructions._store_global,
    "STORE_DEREF": Instructions._store_deref,
    "UNPACK_SEQUENCE": Instructions._unpack,
    "FOR_ITER": Instructions._for_iter,
    "GET_ITER": Instructions._get_iterator,
    "MATCH_CLASS": Instructions._match_class,
    "JUMP_IF_FALSE_OR_POP": Instructions._jump_or_pop,
    "JUMP_IF_TRUE_OR_POP": Instructions._jump_or_pop,
    "COPY": Instructions._copy,
    "SWAP": Instructions._swap,
}


def _formatted(value: Any, conversion: int, spec: Any) -> str | None:
    """Returns the text of a plain value in an f-string, converted first (1: str, 2: repr, 3: ascii); None for
    others.
    """
    if type(value) not in _PLAIN_TEXTS or type(spec) is not str:
        return None
    converted: Any = (value, str(value), repr(value), ascii(value))[conversion]
    try:
        return format(converted, spec)
    except ValueError:
        return None


def _computed_text(operator_number: int, left: Any, right: Any) -> str | None:
    """Returns what `+` or `%` makes of a text and a plain value; None for others."""
    if type(left) is not str or type(right) not in _PLAIN_TEXTS:
        return None
    try:
        if operator_number == _ADD:
            return left + right
        return left % right if operator_number == _REMAINDER else None
    except (TypeError, ValueError):
        return None
