"""Derives which values of a tape can be held by rows of the sequence, and each rank's own tape.

`rules` say for one instruction what its rows need, `rows` walks the tape from the sources on, `row_tape`
writes the program of a rank with its collectives. It never runs anything, and never gives up silently: what
cannot be computed by rows is refused with the reason.
"""
