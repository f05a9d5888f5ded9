"""Builds the device mesh of a run and the operations over its groups: replicas, gradient all-reduce, tp
parts.

It never starts processes.
"""
