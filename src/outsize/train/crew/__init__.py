"""The ranks that run a schedule together, and the weights, clipping and scaling that they share.

Main entry: `crew.Crew`. In one process its ranks take turns; with processes it is one rank of the group.
"""
