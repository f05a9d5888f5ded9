"""Names units and their styles: ranges such as `model.layers.0-7`, recompute segments, tensor styles."""
