"""From a live module to a tape, a graph, costs and measurements."""
