"""Structured output: what a request says its answer must look like, compiled by llguidance, as masks over the vocabulary."""

from maga_transformer.structured.compiler import Compiled, Compiler
from maga_transformer.structured.grammar import Grammar
from maga_transformer.structured.masks import NOT_FOLLOWED, MaskWorker

__all__ = ["NOT_FOLLOWED", "Compiled", "Compiler", "Grammar", "MaskWorker"]
