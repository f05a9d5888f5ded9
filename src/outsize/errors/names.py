"""Names of torch.nn.Module that an engine does not have, each with the call to use instead."""

from __future__ import annotations

from collections.abc import Mapping

INSTEAD: Mapping[str, str] = {
    "backward": "engine.step(x, target=y), which runs forward, backward and the optimizer's step",
    "cuda": "the plan's devices; the engine has placed the model there",
    "eval": "engine.evaluate(x), which runs in eval mode, or engine.model.eval()",
    "forward": "engine.evaluate(x), whose outputs are those of the model",
    "load_state_dict": "engine.module.load_state_dict(state, strict=False), or parallelize(weights='FOLDER')",
    "parameters": "engine.module.parameters(), those of this rank",
    "state_dict": "engine.full_state_dict() for the model on rank 0, engine.module.state_dict() for a rank",
    "to": "the plan's devices; the engine has placed the model there",
    "train": "engine.model.train(), the mode of the next steps",
    "zero_grad": "engine.step(x, target=y), which clears gradients after its update",
}


def missing(name: str) -> str:
    """Returns the text of the AttributeError for a name that an engine does not have."""
    other = INSTEAD.get(name)
    return f"an engine has no `{name}`" + (f". Next: {other}" if other else "")
