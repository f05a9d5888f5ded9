"""Odd models on sequences: recurrences, attention by hand, shared layers, structured losses.

Token ids are [n, length]; nothing in here knows outsize.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

VOCABULARY, CLASSES, WIDTH = 128, 5, 16


@final
class PackedGRU(nn.Module):
    """Bidirectional GRU over sequences of different lengths, packed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.classifier(states.sum(1) / lengths[:, None])


@final
class CellLoop(nn.Module):
    """LSTMCell and GRUCell stepped by hand, with a skip every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lower, self.upper = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        hidden, cell = x.new_zeros(2, len(ids), WIDTH)
        top = torch.zeros_like(hidden)
        for step in range(ids.shape[1]):
            hidden, cell = self.lower(x[:, step], (hidden, cell))
            top = self.upper(hidden + x[:, step] if step % 2 else hidden, top)
        return self.classifier(top)


@final
class StackedRNN(nn.Module):
    """Time first: a plain RNN, then a projected bidirectional LSTM started from learned states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(3, WIDTH, nonlinearity="relu")
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, proj_size=4, bidirectional=True, dropout=0.2)
        self.start_hidden = nn.Parameter(torch.randn(4, 1, 4))
        self.start_cell = nn.Parameter(torch.randn(4, 1, WIDTH))
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, signal: Tensor) -> Tensor:
        x, _ = self.rnn(signal.transpose(0, 1))
        n = x.shape[1]
        start = (self.start_hidden.expand(-1, n, -1).contiguous(), self.start_cell.repeat(1, n, 1))
        x, (hidden, _) = self.lstm(x, start)
        return self.classifier(x.mean(0) + hidden.transpose(0, 1).flatten(1)[:, :8])


@final
class Translator(nn.Module):
    """nn.Transformer with a causal mask and padding masks; both embeddings and the head tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(64, WIDTH) * 0.02)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = (source == 0).float().masked_fill(source == 0, float("-inf"))
        states = self.transformer(
            self.embedding(source) + self.position[: source.shape[1]],
            self.embedding(target) + self.position[: target.shape[1]],
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(states)


@final
class MaskedEncoder(nn.Module):
    """nn.TransformerEncoder, norm first, with a padding mask and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(ids), -1, -1), self.embedding(ids)], dim=1)
        padding = F.pad(ids.eq(0), (1, 0), value=False)
        return self.classifier(self.encoder(x, src_key_padding_mask=padding)[:, 0])


@final
class SharedLayers(nn.Module):
    """ALBERT-like: a factorised embedding and one encoder layer used four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.widen = nn.Linear(8, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.widen(self.embedding(ids))
        for _ in range(4):
            x = self.layer(x)
        return F.linear(F.linear(x, self.widen.weight.t()), self.embedding.weight)


@final
class FourierMixing(nn.Module):
    """FNet (Lee-Thorp et al. 2021, arXiv:2105.03824): tokens mix by a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.feeds = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for i, feed in enumerate(self.feeds):
            x = self.norms[2 * i](x + torch.fft.fft2(x).real)
            x = self.norms[2 * i + 1](x + F.gelu(feed(x)))
        return self.classifier(x.amax(1))


@final
class PointerNetwork(nn.Module):
    """Copies from the source (See et al. 2017, arXiv:1704.04368): the copy distribution is scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head, self.gate = nn.Linear(WIDTH, VOCABULARY), nn.Linear(2 * WIDTH, 1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embedding(source))
        hidden, _ = self.decoder(self.embedding(target), state)
        copy = torch.bmm(self.query(hidden), memory.mT).softmax(-1)
        context = copy @ memory
        gate = torch.sigmoid(self.gate(torch.cat([hidden, context], -1)))
        words = self.head(hidden).softmax(-1) * gate
        place = source[:, None].expand(-1, target.shape[1], -1)
        return words.scatter_add(-1, place, (1 - gate) * copy).clamp_min(1e-9).log()


@final
class SpeechCTC(nn.Module):
    """Frames to characters; the loss is connectionist temporal classification, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, WIDTH, 3, padding=1)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 12)

    def forward(self, frames: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.convolution(frames)).permute(2, 0, 1)
        scores = self.head(self.recurrent(x)[0]).log_softmax(-1)
        n, length = labels.shape
        long = torch.full((n,), scores.shape[0], dtype=torch.long)
        loss = F.ctc_loss(scores, labels, long, torch.full((n,), length, dtype=torch.long))
        return {"loss": loss, "scores": scores}


