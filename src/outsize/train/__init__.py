"""A training step over an interpreter, and launching processes."""
