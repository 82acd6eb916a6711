"""What to expect of uniform routing: every set of K experts is as likely as any other. Closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """A Mixture-of-Experts layer over ranks; `domain` of them reach each other over the fast link."""

    tokens: int  # of a rank
    top_k: int
    experts: int  # of all ranks
    ranks: int
    domain: int
    alignment: int

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def hit(self) -> float:
        """Chance that a token has an expert on a given rank."""
        misses = math.comb(self.experts - self.local_experts, self.top_k)
        return 1 - misses / math.comb(self.experts, self.top_k)

    @property
    def ranks_per_token(self) -> float:
        return self.ranks * self.hit

    @property
    def link_rows(self) -> float:
        """Rows that a rank sends to the other ranks of its domain, and receives from them."""
        return self.tokens * (min(self.domain, self.ranks) - 1) * self.hit

    @property
    def network_rows(self) -> float:
        """Rows that a rank sends beyond its domain: one for each rank there that needs it."""
        return self.tokens * (self.ranks - min(self.domain, self.ranks)) * self.hit

    @property
    def rows(self) -> int:
        """Slots of a rank that hold tokens."""
        return self.tokens * self.top_k

    @property
    def slots(self) -> float:
        """Slots of a rank, padding included."""
        return self.local_experts * self._padded_tokens_per_expert()

    def _padded_tokens_per_expert(self) -> float:
        """Mean of an expert's tokens rounded up to the alignment; the tokens are binomial."""
        total, chance, step = self.tokens * self.ranks, self.top_k / self.experts, self.alignment
        if chance >= 1:
            return float(-(-total // step) * step)
        spread = math.sqrt(total * chance * (1 - chance))
        first = max(0, math.floor(total * chance - 10 * spread) - 1)
        last = min(total, math.ceil(total * chance + 10 * spread) + 10)
        log_chance, log_rest = math.log(chance), math.log1p(-chance)
        mean = weight = 0.0
        for n in range(first, last + 1):
            log_ways = math.lgamma(total + 1) - math.lgamma(n + 1) - math.lgamma(total - n + 1)
            probability = math.exp(log_ways + n * log_chance + (total - n) * log_rest)
            mean += probability * (-(-n // step) * step)
            weight += probability
        return mean / weight

    def capacity(self, headroom: float) -> int:
        """recv_capacity for `headroom` times the expected slots; never more than the worst case."""
        wanted = math.ceil(self.slots * headroom / self.alignment) * self.alignment
        return max(self.alignment, min(wanted, self.worst_capacity))

    @property
    def worst_capacity(self) -> int:
        """Slots that no routing exceeds: every token of every rank to as many experts here as it can have."""
        routed = self.tokens * self.ranks * min(self.top_k, self.local_experts)
        # Padding of at most alignment - 1 each, and never more experts than tokens.
        padded = routed + min(self.local_experts, routed) * (self.alignment - 1)
        return max(self.alignment, padded // self.alignment * self.alignment)
