"""Problem: what does a transformer of these dimensions do, save and own on one rank, without a module?

A layer is a list of ops; each says its forward and what the backward asks of it, in the records that
capture writes for a real module (`ir.graph.Work`), and what autograd keeps of it. One microbatch, one
rank:

    n = b s / c  tokens,  n' = n / t  where sequence parallelism splits the norms and dropouts, else n
    matmul       2 m n k FLOPs, and as many for each of the two gradients
    attention    4 n s h / t FLOPs forward, twice that backward; s x s matrices move only when not fused
    saved        s b h (34 + 5 a s / h) bytes of a layer with dropout in half precision on one rank

Source: Korthikanti et al., "Reducing Activation Recomputation", arXiv 2205.05198, sec. 4 (bytes) and
appendix A (FLOPs); sequence parallelism ibid. Symbols: b -> microbatch, s -> seq_len, h -> hidden, a ->
heads, t -> tp, c -> cp, v -> vocabulary. Deviations: biases and norms are counted; the triangle of a
causal mask is not taken off, as no published FLOP count does. Complexity: O(1). Oracle:
tests/benchmarks/test_transformer.py compares with the capture of a real GPT-2 and Llama, and with the
closed form above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from pydantic import Field

from outsize.ir.base import Record
from outsize.ir.graph import OpFamily, Work

Recompute = Literal["none", "selective", "full"]
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
Factors = tuple[float, float, int]
MASK_BYTES = 1  # of a dropout's mask, per element
SOFTMAX_ROWS = 4  # heads x samples that Megatron-LM's softmax kernel takes at once
APART_BYTES = (
    32  # per score, where it takes none: float32 scaled, masked, normalised (r4 w4), to and from half
)


@final
class Transformer(Record):
    """Dimensions. 0 means the usual: kv_heads = heads, ffn = 4 hidden, head_dim = hidden / heads.

    `experts` of which each token takes `active`; `shared_ffn` is the width of one that takes all tokens.
    """

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    kv_heads: int = 0
    ffn: int = 0
    head_dim: int = 0
    positions: Literal["learned", "rotary", "none"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    gated: bool = False
    bias: bool = True
    tied: bool = True
    dropout: bool = True
    experts: int = 0
    active: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0

    @property
    def width(self) -> int:
        """Of a dense layer's (or an expert's) hidden activations."""
        usual = self.ffn or 4 * self.hidden
        return (self.expert_ffn or usual) if self.experts else usual

    @property
    def query(self) -> int:
        """Width of all queries."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def key(self) -> int:
        """Width of all keys (and of all values)."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)


@final
class Sharding(Record):
    """How one microbatch of `microbatch` sequences meets one rank. `fused`: attention never writes s x s."""

    microbatch: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    fused: bool = False
    recompute: Recompute = "none"
    dtype: str = "bfloat16"

    @property
    def element_bytes(self) -> int:
        """Of an activation."""
        return SIZES[self.dtype]


@final
@dataclass(frozen=True, slots=True)
class Op:
    """One op: forward (FLOPs, bytes moved, kernels), the gradients as multiples of them, bytes kept.

    core    between the projections of attention: what selective recompute computes anew
    saved   bytes kept for the backward, none of which another op of the layer keeps too
    """

    family: OpFamily
    flops: float
    moved: float
    launches: int = 1
    input_factors: Factors = (1.0, 1.0, 1)
    weight_factors: Factors | None = None
    saved: float = 0.0
    core: bool = False

    def work(self, factors: Factors | None, dtype: str) -> tuple[Work, ...]:
        """The op's record in a pass that costs so many times its FLOPs, bytes and kernels."""
        if factors is None:
            return ()
        flops, moved = int(self.flops * factors[0]), int(self.moved * factors[1])
        launches = self.launches * factors[2]
        return (Work(family=self.family, dtype=dtype, flops=flops, moved_bytes=moved, launches=launches),)


