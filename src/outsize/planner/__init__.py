"""Decides where a model runs: layouts, their seconds and bytes, and the search over them. numpy, never torch.

To read it, follow one question: `layout` lists the ways to lay a model on devices, `memory` counts bytes,
`costs` and `simulation` give seconds, `partition` cuts, `evaluate` prices one candidate, `search` picks the
fastest that fits. The main entry is `search.search.search`.
"""
