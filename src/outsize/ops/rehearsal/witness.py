"""Looks at every message between stages: what was sent, and what came in for it.

    rank 0: send(peer 1, channel, microbatch, tensor)   ->  its digest     both ends name a message by
    sender, channel rank 1: post(peer 0, channel, microbatch).wait()    ->  its digest     and microbatch,
    so the digests are equal

A digest is of dtype, shape and bytes. Messages that come in another order than they are waited for, where a
wire has no tags (NCCL), have another digest, and so has one whose memory was written before it had left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from outsize.ir.base import Record
from outsize.ir.plan import Plan
from outsize.ops.rehearsal.small_model import BuiltModel
from outsize.program.objects import model_copy
from outsize.program.values.wrapper_tensors import is_wrapper
from outsize.run.transport.base import CHANNELS, Pending, Transport
from outsize.train.check.compare import adamw, engine_snapshots
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

Key = tuple[int, int, int, int]
_SENT: Final = "sent"
_WAITS: Final = "waits"
_TAKEN: Final = "taken"


@final
class SeenMessage(Record):
    """Is one message as one end has it: the other end's place in the pipeline, what identifies it, the
    stage that reads the value (also of its gradient), and its digest.
    """

    peer: int
    channel: int
    microbatch: int
    stage: int
    digest: str

    @property
    def is_gradient(self) -> bool:
        """Tells whether it goes back."""
        return bool(self.channel % 2)

    def key_from(self, sender: int) -> Key:
        """Returns what identifies a message that was sent from a place of the pipeline."""
        return sender, self.peer, self.channel, self.microbatch

    def text(self, how: str) -> str:
        """Returns its action, `how` being SEND or RECV: `1RECV_F0`; of a gradient the one that sends it."""
        kind = "SEND_B" if self.is_gradient else f"{how}_F"
        return f"{self.stage}{kind}{self.microbatch}"


@final
class SeenMessages(Record):
    """Are all messages of a rank in a step."""

    sent: tuple[SeenMessage, ...] = ()
    received: tuple[SeenMessage, ...] = ()

    def digest_of(self, received: SeenMessage, receiver: int) -> str | None:
        """Returns the digest with which this rank has sent what came in at a place; None: it has not sent
        it.
        """
        wanted = (receiver, received.channel, received.microbatch)
        return next((m.digest for m in self.sent if (m.peer, m.channel, m.microbatch) == wanted), None)

    def has(self, sent: SeenMessage, sender: int) -> bool:
        """Tells whether this rank has taken in what was sent from a place."""
        wanted = (sender, sent.channel, sent.microbatch)
        return any((m.peer, m.channel, m.microbatch) == wanted for m in self.received)


@final
@dataclass(frozen=True)
class MessageLog:
    """Is a file to which a rank adds a line for each message that it has sent, waits for or has taken in. It
    tells what a rank waits for that never ends its step.
    """

    file: Path

    def note(self, what: str, message: SeenMessage) -> None:
        """Adds a line: a word and the message."""
        with self.file.open("a", encoding="utf-8") as log:
            log.write(f"{what} {message.to_json().replace(chr(10), ' ')}\n")

    def read(self) -> tuple[SeenMessages, SeenMessage | None]:
        """Returns the messages that were sent and taken in, and the one that the rank waits for."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        noted = [line.partition(" ")[::2] for line in lines]
        messages = [(what, SeenMessage.model_validate_json(text)) for what, text in noted]
        by_word = {word: tuple(one for what, one in messages if what == word) for word in (_SENT, _TAKEN)}
        last = messages[-1] if messages else ("", None)
        return SeenMessages(sent=by_word[_SENT], received=by_word[_TAKEN]), (
            last[1] if last[0] == _WAITS else None
        )


