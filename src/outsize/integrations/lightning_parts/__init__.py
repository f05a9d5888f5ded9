"""Holds what stands behind `integrations/lightning.py`: its processes, its training step as a model, and the
children of a module that are split one by one.
"""
