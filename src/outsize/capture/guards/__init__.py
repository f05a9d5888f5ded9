"""Answers what Python values a recorded program depends on, and whether they are still the same.

Main entries: `trace.ReadTrace`, which notes reads while a forward is recorded, and `check.ReadGuards`, which
compares them before a step. Never decides what follows from a change (`train.variants` does).
"""
