"""Schedules as data: builders, lowering to sends and receives, and the checker. No torch here."""
