"""Authenticates what launchers and ranks of several machines write into the store in which they meet.

    secret      OUTSIZE_RUN_SECRET, or --ranks secret_file=FILE of mode 0600: the same text on every machine
    a value     HMAC-SHA256(secret, key, value) in hex, then the value

torch's stores ask nobody who connects, so that a stranger who reaches one can write there. With a secret what
is sealed is believed only from who has it: the state of the rendezvous (a pickle of torch's, which is not
read before its seal is), addresses of stores, failures, verdicts of the watchdog, and that a rank is here. A
stranger can still remove values, which ends the run. The addresses that gloo and NCCL tell each other, and
their tensors, are not sealed: both have no means for it. It imports no torch before it is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, final

from outsize.errors import BadOption, RankFailed

SECRET: Final = "OUTSIZE_RUN_SECRET"
_LEAST: Final = 16
_SEAL: Final = 64  # hex digits of SHA-256
_ADVICE: Final = "python -c 'import secrets; print(secrets.token_hex())' > FILE; chmod 600 FILE"


@final
@dataclass(frozen=True, slots=True)
class RunSecret:
    """A text that all machines of a run have, and nobody else. Raises BadOption for one that is short."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raises BadOption for a secret that can be guessed."""
        if len(self.text) < _LEAST:
            raise BadOption(
                "the run's secret can be guessed",
                numbers=f"{len(self.text)} characters, at least {_LEAST} are needed",
                next_step=_ADVICE,
            )

    @classmethod
    def of_environment(cls, variables: Mapping[str, str]) -> Self | None:
        """Returns the secret that the environment has, or None. Raises BadOption."""
        text = variables.get(SECRET, "")
        return cls(text) if text else None

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Returns the secret in a file that its owner alone can read. Raises BadOption."""
        try:
            mode, text = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadOption(f"the run's secret cannot be read: {error}", next_step=_ADVICE) from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BadOption(
                f"others can read the run's secret in {path}",
                numbers=f"mode {stat.S_IMODE(mode):04o}",
                next_step=f"chmod 600 {path}",
            )
        return cls(text)

    def seal(self, key: str, value: bytes) -> bytes:
        """Returns the value with its seal, which is for this key alone."""
        return self._seal(key, value) + value

    def opened(self, key: str, sealed: bytes) -> bytes:
        """Returns the value. Raises RankFailed where the seal is not of this secret, key and value."""
        seal, value = sealed[:_SEAL], sealed[_SEAL:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise RankFailed(
                "a message between the machines of the run is not sealed by the run's secret",
                numbers=f"key {key!r}: another secret on one of the machines, or a stranger has written it",
                next_step="the same --ranks secret_file=FILE (OUTSIZE_RUN_SECRET) on every machine",
            )
        return value

    def _seal(self, key: str, value: bytes) -> bytes:
        named = f"{len(key)}:{key}".encode() + value
        return hmac.new(self.text.encode(), named, hashlib.sha256).hexdigest().encode()


@final
class SealedStore:
    """A store of torch's whose values are sealed; numbers that are counted (`add`) are not."""

    def __init__(self, store: Any, secret: RunSecret) -> None:
        self._store, self._secret = store, secret

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value with its seal."""
        data = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._secret.seal(key, data).decode())

    def get(self, key: str) -> bytes:
        """Returns a value. Raises RankFailed for one that is not sealed."""
        return self._secret.opened(key, self._store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Tells whether all keys are there."""
        return self._store.check(list(keys))

    def add(self, key: str, amount: int) -> int:
        """Returns a counter, after adding to it."""
        return self._store.add(key, amount)


def sealed_store(store: Any, secret: RunSecret | None) -> Any:
    """Returns the store, with sealed values where there is a secret."""
    return store if secret is None else SealedStore(store, secret)
