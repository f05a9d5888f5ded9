"""Answers whether two devices compute the same bits: what a stage was given, what came out, and a repeat.

Start at shown_work.py. A stage that is shown notes what goes into its forward and backward of one microbatch,
and digests of all that comes out; repeat.py does that work again beside the step. Nothing here decides who is
wrong.
"""
