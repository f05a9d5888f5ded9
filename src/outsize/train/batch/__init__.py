"""Splits batches into microbatches and computes the share of the loss that each microbatch has.

Main entry: `batch.Batch`. It never sees ranks.
"""
