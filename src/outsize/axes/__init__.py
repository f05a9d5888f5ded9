"""Says over which axes the devices of a run may be spread, as data: a record for each axis of the mesh.

To read it, start at `axis` (what is asked of an axis), then at `registry` (all of them, in the mesh's order).
A record says what the axis divides (stages, the batch, tokens, weights, states), which weights its ranks hold
alike, when they send, and its words; a new axis is a record of its own file and a line of the registry.
Nothing else names an axis or compares names: who needs a fact asks the record. This package imports no other
one, and never runs anything.
"""
