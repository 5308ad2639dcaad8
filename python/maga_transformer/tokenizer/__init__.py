"""Tokenizers: text to ids and back, and the model's chat template, from a folder or from a GGUF file's metadata."""

from maga_transformer.tokenizer.load import load_tokenizer
from maga_transformer.tokenizer.stream import DecodeStream
from maga_transformer.tokenizer.tokenizer import Tokenizer

__all__ = ["DecodeStream", "Tokenizer", "load_tokenizer"]
