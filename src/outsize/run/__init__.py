"""Runs stage programs: transports, weights, the host's memory, and the interpreter of schedules.

To read it, start at `interpreter.interpreter` (one rank's row of actions), then `stage.stage` (forward and
backward of a microbatch) and `transport` (tensors from rank to rank). It never imports the planner.
"""
