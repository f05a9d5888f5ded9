"""Derives which weights of a tape can be sharded among tensor-parallel ranks, and each rank's own tape.

`styles` decides, `propagate` follows sharded dims through the instructions, `local_tape` writes the program
of a rank with its collectives. It never runs anything.
"""
