"""Provides what ranks that hold rows of a sequence compute together, with gradients.

Which values are divided is derived in `program.context_parallel`.
"""
