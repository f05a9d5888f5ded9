"""Provides what the ranks of an axis compute together, with gradients: one file for each axis.

Start with `mesh_collectives`, the messages without gradients, then `tensor_parallel`, the only importer of
DTensor, on whose group the others are built. Which values and weights are divided, and where a rank's program
calls these, is derived in `program.sharding`.
"""
