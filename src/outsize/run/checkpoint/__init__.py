"""Stores a training state on disk: a folder per step, with safetensors files and a manifest that vouches for
them.

To read it, start at `write.begin`, `write_part` and `publish`, then `read.CheckpointReader`. It knows tensors
by name and place, and never asks which rank, stage or optimizer they belong to.
"""
