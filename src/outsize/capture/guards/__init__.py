"""Answers what Python values a recorded program depends on, and whether they are still the same.

Main entries: `trace.read_trace.ReadTrace`, which follows the code of a forward that is recorded, and tells
`notes.Notes` what it reads, and `writes.Writes` what it writes, of objects from before (`noted`); and
`check.ReadGuards`, which compares the reads before a step. Never decides what follows from a change
(`train.variants` does).
"""
