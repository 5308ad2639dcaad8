"""`maga quantize`: from a checkpoint to a smaller one in a standard layout, a layer at a time.

recipe      what is asked for
plan        which tensors become what, and the program in stages that run one after the other
calibrate   what the linears of a stage see when the model reads a text
grid, gptq, awq, float8    the arithmetic
layouts     how each format stores it
convert     the loop over the stages: bounded memory, resumable, the result appears whole or not at all"""

from maga_transformer.quantize.convert import convert
from maga_transformer.quantize.recipe import Calibration, Recipe

__all__ = ["Calibration", "Recipe", "convert"]
