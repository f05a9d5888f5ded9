"""The training step: split the batch, run the schedule, clip, step the optimizer, return the loss.

Main entry: `engine.Engine.step`; `executor` is the interface of its two executors, `pipelined` (a cut tape)
and `by_modules`; `factory` builds an engine from a plan.
"""
