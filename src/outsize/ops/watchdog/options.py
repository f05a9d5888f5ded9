"""Options of those who watch a run, and how a launcher passes them to its processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self, cast, final, get_args

from outsize.errors import BadOption
from outsize.errors.arguments import insist_on_whole_number, is_number, shown

OnHang = Literal["end", "wait"]
TIMEOUT_S: Final = 10.0
HANG_TIMEOUT, ON_HANG, VERIFY = "OUTSIZE_HANG_TIMEOUT", "OUTSIZE_ON_HANG", "OUTSIZE_VERIFY"


@final
@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Says after how many seconds without progress ranks ask whom they wait for, and what follows.

    A step that takes long has five of its durations at least. `timeout_s` of 0: nobody watches. In every
    `verify`-th step ranks repeat each other's work; 0: in none. Raises BadOption.
    """

    timeout_s: float = TIMEOUT_S
    on_hang: OnHang = "end"
    verify: int = 0

    def __post_init__(self) -> None:
        """Raises BadOption for a value that makes no sense."""
        if not is_number(self.timeout_s) or not 0 <= self.timeout_s < math.inf:
            raise BadOption(
                f"a hang timeout of {shown(self.timeout_s)} s makes no sense",
                next_step="hang_timeout=10, or 0 for none",
            )
        if self.on_hang not in get_args(OnHang):
            raise BadOption(f"on hang {self.on_hang!r} is unknown", next_step="on_hang=end, or wait")
        insist_on_whole_number(self.verify, "verify", 0, "verify=100, or verify=0 for never")

    @classmethod
    def of_environment(cls, variables: Mapping[str, str]) -> Self:
        """Returns what the launcher has passed, and the defaults for the rest. Raises BadOption."""
        text, every = variables.get(HANG_TIMEOUT, str(TIMEOUT_S)), variables.get(VERIFY, "0")
        try:
            timeout_s = float(text)
        except ValueError:
            raise BadOption(
                f"{HANG_TIMEOUT}={text!r} is no number of seconds", next_step=f"{HANG_TIMEOUT}=10"
            ) from None
        if not every.isdecimal():
            raise BadOption(f"{VERIFY}={every!r} is no number of steps", next_step=f"{VERIFY}=100")
        return cls(timeout_s, cast("OnHang", variables.get(ON_HANG, "end")), int(every))

    @classmethod
    def given(
        cls, timeout_s: float | None, on_hang: str | None, verify: int | None, variables: Mapping[str, str]
    ) -> Self:
        """Returns what is given, and what the environment says for the rest. Raises BadOption."""
        rest = cls.of_environment(variables)
        return cls(
            rest.timeout_s if timeout_s is None else timeout_s,
            cast("OnHang", on_hang or rest.on_hang),
            rest.verify if verify is None else verify,
        )

    def environment(self) -> dict[str, str]:
        """Returns the variables that `of_environment` reads."""
        return {HANG_TIMEOUT: str(self.timeout_s), ON_HANG: self.on_hang, VERIFY: str(self.verify)}


DEFAULTS: Final = WatchOptions()
