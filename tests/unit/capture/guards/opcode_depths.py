"""Walks sample code with the table of instructions, under any Python: `python opcode_depths.py opcodes.py`.

It prints as JSON the version, the instructions without an entry, and where a walk over the control flow
finds a stack that is too small for what an instruction takes, unlike on another way to it, or not empty at a
return.
Depths follow from the table where an instruction does not branch and has an entry; else dis gives them.
"""

from __future__ import annotations

import dis
import importlib.util
import json
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

SAMPLE = """
def statements(a, b=1, *c, d=2, **e):
    x = [1, *c]; y = {**e, "k": a}; z = {1, 2, *c}; s = a[1:2]; s[0:1] = x; s[0] = a.b.c
    a.v = 3; a.w += 4; x[0] += 1; del a.v, y["k"]
    if a is None or b not in c: return
    for i, j in enumerate(x):
        if i and not j: continue
        if j is not None: break
    else: x = -a + ~b @ c
    while not a < 3 <= b: a += 1
    print(f"{a!r:>{b}} {b} {d:.2f}", sep="")
    x.call(1, *c, k=2, **e); x.m(1, k=3); a(*c); x[a, b](**e)
    y = lambda t=1, *, u=2: a + t + u
    w = a if b else c and d or e
    with a as f, b: a.v = f
    assert a, "no"
    import os.path as p
    from os import sep
    global G; G = 1; del G
    return x[0:1:2], 1 < a < 3, (a, b, *c), {"p": 1, "q": a}, not w

def comprehensions(x, y):
    lists = x.f(y.a, [v for v in x if v for w in v], {k: v for k, v in y.items()})
    return lists, {v for v in x}, (v for v in x)

class Derived(Base):
    n: int = 3
    def method(self, k):
        def inner(): return k, self, __class__
        return super().method(1) + super(Derived, self).n + inner()[0]
"""
# What only newer versions can read.
SINCE_3_14 = 'def templates(a, b): return t"{a!r:>{b}} {b}"'
# A call is two instructions in 3.11, and dis counts its operands at the first.
CALLS = {"PRECALL": 0, "CALL": 1}
ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yields the code and all code within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def effect(one: Any, *, jump: bool) -> int:
    """Returns what dis says of an instruction."""
    opcode = dis.opmap[one.name]
    return dis.stack_effect(opcode, one.arg if opcode >= dis.HAVE_ARGUMENT else None, jump=jump)


def depth_behind(one: Any, depth: int) -> tuple[int, str]:
    """Returns the depth behind an instruction, and what is wrong with its entry."""
    if one.name == "RETURN_GENERATOR":
        return 1, ""  # A generator goes on with what is sent to it; dis tells it from 3.13 on.
    if one.pops is None:
        return depth + effect(one, jump=False), ""
    table_pushes: int = one.pushes
    pushes = CALLS.get(one.name, table_pushes)
    is_wrong = bool(one.pops > depth) or pushes < 0
    facts = f"{one.name} {one.arg} takes {one.pops} of {depth}, gives {pushes}"
    return depth - one.pops + pushes, facts if is_wrong else ""


def problems(code: CodeType, table: dict[int, Any]) -> Iterator[str]:
    """Follows every way through the code; handlers of exceptions, which no way leads to, are left out."""
    depths: dict[int, int] = {}
    waiting = [(min(table), 0)]
    jumps = {
        i.offset: i.argval for i in dis.get_instructions(code) if i.opcode in (*dis.hasjrel, *dis.hasjabs)
    }
    while waiting:
        offset, depth = waiting.pop()
        if offset in depths:
            if depths[offset] != depth:
                yield f"{code.co_name} {offset}: a depth of {depth} and of {depths[offset]}"
            continue
        depths[offset] = depth
        one = table[offset]
        behind, wrong = depth_behind(one, depth)
        if wrong:
            yield f"{code.co_name} {offset}: {wrong}"
        if one.name in ENDS:
            left = depth - (one.pops or 0)  # From 3.14 on the value counts as given back.
            if one.name.startswith("RETURN") and left != 0:
                yield f"{code.co_name} {offset}: a depth of {left} at the return"
            continue
        if offset in jumps:
            waiting.append((jumps[offset], depth + effect(one, jump=True)))
        if not one.name.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")):
            waiting.append((one.next, behind))


def main(path: str) -> None:
    """Loads the table by its path alone, without outsize and torch, and prints what it finds."""
    spec = importlib.util.spec_from_file_location("opcodes", path)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    sys.modules["opcodes"] = table
    spec.loader.exec_module(table)
    sample = SAMPLE + (SINCE_3_14 if sys.version_info >= (3, 14) else "")
    codes = list(code_objects(compile(sample, "sample", "exec")))
    met = [(code, table.operations_of(code)) for code in codes]
    without = sorted({one.name for _, operations in met for one in operations.values() if one.pops is None})
    wrong = [text for code, operations in met for text in problems(code, operations)]
    print(json.dumps({"version": sys.version_info[:2], "without": without, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1])
