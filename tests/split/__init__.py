"""The judge of `outsize.split`: models, loops that run with a plain reference and a split model alike, and
what two runs of one loop have left.

Start with `reference.py`, which says what is right; then `bench.py`, `cases.py` and the loops. Nothing here
knows stages, schedules or messages.
"""
