"""Finds out what an optimizer's update depends on, and steps it where all of that is.

Start at `coupling` (the record, and the trial that finds it), then `placed` (what a layout makes of it),
`owned_step` (one rank steps a whole weight whose parts others hold) and `owned_weights` (these weights, which
have values while a step runs). It never knows an optimizer by its name.
"""
