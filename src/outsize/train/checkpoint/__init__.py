"""Saves the whole state of a training run, and goes on from it on any other layout.

To read it, start at `checkpoints.Checkpoints`, which `engine.save` and `resume=` use. `regions` says which
part of a tensor a rank has, `weights` and `optimizers` name what it holds; `loaders` and `generators` have
the position in the data and the random generators. Every tensor is named by the user's name of its weight and
is written in the boxes that the ranks have; each rank of another layout reads the boxes that it has. The
files are those of run/checkpoint, about which it asks no more than to write and to read boxes. What passes
between ranks here is JSON (`agreement`).
"""
