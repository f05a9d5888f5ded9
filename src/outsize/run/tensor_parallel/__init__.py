"""Provides collectives with gradients and the layers of tensor parallelism; the only importer of DTensor.

Which weights are divided is derived in `program.tensor_parallel`.
"""
