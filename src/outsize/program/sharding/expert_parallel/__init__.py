"""Finds the experts of a tape, and writes the tape of a rank that has some of them.

`experts` says which modules hold a collection of experts, by the shapes of a call and a trial on a small
copy; `expert_tape` replaces their calls. It never runs the model.
"""
