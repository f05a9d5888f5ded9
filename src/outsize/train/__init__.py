"""A training step over the interpreter, the processes that run it, and the check against the plain loop.

To read it, start at `engine.engine` (what `engine.step` does), then `crew` (the ranks that run a schedule
together) and `launch` (processes). It never imports the planner.
"""
