"""Deciding: memory account, partition, simulator, search. numpy, never torch."""
