"""Rank files of tiktoken (https://github.com/openai/tiktoken), a token in base64 and its rank a line, as a tokenizer of the
`tokenizers` library."""

import base64
import binascii

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from maga_transformer.tokenizer.bytelevel import spelled
from maga_transformer.tokenizer.pretokenizers import PRE_TOKENIZATIONS


def is_rank_file(path: str) -> bool:
    with open(path, "rb") as file:
        parts = file.readline(1000).split()
    try:
        return len(parts) == 2 and parts[1].isdigit() and bool(base64.b64decode(parts[0], validate=True))
    except binascii.Error:
        return False


def read_ranks(path: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            parts = line.split()
            if not parts:
                continue
            try:
                token, rank = parts
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:  # binascii.Error is one
                raise ValueError(f"{path}: line {number} is not a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the {len(ranks)} ranks are not the numbers from 0 on")
    return ranks


def tiktoken_tokenizer(ranks: dict[bytes, int], pre: str) -> Tokenizer:
    """`pre`: how text is cut, a name of pretokenizers.py. tiktoken joins the two neighbours whose result has the lowest rank, so
    every split of a token into two tokens is a merge, in the order of ranks; a piece that is a token needs none."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [split for split in splits if split[0] in ranks and split[1] in ranks]
        merges += [(spelled(left), spelled(right)) for left, right in sorted(known, key=lambda s: (ranks[s[0]], ranks[s[1]]))]
    vocab = {spelled(token): rank for token, rank in ranks.items()}
    kind = PRE_TOKENIZATIONS[pre]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=True))
    if kind.normal_form:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
