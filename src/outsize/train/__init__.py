"""A training step over the interpreter, the processes that run it, and the check against the plain loop.

To read it, start at `engine.engine` (what `engine.step` does), then `crew` (the ranks that run a schedule
together) and `world` (which rank this is). `batch` splits a batch and computes the share of each microbatch
in the loss, `variants` captures the model again where it has changed, `ranks` compares and adds up over
ranks. It never imports the planner.
"""
