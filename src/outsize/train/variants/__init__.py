"""Captured and cut programs, one for each input signature, kept for as long as they are valid.

Main entry: `variant.Variants`; `model_state` is what a recorded program depends on;
`changed_values` and `number_inputs` say what follows from values that change.
"""