@final
@dataclass(frozen=True, slots=True)
class Passes:
    """Works of one microbatch on one rank; `recompute` is what of the forward the backward repeats."""

    forward: tuple[Work, ...]
    backward_input: tuple[Work, ...]
    backward_weight: tuple[Work, ...]
    recompute: tuple[Work, ...] = ()

    @property
    def flops(self) -> int:
        """Of all passes together."""
        works = (*self.forward, *self.backward_input, *self.backward_weight, *self.recompute)
        return sum(work.flops for work in works)


def layer_passes(model: Transformer, sharding: Sharding) -> Passes:
    """The Work of one layer."""
    ops = layer_ops(model, sharding)
    again = {"none": [], "selective": [op for op in ops if op.core], "full": ops}[sharding.recompute]
    return passes(ops, sharding.dtype, again)


def passes(ops: Sequence[Op], dtype: str, again: Iterable[Op] = ()) -> Passes:
    """The Works of some ops, of which `again` are repeated in the backward."""
    return Passes(
        forward=tuple(w for op in ops for w in op.work((1.0, 1.0, 1), dtype)),
        backward_input=tuple(w for op in ops for w in op.work(op.input_factors, dtype)),
        backward_weight=tuple(w for op in ops for w in op.work(op.weight_factors, dtype)),
        recompute=tuple(w for op in again for w in op.work((1.0, 1.0, 1), dtype)),
    )


def layer_ops(model: Transformer, sharding: Sharding) -> list[Op]:
    """The ops of one layer in execution order."""
    return [*_attention_ops(model, sharding), *_mlp_ops(model, sharding)]


def embedding_ops(model: Transformer, sharding: Sharding) -> list[Op]:
    """Look up tokens (and positions), drop. The backward scatters into a gradient of the whole table."""
    n, size = _tokens(model, sharding), sharding.element_bytes
    rows = n * model.hidden * size
    table = model.vocabulary / sharding.tp * model.hidden * size
    scatter = (1.0, (rows + table) / (2 * rows), 2)
    ops = [Op("embedding", 0, 2 * rows, input_factors=(0, 0, 0), weight_factors=scatter, saved=8 * n)]
    if model.positions == "learned":
        ops.append(Op("embedding", 0, 3 * rows, weight_factors=(1.0, 1.0, 1)))
    return ops + _dropout_add(model, sharding, residual=False)


def head_ops(model: Transformer, sharding: Sharding) -> list[Op]:
    """Final norm, logits, cross entropy in float32 over a vocabulary split by tp."""
    n, size = _tokens(model, sharding), sharding.element_bytes
    columns = model.vocabulary / sharding.tp
    logits = n * columns
    # float(): r2 w4; max r4; subtract r4 w4; exp r4 w4; sum r4; divide r4 w4. Back: r4 w4, to half r4 w2.
    loss = Op("reduction", 5 * logits, (size + 36) * logits, 8, (0.4, 14 / 38, 3), saved=4 * logits)
    return [_norm(model, sharding), _matmul(n, model.hidden, columns, sharding), loss]


def layer_saved_bytes(model: Transformer, sharding: Sharding) -> int:
    """Bytes that one layer keeps per microbatch: everything, all but attention's core, or its input alone."""
    if sharding.recompute == "full":
        return int(_positions(model, sharding) * model.hidden * sharding.element_bytes)
    selective = sharding.recompute == "selective" and not sharding.fused
    kept = (op.saved for op in layer_ops(model, sharding) if not (selective and op.core))
    projections = _qkv_bytes(model, sharding) if selective else 0.0
    return int(sum(kept) + projections)


def layer_parameters(model: Transformer, sharding: Sharding) -> int:
    """Parameters of one layer on one rank, those of its local experts included."""
    return dense_parameters(model, sharding) + expert_parameters(model, sharding)