@final
class Witness:
    """Stands between a rank and its transport, and notes its messages, also in a `log` as they go."""

    def __init__(self, stages: int, log: MessageLog | None = None) -> None:
        self._stages, self._log = stages, log
        self._sent: dict[int, list[SeenMessage]] = {}
        self._received: dict[int, list[SeenMessage]] = {}

    def between(self, rank: int, transport: Transport) -> Transport:
        """Returns a transport that is looked at."""
        sent, received = self._sent.setdefault(rank, []), self._received.setdefault(rank, [])
        note = self._log.note if self._log is not None else _unnoted
        return _SeenTransport(transport, sent, received, self._stages, note)

    @property
    def messages(self) -> SeenMessages:
        """Returns the messages of this process's only rank."""
        sent = [message for messages in self._sent.values() for message in messages]
        received = [message for messages in self._received.values() for message in messages]
        return SeenMessages(sent=tuple(sent), received=tuple(received))

    @property
    def digests(self) -> dict[Key, str]:
        """Returns what all ranks of this process have sent."""
        pairs = ((rank, message) for rank, messages in self._sent.items() for message in messages)
        return {message.key_from(rank): message.digest for rank, message in pairs}


def _unnoted(what: str, message: SeenMessage) -> None:
    """Notes nothing."""


def unseen(_: int, transport: Transport) -> Transport:
    """Returns the transport itself."""
    return transport


def messages_in_one_process(plan: Plan, built: BuiltModel, seed: int) -> Mapping[Key, str]:
    """Returns what the ranks of a pipeline send in its first step, where all are in this process."""
    witness, loss_fn = Witness(len(plan.stages)), built.objective.loss_fn
    engine = make_engine(model_copy(built.model), plan, None, EngineOptions(loss_fn, adamw, seed=seed))
    engine.crew.send_through(witness.between)
    engine_snapshots(engine, [built.case.batch.copied()], steps=1)
    return witness.digests


@final
class _SeenTransport(Transport):
    def __init__(
        self,
        transport: Transport,
        sent: list[SeenMessage],
        received: list[SeenMessage],
        stages: int,
        log: Callable[[str, SeenMessage], None],
    ) -> None:
        self._transport, self._sent, self._received, self._stages = transport, sent, received, stages
        self._log = log

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        self._sent.append(self._message(peer, channel, microbatch, tensor))
        self._transport.send(peer, channel, microbatch, tensor)
        self._log(_SENT, self._sent[-1])

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        pending = self._transport.post(peer, channel, microbatch)

        def await_it() -> None:
            self._log(_WAITS, self._message(peer, channel, microbatch, None))

        def note(tensor: Tensor | None) -> None:
            self._received.append(self._message(peer, channel, microbatch, tensor))
            self._log(_TAKEN, self._received[-1])

        return _SeenPending(pending, await_it, note)

    def flush(self) -> None:
        self._transport.flush()

    def _message(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> SeenMessage:
        stage = channel % CHANNELS // 2 % self._stages
        return SeenMessage(
            peer=peer, channel=channel, microbatch=microbatch, stage=stage, digest=_digest(tensor)
        )


@final
class _SeenPending(Pending):
    def __init__(
        self, pending: Pending, await_it: Callable[[], None], note: Callable[[Tensor | None], None]
    ) -> None:
        self._pending, self._await_it, self._note = pending, await_it, note

    def ready(self) -> bool:
        return self._pending.ready()

    def wait(self) -> Tensor | None:
        self._await_it()
        tensor = self._pending.wait()
        self._note(tensor)
        return tensor

    def release(self) -> None:
        self._pending.release()


def _digest(tensor: Tensor | None) -> str:
    """Returns a digest of dtype, shape and bytes; of a tensor that has none of its own its class alone."""
    if tensor is None or is_wrapper(tensor):
        return type(tensor).__name__
    whole = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    raw = whole.cpu().contiguous().reshape(-1).view(torch.uint8)
    text = f"{tensor.dtype} {tuple(tensor.shape)} "
    return hashlib.blake2b(text.encode() + raw.numpy().tobytes(), digest_size=16).hexdigest()
