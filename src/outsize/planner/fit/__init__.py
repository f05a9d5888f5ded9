"""Answers whether a training step fits the devices and, if not, what has to change least."""
