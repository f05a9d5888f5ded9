"""Moves data that is not a message between stages: weights, saved activations, boundary values, FSDP shards.

Each mover is a `base.Moves`, called by the interpreter around the actions of a schedule.
"""
