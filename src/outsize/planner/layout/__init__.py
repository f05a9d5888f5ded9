"""Describes how a model can be laid out on devices.

It holds one layout (mesh axes, schedule, microbatches) and the graph of one tensor-parallel rank. It knows
nothing of seconds or bytes. The main entry is `layout.Layout`.
"""
