"""Says why a part of a forward cannot be recorded; `fallbacks` then chooses coarser or finer leaves."""

from __future__ import annotations

from typing import final


@final
class FrameFailed(Exception):
    """Says that code of the module `frame` cannot be recorded; recording is retried with coarser leaves."""

    def __init__(
        self, frame: str, reason: str, where: str, cause: Exception | None = None, *, keeps: bool = False
    ) -> None:
        """`keeps`: the result of a call depends on the calls before."""
        super().__init__(f"{frame or 'the model'}: {reason} ({where})")
        self.frame, self.reason, self.where, self.cause, self.keeps = frame, reason, where, cause, keeps


@final
class Leaked(Exception):
    """Says that a tensor from inside the leaf `fqn` is used outside without being returned, or another value
    inside without being an argument: it must be opened.
    """

    def __init__(self, fqn: str, failure: FrameFailed, why: str = "it hands out a tensor by the way") -> None:
        super().__init__(f"{fqn}: {failure}")
        self.fqn, self.failure, self.why = fqn, failure, why
