"""The one owner of what depends on the version of Python: instructions of a code object and their operands.

`Operation.pops` is how many values an instruction takes from the stack; what it leaves follows from
`dis.stack_effect`. An instruction without an entry empties the shadow stack, which loses reads of values that
were on it and never invents one. Where versions have two names for one instruction, `name` is the older one,
so that the trace has one handler for both:

    LOAD_FAST_BORROW a        LOAD_FAST a             since 3.14, where the value is borrowed
    BINARY_OP [] (26)         BINARY_SUBSCR           since 3.14
    LOAD_SMALL_INT 2          LOAD_CONST 2            since 3.14

Nothing is captured under a Python that is not in `KNOWN` (`insist_on_known_python`): a value that the code
reads could change there without a notice.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Final, NamedTuple, final

# Loaded without outsize by the walk over sample code (tests/unit/capture/guards/opcode_depths.py), under any
# Python: so nothing of outsize is imported here but within a function.
VERSION: Final = sys.version_info[:2]
KNOWN: Final = ((3, 11), (3, 12), (3, 13), (3, 14))
# 3.12 has no LOAD_METHOD: the lowest bit of LOAD_ATTR's argument says that a method is called next.
LOADS_METHODS_AS_ATTRIBUTES: Final = VERSION >= (3, 12)
# On the stack of a call the function comes first and NULL (or the object of a method) second.
CALLS_NAME_FUNCTION_FIRST: Final = VERSION >= (3, 13)
# A loop that ends leaves its iterator to POP_ITER; before, FOR_ITER itself took it away.
LOOPS_LEAVE_THEIR_ITERATOR: Final = VERSION >= (3, 14)
# f(*args, **kwargs) has NULL in the place of the keyword arguments that it lacks; before, a bit said so.
CALLS_WITH_STAR_TAKE_FOUR: Final = VERSION >= (3, 14)


@final
class Operation(NamedTuple):
    """One instruction: `pops` is None where its operands are not known."""

    name: str
    arg: int
    value: Any  # What dis makes of the argument: a name, a constant, or the offset of a jump's target.
    pops: int | None
    pushes: int
    next: int  # The offset of the instruction behind it.


_NONE: Final = (
    *("CACHE", "NOP", "RESUME", "PRECALL", "EXTENDED_ARG", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS"),
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "SETUP_ANNOTATIONS"),
    *("PUSH_NULL", "LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE"),
    *("LOAD_CLASSDEREF", "LOAD_ASSERTION_ERROR", "LOAD_BUILD_CLASS", "IMPORT_FROM", "COPY", "SWAP"),
    *("DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF", "GET_LEN", "FOR_ITER"),
    # Since 3.12:
    *("RETURN_CONST", "LOAD_LOCALS", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_LOAD_FAST"),
    # Since 3.14:
    *("NOT_TAKEN", "LOAD_COMMON_CONSTANT", "ANNOTATIONS_PLACEHOLDER"),
)
_ONE: Final = (
    *("POP_TOP", "UNARY_POSITIVE", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_INVERT", "GET_ITER", "BEFORE_WITH"),
    *("LIST_TO_TUPLE", "RETURN_VALUE", "STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF"),
    *("LOAD_ATTR", "LOAD_METHOD", "DELETE_ATTR", "UNPACK_SEQUENCE", "LIST_APPEND", "SET_ADD"),
    *("LIST_EXTEND", "SET_UPDATE", "DICT_MERGE", "DICT_UPDATE"),
    *("JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"),  # where they do not jump
    *(f"POP_JUMP_{way}_IF_{what}" for way in ("FORWARD", "BACKWARD") for what in ("TRUE", "FALSE")),
    *(f"POP_JUMP_{way}_IF_{what}" for way in ("FORWARD", "BACKWARD") for what in ("NONE", "NOT_NONE")),
    # Since 3.12:
    *(f"POP_JUMP_IF_{what}" for what in ("TRUE", "FALSE", "NONE", "NOT_NONE")),
    *("CALL_INTRINSIC_1", "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS"),
    # Since 3.13:
    *("TO_BOOL", "CONVERT_VALUE", "FORMAT_SIMPLE", "STORE_FAST_LOAD_FAST"),
    # Since 3.14:
    *("LOAD_SPECIAL", "POP_ITER"),
)
_TWO: Final = ("BINARY_SUBSCR", "BINARY_OP", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "STORE_ATTR")
_TWO_MORE: Final = (
    *("DELETE_SUBSCR", "IMPORT_NAME", "MAP_ADD"),
    *("CALL_INTRINSIC_2", "FORMAT_WITH_SPEC", "SET_FUNCTION_ATTRIBUTE", "STORE_FAST_STORE_FAST"),
    "BUILD_TEMPLATE",
)
_THREE: Final = ("LOAD_SUPER_ATTR", "BINARY_SLICE")
_BY_ARGUMENT: Final[Mapping[str, Callable[[int], int]]] = {
    "STORE_SUBSCR": lambda _: 3,
    "STORE_SLICE": lambda _: 4,
    "BUILD_TUPLE": lambda arg: arg,
    "BUILD_LIST": lambda arg: arg,
    "BUILD_SET": lambda arg: arg,
    "BUILD_STRING": lambda arg: arg,
    "BUILD_SLICE": lambda arg: arg,
    "BUILD_MAP": lambda arg: 2 * arg,
    "BUILD_CONST_KEY_MAP": lambda arg: arg + 1,
    "FORMAT_VALUE": lambda arg: 2 if arg & 4 else 1,
    "MAKE_FUNCTION": lambda arg: 1 + (arg & 15).bit_count() if VERSION < (3, 13) else 1,
    "CALL": lambda arg: arg + 2,
    "CALL_KW": lambda arg: arg + 3,
    "CALL_FUNCTION_EX": lambda arg: 4 if CALLS_WITH_STAR_TAKE_FOUR else 3 + (arg & 1),
    "BUILD_INTERPOLATION": lambda arg: 2 + (arg & 1),
}
_POPS: Final = {
    **dict.fromkeys(_NONE, 0),
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys((*_TWO, *_TWO_MORE), 2),
    **dict.fromkeys(_THREE, 3),
}

# Newer names of instructions that the trace knows by an older one.
_OLDER_NAMES: Final[Mapping[str, str]] = {
    "LOAD_FAST_BORROW": "LOAD_FAST",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": "LOAD_FAST_LOAD_FAST",
    "LOAD_SMALL_INT": "LOAD_CONST",
}
_SUBSCRIPT: Final = 26  # The argument of a BINARY_OP that is `owner[key]`.

# An in-place operation (`+=`) is a BINARY_OP whose argument is at least this.
FIRST_IN_PLACE: Final = 13

_operations: dict[int, tuple[CodeType, dict[int, Operation]]] = {}


def insist_on_known_python() -> None:
    """Raises UnknownPython under a version whose instructions have no table here."""
    if VERSION in KNOWN:
        return
    from outsize.errors import UnknownPython

    here, *known = (".".join(map(str, version)) for version in (VERSION, *KNOWN))
    raise UnknownPython(
        f"the instructions of Python {here} are not known, so that what a forward reads cannot be seen",
        numbers=f"known are {', '.join(known)}",
        next_step=f"python{known[-1]} -m venv .venv",
    )


def operations_of(code: CodeType) -> dict[int, Operation]:
    """Returns the instructions of a code object by their offset."""
    known = _operations.get(id(code))
    if known is None:
        listed = list(dis.get_instructions(code))
        nexts = [*(instruction.offset for instruction in listed[1:]), len(code.co_code)]
        table = {i.offset: _operation(i, behind) for i, behind in zip(listed, nexts, strict=True)}
        # The code object is kept, so that its id stays its own.
        known = _operations[id(code)] = code, table
    return known[1]


def _operation(instruction: dis.Instruction, behind: int) -> Operation:
    arg = instruction.arg or 0
    name = _OLDER_NAMES.get(instruction.opname, instruction.opname)
    if name == "BINARY_OP" and arg == _SUBSCRIPT:
        name = "BINARY_SUBSCR"
    by_argument = _BY_ARGUMENT.get(name)
    pops = _POPS.get(name) if by_argument is None else by_argument(arg)
    effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    return Operation(name, arg, instruction.argval, pops, 0 if pops is None else effect + pops, behind)
