"""Computes lower bounds that no cut of a layout can beat: seconds of a step, bytes of a device, recomputed
work.

The search prunes with them, and a plan's optimality gap is its distance to them. A bound may be loose; it may
never exceed what a cut reaches.
"""
