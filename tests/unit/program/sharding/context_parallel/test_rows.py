"""By hand: which values are held by rows, what is gathered, and what is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_transformers import MODELS, SMALL, batch_of, built, transformers
from torch import Tensor, nn
from torch.nn import functional

from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption
from outsize.program.sharding.context_parallel.rows import SequenceRows, by_rows
from outsize.program.sharding.share import Share
from outsize.program.tape import Tape

X = torch.randn(2, 6, 12)


class Net(nn.Module):
    """A function of a module and a tensor, as a module."""

    def __init__(self, run: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def walked(run: Callable[..., Tensor], x: Tensor = X, **layers: nn.Module) -> tuple[Tape, SequenceRows]:
    model = Net(run, lin=nn.Linear(12, 12), **layers)
    tape = record(model, (x,), {})
    return tape, by_rows(tape, model, 2)


def share_of_last(run: Callable[..., Tensor], **layers: nn.Module) -> Share | None:
    tape, rows = walked(run, X, **layers)
    return rows.shares.get(tape.output_slots()[0])


def of_model(name: str) -> tuple[Tape, SequenceRows]:
    model = built(name)
    tape = record(model, (), batch_of(name))
    return tape, by_rows(tape, model, 2)


def test_products_norms_and_activations_stay_in_rows() -> None:
    share = share_of_last(lambda m, x: m.norm(x + m.lin(x).relu()), norm=nn.LayerNorm(12))
    assert share is not None
    assert (share.dim, share.parts) == (1, (6,))


@pytest.mark.parametrize(
    "layer", [nn.RMSNorm(12, elementwise_affine=False), nn.LayerNorm(12, elementwise_affine=False), nn.GLU(2)]
)
def test_so_do_layers_without_weights_that_treat_tokens_alike(layer: nn.Module) -> None:
    if isinstance(layer, nn.GLU):
        with pytest.raises(BadOption, match="there is no rule for GLU"):  # its result has another shape
            share_of_last(lambda m, x: m.layer(m.lin(x)), layer=layer)
    else:
        assert share_of_last(lambda m, x: m.layer(m.lin(x)), layer=layer) == Share(1, (6,))


@pytest.mark.parametrize(
    "layer", [nn.Softmax(1), nn.LayerNorm([6, 12], elementwise_affine=False), nn.Dropout1d(), nn.Tanhshrink()]
)
def test_layers_without_weights_are_tried(layer: nn.Module) -> None:
    if isinstance(layer, nn.Tanhshrink):
        assert share_of_last(lambda m, x: m.layer(m.lin(x)), layer=layer) == Share(1, (6,))
        return
    with pytest.raises(BadOption, match=f"there is no rule for {type(layer).__name__}"):
        share_of_last(lambda m, x: m.layer(m.lin(x)), layer=layer)


def test_batch_and_sequence_may_be_joined_and_parted() -> None:
    assert share_of_last(lambda m, x: m.lin(x).view(-1, 12)) == Share(0, (6, 6))
    assert share_of_last(lambda m, x: m.lin(x).view(-1, 12).view(2, 6, 3, 4)) == Share(1, (6,))
    assert share_of_last(lambda m, x: m.lin(x).view(2, 6, 3, 4).transpose(1, 2)) == Share(2, (6,))


def test_first_rows_stay_where_they_are_and_single_rows_are_gathered() -> None:
    assert share_of_last(lambda m, x: m.lin(x)[:, :-1]) == Share(1, (5,))
    assert share_of_last(lambda m, x: m.lin(x)[:, 0]) is None
    assert share_of_last(lambda m, x: m.lin(x)[:, 1:]) is None


def test_sums_over_the_rows_are_whole() -> None:
    assert share_of_last(lambda m, x: m.lin(x).mean(1)) is None
    assert share_of_last(lambda m, x: m.lin(x).sum(-1)) == Share(1, (6,))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda m, x: m.lin(x).cumsum(1), "cumsum goes over what is divided"),
        (lambda m, x: m.lin(x).softmax(1), "softmax goes over what is divided"),
        (lambda m, x: m.conv(m.lin(x).transpose(1, 2)), "there is no rule for Conv1d"),
        (lambda m, x: m.gru(m.lin(x))[0], "there is no rule for GRU"),
        (lambda m, x: m.lin(x).view(2, 3, 24), "does not keep the rows of the sequence apart"),
        (lambda m, x: torch.cat([m.lin(x), x], 1), "joins along the divided dim"),
        (lambda m, x: functional.scaled_dot_product_attention(*[m.lin(x)] * 3), "are one value"),
        (lambda m, x: m.lin(x).flip(1), "there is no rule for flip"),
    ],
)
def test_what_is_not_understood_is_refused(run: Callable[..., Tensor], reason: str) -> None:
    with pytest.raises(BadOption, match=reason) as error:
        walked(run, conv=nn.Conv1d(12, 12, 3, padding=1), gru=nn.GRU(12, 12, batch_first=True))
    assert "test_rows.py:" in error.value.numbers
    assert "axes={'cp': 1} (--axes cp=1)" in error.value.next_step


def test_a_write_in_place_that_others_would_miss_is_refused() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        z = m.lin(x) @ y.transpose(1, 2)
        y += 1
        return z + (m.lin(x) @ y.transpose(1, 2))

    with pytest.raises(BadOption, match="writes in place"):
        walked(run)


def test_a_model_without_a_sequence_is_refused() -> None:
    with pytest.raises(BadOption, match="finds no sequence"):
        walked(lambda m, x: m.lin(x), torch.randn(4, 12))


@pytest.mark.parametrize(("tokens", "ranks", "fitting"), [(1, 2, 1), (3, 4, 3), (5, 4, 3)])
def test_a_sequence_shorter_than_ranks_is_refused_with_the_ranks_that_fit(
    tokens: int, ranks: int, fitting: int
) -> None:
    model = Net(lambda m, x: m.lin(x), lin=nn.Linear(12, 12))
    tape = record(model, (torch.randn(4, tokens, 12),), {})
    with pytest.raises(BadOption, match="too short") as error:
        by_rows(tape, model, ranks)
    assert f"{tokens} tokens" in error.value.numbers
    assert f"cp={ranks}" in error.value.numbers
    assert error.value.next_step == f"axes={{'cp': {fitting}}} (--axes cp={fitting})"
    if fitting > 1:
        assert by_rows(tape, model, fitting).tokens == tokens


@pytest.mark.parametrize("norm_first", [False, True])
def test_tokens_first_attention_divides_the_first_dim(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 24, 0.0, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    tape = record(model, (torch.randn(7, 4, 12),), {})
    rows = by_rows(tape, model, 2)
    assert rows.shares[tape.output_slots()[0]] == Share(0, (7,))
    assert rows.tokens == 7


def test_tokens_behind_samples_are_found_in_front_of_tokens_first_attention() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x).transpose(0, 1)
        return m.attention(y, m.lin(y), m.lin(y), need_weights=False)[0]

    tape, rows = walked(run, X, attention=nn.MultiheadAttention(12, 2))
    assert rows.shares[tape.output_slots()[0]] == Share(0, (6,))
    assert rows.tokens == 6


def test_what_is_refused_of_tokens_first_is_the_line_of_its_own_walk() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.attention(m.lin(x), x, x, need_weights=False)[0].cumsum(0)

    with pytest.raises(BadOption, match="cumsum goes over what is divided"):
        walked(run, attention=nn.MultiheadAttention(12, 2))


def test_experts_that_a_router_chose_may_be_counted_over_all_rows() -> None:
    """As auxiliary losses do: integers without a rule are gathered, and what has a gradient is not."""

    def run(m: Any, x: Tensor) -> Tensor:
        scores = m.lin(x).view(-1, 12).softmax(-1)
        chosen = scores.topk(2, -1)[1]
        counts = torch.histc(chosen.reshape(-1).float(), bins=12, min=0, max=12)
        return (counts * scores.sum(0)).sum()

    tape, rows = walked(run)
    flat = next(i for i in tape.instructions if i.name == "reshape")
    assert len(rows.steps[flat.index].gather) == 1
    assert tape.output_slots()[0] not in rows.shares


@pytest.mark.parametrize(("name", "gathers"), [("gpt2", 8), ("llama", 8), ("qwen3", 8), ("mixtral", 8)])
@pytest.mark.sample("gpt2-8", "mixtral-8")
def test_keys_and_values_alone_are_gathered(name: str, gathers: int) -> None:
    if name == "gpt2":
        config = transformers.GPT2Config(**{**MODELS[name][2], "attn_pdrop": 0.0})
        model = transformers.GPT2LMHeadModel(config).train()
        tape = record(model, (), batch_of(name))
        rows = by_rows(tape, model, 2)
    else:
        tape, rows = of_model(name)
    assert sum(len(step.gather) for step in rows.steps.values()) == gathers
    assert tape.loss is None or tape.loss.slot not in rows.shares


@pytest.mark.parametrize(
    ("name", "reason"), [("gpt2", "its dropout draws one mask"), ("mamba", "no rule for")]
)
def test_models_that_are_not_understood_are_refused(name: str, reason: str) -> None:
    with pytest.raises(BadOption, match=reason) as error:
        of_model(name)
    assert ".py:" in error.value.numbers
    assert "axes={'cp': 1} (--axes cp=1)" in error.value.next_step


def test_positions_that_are_counted_get_the_whole_index() -> None:
    """BART's table looks at the sizes of its index alone, so all of it is gathered."""
    tape, rows = of_model("bart")
    positions = next(i for i in tape.instructions if i.name == "model.encoder.embed_positions")
    assert list(rows.steps[positions.index].gather) == [positions.args[0]]
    assert rows.shares.get(next(positions.defines())) is None


