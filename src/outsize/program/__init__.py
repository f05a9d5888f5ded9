"""Holds the recorded program of a model (`tape`), generates code that replays it, and says what may be cut.

`sharding` derives a rank's own program. Nothing here knows of stages, ranks of a run or schedules.
"""
