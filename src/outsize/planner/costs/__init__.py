"""Predicts seconds of units and of messages that nobody has measured.

It has the roofline and the achieved share of peak for units, the alpha-beta model for collectives, and the
effect of tensor, context and sharded data parallelism on a unit's time. It never counts the bytes that a
device holds.
"""