@final
class BagOfWords(nn.Module):
    """EmbeddingBag with offsets and with weights per word."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
        self.weighted = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum")
        self.importance = nn.Embedding(VOCABULARY, 1)
        self.classifier = nn.Bilinear(WIDTH, WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(0, ids.numel(), ids.shape[1])
        weights = self.importance(ids).squeeze(-1).softmax(-1)
        return self.classifier(
            self.plain(ids.flatten(), offsets), self.weighted(ids, per_sample_weights=weights)
        )


@final
class RelativeAttention(nn.Module):
    """Attention by einsum with a bias per distance (T5-like buckets) shared by all layers; rotary keys."""

    relative: Tensor

    def __init__(self, heads: int = 2, layers: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Embedding(31, heads)
        self.inside = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.outside = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        place = torch.arange(64)
        self.register_buffer("relative", (place[:, None] - place).clamp(-15, 15) + 15, persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        half = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        angle = torch.outer(torch.arange(x.shape[1]).float(), torch.logspace(0, -3, half.shape[-1]))
        return torch.view_as_real(half * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.embedding(ids), ids.shape[1]
        bias = self.bias(self.relative[:length, :length])
        for inside, outside in zip(self.inside, self.outside, strict=True):
            q, k, v = inside(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
            scores = torch.einsum("bihd,bjhd->bijh", self.rotate(q), self.rotate(k)) / q.shape[-1] ** 0.5
            mixed = torch.einsum("bijh,bjhd->bihd", (scores + bias).softmax(2), v)
            x = x + outside(mixed.flatten(2))
        return torch.einsum("bld,vd->blv", x, self.embedding.weight)


@final
class ConditionalRandomField(nn.Module):
    """Tagger whose loss is the negative log-likelihood of a linear-chain CRF, by the forward algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.transitions = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        emissions = self.head(self.lstm(self.embedding(ids))[0])
        alpha, score = emissions[:, 0], emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for step in range(1, ids.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.transitions, dim=1) + emissions[:, step]
            score = score + self.transitions[tags[:, step - 1], tags[:, step]]
            score += emissions[:, step].gather(1, tags[:, step, None]).squeeze(1)
        return (alpha.logsumexp(1) - score).mean()


@final
class SelectiveScan(nn.Module):
    """A state space layer with input-dependent gates, whose scan writes into a tensor made before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)
        self.gates = nn.Linear(WIDTH, 3 * WIDTH)
        self.decay = nn.Parameter(torch.rand(WIDTH))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = F.silu(self.convolution(x.mT)[..., : ids.shape[1]].mT)
        step, enter, leave = self.gates(x).chunk(3, dim=-1)
        keep = torch.exp(-F.softplus(step) * self.decay.exp())
        states, state = torch.empty_like(x), x.new_zeros(len(x), WIDTH)
        for t in range(x.shape[1]):
            state = keep[:, t] * state + enter[:, t] * x[:, t]
            states[:, t] = state * leave[:, t].sigmoid()
        return self.classifier(states[:, -1])


@final
class TreeNetwork(nn.Module):
    """Composes the leaves of a nested tuple by one shared cell, recursively."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def compose(self, tree: Any, words: Tensor) -> Tensor:
        if isinstance(tree, int):
            return words[:, tree]
        return self.cell(torch.cat([self.compose(branch, words) for branch in tree], dim=-1))

    def forward(self, ids: Tensor, tree: Any) -> Tensor:
        return self.classifier(self.compose(tree, self.embedding(ids)))


@final
class MemoryNetwork(nn.Module):
    """Reads and writes an external memory by content (Graves et al. 2014, arXiv:1410.5401, simplified)."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.controller = nn.GRUCell(2 * WIDTH, WIDTH)
        self.heads = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH) for n in ("read", "write", "erase", "add")})
        self.register_buffer("memory", torch.randn(6, WIDTH))
        self.classifier = nn.Linear(2 * WIDTH, CLASSES)

    def address(self, head: str, state: Tensor, memory: Tensor) -> Tensor:
        return F.cosine_similarity(self.heads[head](state)[:, None], memory, dim=-1).softmax(-1)[..., None]

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.memory.expand(len(ids), -1, -1)
        state = read = memory.new_zeros(len(ids), WIDTH)
        for word in self.embedding(ids).unbind(1)[:6]:
            state = self.controller(torch.cat([word, read], -1), state)
            write = self.address("write", state, memory)
            memory = memory * (1 - write * self.heads["erase"](state).sigmoid()[:, None])
            memory = memory + write * self.heads["add"](state)[:, None]
            read = (self.address("read", state, memory) * memory).sum(1)
        return self.classifier(torch.cat([state, read], -1))


@final
class RareWords(nn.Module):
    """A language model whose softmax has frequent and rare words apart; torch.nn computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, cutoffs=[20, 60], div_value=2.0)

    def forward(self, ids: Tensor) -> Any:
        states, _ = self.lstm(self.embedding(ids[:, :-1]))
        return self.softmax(states.flatten(0, 1), ids[:, 1:].flatten())


@final
class LatentArray(nn.Module):
    """Perceiver (Jaegle et al. 2021, arXiv:2103.03206): learned latents attend to the input, repeatedly."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, WIDTH))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        words = self.embedding(ids)
        latents = self.latents.expand(len(ids), *self.latents.shape)
        weights = words.new_zeros(())
        for _ in range(3):
            seen, weights = self.cross(latents, words, words, key_padding_mask=ids == 0)
            latents = latents + seen
            latents = latents + self.inner(latents, latents, latents, need_weights=False)[0]
        return self.classifier(latents.mean(1)), weights
