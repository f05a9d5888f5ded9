"""How is an optimizer saved, so that any layout can go on from it, and which cannot be?

`optimizer_documents.py` takes a `state_dict()` apart by weights, `optimizer_states.py` writes and reads the
parts, `optimizer_trial.py` tries on small weights whether an optimizer goes on. Never names an optimizer.
"""
