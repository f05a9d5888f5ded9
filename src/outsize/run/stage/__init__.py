"""Runs one stage: cut from the tape, its boundaries, forward and backward, recompute, random numbers.

Main entry: `stage.StageExecutor`; `cut` makes the programs. It never sends anything itself.
"""