def dense_parameters(model: Transformer, sharding: Sharding) -> int:
    """Parameters of one layer on one rank but for the experts."""
    h, t, bias = model.hidden, sharding.tp, int(model.bias)
    wide = model.query + 2 * model.key
    attention = (h + bias) * wide // t + model.query // t * h + bias * h
    norms = 2 * norm_parameters(model)
    if not model.experts:
        return attention + norms + _mlp_parameters(model, model.width, t)
    shared = _mlp_parameters(model, model.shared_ffn, t) if model.shared_ffn else 0
    return attention + norms + h * model.experts + shared


def expert_parameters(model: Transformer, sharding: Sharding) -> int:
    """Parameters of the experts of one layer that one rank holds."""
    local = model.experts // sharding.ep if model.experts else 0
    return local * _mlp_parameters(model, model.width, sharding.tp)


def norm_parameters(model: Transformer) -> int:
    """Of one norm."""
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def embedding_parameters(model: Transformer, sharding: Sharding) -> int:
    """Tokens (split by tp) and learned positions (not split)."""
    positions = model.seq_len * model.hidden if model.positions == "learned" else 0
    return model.vocabulary // sharding.tp * model.hidden + positions


def head_parameters(model: Transformer, sharding: Sharding, own: bool) -> int:
    """Final norm, and the output matrix where the rank does not have it already as its embedding."""
    return norm_parameters(model) + (model.vocabulary // sharding.tp * model.hidden if own else 0)


def parameters(model: Transformer) -> int:
    """Of the whole model, a tied matrix once."""
    whole = Sharding()
    ends = embedding_parameters(model, whole) + head_parameters(model, whole, own=not model.tied)
    return model.layers * layer_parameters(model, whole) + ends


def boundary_bytes(model: Transformer, sharding: Sharding) -> int:
    """Bytes that a stage sends on for one microbatch (and gets back as gradient), per rank."""
    return int(_positions(model, sharding) * model.hidden * sharding.element_bytes)


def _tokens(model: Transformer, sharding: Sharding) -> float:
    return sharding.microbatch * model.seq_len / sharding.cp


def _positions(model: Transformer, sharding: Sharding) -> float:
    """Tokens in the regions that sequence parallelism splits."""
    return _tokens(model, sharding) / (sharding.tp if sharding.sequence_parallel else 1)


def _attention_ops(model: Transformer, sharding: Sharding) -> list[Op]:
    n, t = _tokens(model, sharding), sharding.tp
    kept = _positions(model, sharding) * model.hidden * sharding.element_bytes
    wide = (model.query + 2 * model.key) / t
    ops = [_norm(model, sharding), _matmul(n, model.hidden, wide, sharding, kept)]
    if model.positions == "rotary":
        turned = n * (model.query + model.key) / t
        ops.append(Op("elementwise", 3 * turned, 2 * turned * sharding.element_bytes, core=True))
    ops += [_core(model, sharding), _matmul(n, model.query / t, model.hidden, sharding)]
    return ops + _dropout_add(model, sharding)


def _core(model: Transformer, sharding: Sharding) -> Op:
    """Softmax(Q K^T) V. Fused: reads q, k, v, writes the output. Not fused: s x s is written and read.

    Megatron-LM's kernel of scale, mask and softmax takes a multiple of four heads x samples on a rank
    (fused_softmax.py, is_kernel_available); others go through four more kernels in float32.
    """
    n, t, size = _tokens(model, sharding), sharding.tp, sharding.element_bytes
    flops = 4 * n * model.seq_len * model.query / t
    qkv = _qkv_bytes(model, sharding)
    rows = n * model.heads / t
    if sharding.fused:
        out = n * model.query / t * size
        return Op("attention", flops, qkv + out, 1, (2.5, 2.0, 2), saved=qkv + 4 * rows, core=True)
    scores, drop = rows * model.seq_len, int(model.dropout)
    apart = int(sharding.microbatch * model.heads // t % SOFTMAX_ROWS > 0)
    moved = qkv + scores * (4 * size + drop * (2 * size + MASK_BYTES) + apart * APART_BYTES)
    saved = qkv + scores * (size + drop * (size + MASK_BYTES))
    return Op("attention", flops, moved, 3 + drop + 4 * apart, (2.0, 2.0, 2), saved=saved, core=True)


def _qkv_bytes(model: Transformer, sharding: Sharding) -> float:
    wide = (model.query + 2 * model.key) / sharding.tp
    return _tokens(model, sharding) * wide * sharding.element_bytes


def _mlp_ops(model: Transformer, sharding: Sharding) -> list[Op]:
    if not model.experts:
        n = _tokens(model, sharding)
        kept = _positions(model, sharding) * model.hidden * sharding.element_bytes
        inner = _two_matmuls(model, sharding, n, model.width, kept)
    else:
        inner = _expert_ops(model, sharding)
    return [_norm(model, sharding), *inner, *_dropout_add(model, sharding)]


def _expert_ops(model: Transformer, sharding: Sharding) -> list[Op]:
    """Router, dispatch, the experts on `active` copies of each token, combine, the shared expert."""
    n, size = _tokens(model, sharding) / sharding.tp, sharding.element_bytes
    taken = n * model.active * sharding.tp
    copies = taken * model.hidden * size
    router = _matmul(n, model.hidden, model.experts, sharding, n * model.hidden * size)
    move = Op("other", 0, 2 * copies, 4, saved=copies)
    ops = [router, move, *_two_matmuls(model, sharding, taken, model.width, copies), move]
    if model.shared_ffn:
        ops += _two_matmuls(model, sharding, n * sharding.tp, model.shared_ffn, 0.0)
    return ops


def _two_matmuls(model: Transformer, sharding: Sharding, n: float, width: int, kept: float) -> list[Op]:
    inner, size, gates = width / sharding.tp, sharding.element_bytes, 2 if model.gated else 1
    moved = n * inner * size * (gates + 1)
    act = Op("elementwise", 8 * n * inner, moved, 1, (1.0, 1.5, 1), saved=n * inner * size * gates)
    up = _matmul(n, model.hidden, gates * inner, sharding, kept)
    return [up, act, _matmul(n, inner, model.hidden, sharding)]


def _matmul(n: float, inner: float, columns: float, sharding: Sharding, saved: float | None = None) -> Op:
    """A linear layer; it keeps its input, `saved` bytes where that is not n x inner."""
    size = sharding.element_bytes
    moved = (n * inner + inner * columns + n * columns) * size
    kept = n * inner * size if saved is None else saved
    once = (1.0, 1.0, 1)
    return Op("matmul", 2 * n * inner * columns, moved, 1, once, once, kept)


def _norm(model: Transformer, sharding: Sharding) -> Op:
    """Keeps its input and, per token, the mean and the reciprocal deviation in float32."""
    positions = _positions(model, sharding)
    elements, statistics = positions * model.hidden, 8 if model.norm == "layernorm" else 4
    row = elements * sharding.element_bytes
    kept = row + statistics * positions
    return Op("normalisation", 8 * elements, 2 * row, 1, (1.0, 1.5, 1), (0.5, 1.0, 1), kept)


def _dropout_add(model: Transformer, sharding: Sharding, residual: bool = True) -> list[Op]:
    """Bias, dropout and residual in one kernel; keeps the mask."""
    elements = _positions(model, sharding) * model.hidden
    mask = elements * MASK_BYTES if model.dropout else 0
    if not (mask or residual):
        return []
    moved = elements * sharding.element_bytes * (3 if residual else 2) + mask
    return [Op("elementwise", 2 * elements, moved, 1, (0.5, 1.0, 1), saved=mask)]


def _mlp_parameters(model: Transformer, width: int, tp: int) -> int:
    gates, bias = 2 if model.gated else 1, int(model.bias)
    return (model.hidden + bias) * gates * width // tp + width // tp * model.hidden + bias * model.hidden
