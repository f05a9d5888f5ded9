"""Provides what ranks compute together of which each has some of the experts, with gradients.

Which modules hold experts is found in `program.expert_parallel`.
"""
