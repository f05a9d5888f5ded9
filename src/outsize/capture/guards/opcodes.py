"""The one owner of what depends on the version of Python: instructions of a code object and their operands.

`Instruction.pops` is how many values an instruction takes from the stack; what it leaves follows from
`dis.stack_effect`. An instruction without an entry empties the shadow stack, which loses reads of values that
were on it and never invents one. `IS_SUPPORTED` is False for versions whose table is not here; no reads are
then noted, and what a program depends on is looked for by `train.variants.model_state` alone.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Final, NamedTuple, final

VERSION: Final = sys.version_info[:2]
IS_SUPPORTED: Final = (3, 11) <= VERSION <= (3, 13)
# 3.12 has no LOAD_METHOD: the lowest bit of LOAD_ATTR's argument says that a method is called next.
LOADS_METHODS_AS_ATTRIBUTES: Final = VERSION >= (3, 12)
# On the stack of a call the function comes first and NULL (or the object of a method) second.
CALLS_NAME_FUNCTION_FIRST: Final = VERSION >= (3, 13)


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
)
_TWO: Final = ("BINARY_SUBSCR", "BINARY_OP", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "STORE_ATTR")
_TWO_MORE: Final = (
    *("DELETE_SUBSCR", "IMPORT_NAME", "MAP_ADD"),
    *("CALL_INTRINSIC_2", "FORMAT_WITH_SPEC", "SET_FUNCTION_ATTRIBUTE", "STORE_FAST_STORE_FAST"),
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
    "CALL_FUNCTION_EX": lambda arg: 3 + (arg & 1),
}
_POPS: Final = {
    **dict.fromkeys(_NONE, 0),
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys((*_TWO, *_TWO_MORE), 2),
    **dict.fromkeys(_THREE, 3),
}

# An in-place operation (`+=`) is a BINARY_OP whose argument is at least this.
FIRST_IN_PLACE: Final = 13

_operations: dict[int, tuple[CodeType, dict[int, Operation]]] = {}


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
    name, arg = instruction.opname, instruction.arg or 0
    by_argument = _BY_ARGUMENT.get(name)
    pops = _POPS.get(name) if by_argument is None else by_argument(arg)
    effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    return Operation(name, arg, instruction.argval, pops, 0 if pops is None else effect + pops, behind)
