"""Replaces a model's tensors by fakes for one forward, and restores everything afterwards.

Main entry: `fake_model.FakeModel`. It never records.
"""
