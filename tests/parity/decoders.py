"""A decoder whose blocks attend and perhaps multiply, of the sizes that a test gives it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class AttendingBlock(nn.Module):
    """Attends with `heads` heads, of which `sharing` have the same keys and values; then multiplies."""

    def __init__(self, width: int, heads: int, sharing: int, multiplies: bool) -> None:
        super().__init__()
        self.head_width, self.shares = width // heads, sharing > 1
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width // sharing)
        self.up, self.down = (nn.Linear(width, width) if multiplies else None for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, tokens, width) to the same shape."""
        seen = self.norm(x)
        q, (k, v) = self.q(seen), self.kv(seen).chunk(2, -1)
        q, k, v = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shares)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        if self.up is None or self.down is None:
            return x
        return x + self.down(functional.gelu(self.up(x)))


class NumberDecoder(nn.Module):
    """Takes 8 numbers for each token, and gives one."""

    def __init__(
        self, width: int, heads: int, layers: int, *, sharing: int = 1, multiplies: bool = False
    ) -> None:
        super().__init__()
        self.enter, self.last = nn.Linear(8, width), nn.Linear(width, 1)
        blocks = (AttendingBlock(width, heads, sharing, multiplies) for _ in range(layers))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, tokens, 8) to (batch, tokens, 1)."""
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def mean_square(output: Tensor) -> Tensor:
    """Returns a loss that adds up over samples."""
    return output.square().mean()
