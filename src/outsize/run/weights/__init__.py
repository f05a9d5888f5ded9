"""Decides which rank holds which weights: placement by stage, lazy reads of safetensors, writing shards.

It never touches activations or optimizer states.
"""
