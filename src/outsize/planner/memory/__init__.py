"""Counts the bytes that a stage holds at the worst moment of a step, by cause. The only owner of bytes.

To read it, start at `account.account_stage`, which describes one stage at its peak. `account.peak_table`
computes the peak for every run of units at once from `range_tables`; the partition uses it.
It executes the schedule to see how many microbatches a stage holds, and in which state; `in_flight_states`
keeps the worst of these states. `sharded` divides the bytes over devices, `recomputed_blocks` and
`recomputed_stage` count them under recompute. It never counts seconds.
"""