def test_memory_that_is_written_piece_by_piece_is_of_rows() -> None:
    """As DeepSeek makes its keys."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        z = y.new_empty(2, 6, 24)
        z[..., :12].copy_(y)
        z[..., 12:].copy_(x)
        return z

    assert share_of_last(run) == Share(1, (6,))


def test_pieces_are_stacked_repeated_and_viewed_in_rows() -> None:
    assert share_of_last(lambda m, x: torch.stack([m.lin(x), x], 1)) == Share(2, (6,))
    assert share_of_last(lambda m, x: torch.stack([m.lin(x), x], -1)) == Share(1, (6,))
    assert share_of_last(lambda m, x: m.lin(x).repeat(3, 1, 1)) == Share(1, (6,))
    assert share_of_last(lambda m, x: m.lin(x).view(12, 12).repeat(2, 1)) == Share(0, (6,) * 4)
    assert share_of_last(lambda m, x: m.lin(x).view(-1, 12).view_as(m.lin(x).flatten(0, 1))) == Share(
        0, (6, 6)
    )
    assert share_of_last(
        lambda m, x: torch.baddbmm(x[:, :1, :6], m.lin(x), m.lin(x).transpose(1, 2))
    ) == Share(1, (6,))


def test_a_table_of_pairs_of_positions_is_no_source() -> None:
    config = transformers.T5Config(**{**MODELS["t5"][2], "dropout_rate": 0.0})
    model = transformers.T5ForConditionalGeneration(config).train()
    rows = by_rows(record(model, (), batch_of("t5")), model, 2)
    assert rows.sources == ("encoder.embed_tokens", "decoder.embed_tokens")


def test_samples_as_many_as_tokens_are_told_apart() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).train()
    ids = torch.randint(3, 61, (6, 6))
    tape = record(model, (), {"input_ids": ids, "labels": ids})
    embedded = next(i for i in tape.instructions if i.name == "model.embed_tokens")
    share = by_rows(tape, model, 2).shares[next(embedded.defines())]
    assert share == Share(1, (3, 3), mirrored=True)
