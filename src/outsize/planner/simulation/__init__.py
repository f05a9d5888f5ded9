"""Simulates a lowered schedule with the costs of stages and links: who waits when, how long a step takes.

`critical_path` computes when each action begins and ends as longest paths, `simulate` plays events one by one
(weights on the host, measured steps), `measured_step` simulates a measured step again from its durations. It
never decides anything.
"""
