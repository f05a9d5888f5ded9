"""Simulates a lowered schedule with the costs of stages and links: who waits when, how long a step takes.

`critical_path` computes a step's seconds as a longest path, `simulate` its Timeline, `measured_step`
simulates a measured step again from its durations. It never decides anything.
"""
