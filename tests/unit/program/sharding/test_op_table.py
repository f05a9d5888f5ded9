"""Each kind that the table names has a rule, each rule is of a kind that some function has, and no function
has two rows."""

from __future__ import annotations

from collections import Counter

from outsize.program.sharding import op_table, propagate
from outsize.program.sharding.context_parallel import rules
from outsize.program.sharding.op_table import OPS


def test_each_kind_of_the_table_has_a_rule_and_no_rule_is_left_over() -> None:
    assert {op.dims for op in OPS.values()} - {None} == propagate.RULES.keys()
    # The rule of an index is asked for a number of ranks, too, and is called by its name.
    assert {op.rows for op in OPS.values()} - {None, "indexed"} == rules.RULES.keys()


def test_a_function_has_one_row() -> None:
    names = Counter(name for names, _ in op_table.ROWS for name in names.split())
    assert [name for name, times in names.items() if times > 1] == []
    assert len(OPS) == len(names)


def test_every_column_is_of_use() -> None:
    for column in ("dims", "rows", "weight", "sizes", "reshapes", "classes"):
        assert len({getattr(op, column) for op in OPS.values()}) > 1
