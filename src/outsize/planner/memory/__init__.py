"""Counts the bytes that a stage holds at the worst moment of a step, by cause. The only owner of bytes.

To read it, start at `account.account_stage`, which describes one stage at its peak. `account.peak_table`
computes the peak for every run of units at once from `range_tables`; the partition uses it.
`in_flight_states` says how many microbatches a stage holds, and in which state. It never counts seconds.
"""
