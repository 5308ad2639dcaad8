"""A stand-in for models without a tokenizer (dummy weights): ids below 256 are the bytes of UTF-8, the others read "<id>"."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from maga_transformer.tokenizer.bytelevel import LETTER_OF
from maga_transformer.tokenizer.tokenizer import SpecialTokens, Tokenizer


def byte_id_tokenizer(vocab_size: int, eos_ids: Iterable[int]) -> Tokenizer:
    letters = {LETTER_OF[byte]: byte for byte in range(min(256, vocab_size))}
    vocabulary = letters | {f"<{token}>": token for token in range(256, vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(tokenizer, SpecialTokens(eos_ids=frozenset(eos_ids)), vocab_size=vocab_size)
