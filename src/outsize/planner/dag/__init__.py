"""Finds stages of a branched graph: order ideals, and balanced partitions that are not runs of its order.

The main entries are `stage_levels` (turns units on ranks into stages) and `balance_gain` (says whether
another split is lighter). It never prices a step.
"""
