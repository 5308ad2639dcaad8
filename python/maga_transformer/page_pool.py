"""How many pages the K/V cache gets: what the user asked for, or what measured memory leaves."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from maga_transformer.config import Config, ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pool:
    """How many pages the K/V cache gets, and why. Its sizes are pairs of both."""

    config: Config  # of the device: without zeros
    page_bytes: int
    context: int  # tokens of the longest sequence
    prefix: int = 0  # and of what stands before it
    spare: int = 0  # pages that no sequence can have: of a prefix, one that is copied

    def _for(self, tokens: int) -> int:
        return -(-(self.prefix + tokens) // self.config.seq_size_per_block) + self.spare

    def longest(self, pages: int) -> int:
        """Of a sequence, prefix included."""
        return min(self.context + self.prefix, (pages - self.spare) * self.config.seq_size_per_block)

    @property
    def per_sequence(self) -> int:
        return self._for(self.context)

    def given(self, free: int) -> tuple[int, str] | None:
        """The size that the user asked for; None: no size. `free`: available bytes. ConfigError when there are fewer."""
        asked = self.config.kv_cache_mem_mb
        if asked < 0:
            return None
        why = f"KV_CACHE_MEM_MB={asked}"
        if asked << 20 > free:
            raise ConfigError(f"{why}: only {free >> 20} MiB of memory are available")
        pages = (asked << 20) // self.page_bytes
        self.check(pages, why)
        return pages, why

    def measured(self, free: int) -> tuple[int, str]:
        """max_num_seqs full sequences, but at most half of the `free` bytes that weights and buffers leave."""
        wanted = self.config.max_num_seqs * self.per_sequence
        pages = max(0, min(wanted, free // 2 // self.page_bytes))
        why = (
            f"{self.config.max_num_seqs} sequences of full length"
            if pages == wanted
            else f"half of the {free >> 20} MiB that are available"
        )
        self.check(pages, why)
        return pages, why

    def check(self, pages: int, why: str) -> None:
        """ConfigError when not even one sequence fits; a warning when the longest does not."""
        context_given = self.config.max_seq_len > 0
        smallest = self.per_sequence if context_given else self._for(2)
        if pages < smallest:
            raise ConfigError(
                f"the K/V cache would have {pages} pages of {self.page_bytes >> 10} KiB ({why}), which is too little: "
                f"{'MAX_SEQ_LEN=' + str(self.context) if context_given else 'the shortest sequence'} needs "
                f"{smallest * self.page_bytes / 2**20:.1f} MiB; "
                "raise KV_CACHE_MEM_MB" + (" or lower MAX_SEQ_LEN" if context_given else "")
            )
        if pages < self.per_sequence:
            log.warning(
                "the K/V cache holds %d tokens (%s): the context is lowered from %d to that; set KV_CACHE_MEM_MB or "
                "MAX_SEQ_LEN to choose",
                self.longest(pages) - self.prefix,
                why,
                self.context,
            )
