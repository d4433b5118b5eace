"""The last linear of a decoder whose weight is not the embedding's, too."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

HeadFunction = Callable[[Tensor, Tensor], "Tensor | tuple[Tensor, ...]"]


class LMHead(nn.Linear):
    """Its weight [V, H] belongs to whoever calls it: losses want log-probabilities of some tokens, never all logits.

    A module, so that FSDP can gather the weight for this call, and reduce its gradient behind the call's backward.
    """

    def forward(self, hidden: Tensor, head: HeadFunction) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        """hidden [N, H] -> head(hidden, weight)."""
        return head(hidden, self.weight)
