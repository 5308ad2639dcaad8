"""GPTQ (Frantar et al., https://arxiv.org/abs/2210.17323): columns are rounded one after the other, and what rounding a column
costs in the layer's output is made good by the columns that are still free."""

from __future__ import annotations

import numpy as np

from maga_transformer.quantize.grid import Floats, Grid, Quantized, fit
from maga_transformer.quantize.recipe import Recipe

_BLOCK = 128  # columns whose effect on the later ones is applied at once


def gptq(weight: Floats, gram: Floats, recipe: Recipe) -> Quantized:
    """`weight` (rows, columns), `gram` (columns, columns): the sum of x xT over the inputs x.

    recipe.act_order: "none": columns from left to right; "static": those with the largest inputs first, while groups stay runs of
    columns whose grids are chosen beforehand; "dynamic" (desc_act): groups are made in that order too."""
    rows, columns = weight.shape
    group = recipe.group(columns)
    weight, hessian = weight.copy(), gram.astype(np.float64)
    diagonal = np.diag(hessian).copy()
    unused = diagonal == 0
    weight[:, unused] = 0
    hessian[unused, unused] = 1
    hessian[np.diag_indices(columns)] += recipe.damp * float(diagonal.mean() or 1)

    order = np.arange(columns) if recipe.act_order == "none" else np.argsort(-diagonal, kind="stable")
    importance = np.asarray(diagonal, np.float32)
    group_of = np.empty(columns, np.int32)
    group_of[order] = np.arange(columns) // group
    grids: list[Grid] = []
    if recipe.act_order == "static" or group == columns:
        group_of = np.arange(columns, dtype=np.int32) // group
        for begin in range(0, columns, group):
            part = slice(begin, begin + group)
            grids.append(fit(weight[:, part], recipe.bits, symmetric=recipe.symmetric, gram=importance[part]))

    free = weight[:, order]
    inverse = _inverse_factor(hessian[np.ix_(order, order)])
    codes = np.empty((rows, columns), np.uint8)
    block = _BLOCK if grids else -(-_BLOCK // group) * group  # a group that is made on the way lies in one block
    for begin in range(0, columns, block):
        end = min(begin + block, columns)
        here, factor = np.asfortranarray(free[:, begin:end]), inverse[begin:end, begin:end]
        errors = np.empty_like(here)
        for i in range(end - begin):
            column = order[begin + i]
            if group_of[column] == len(grids):
                columns_of = order[begin + i : begin + i + group]
                grids.append(fit(here[:, i : i + group], recipe.bits, symmetric=recipe.symmetric, gram=importance[columns_of]))
            grid = grids[group_of[column]]
            codes[:, column] = grid.codes(here[:, i])
            errors[:, i] = (here[:, i] - grid.rounded(here[:, i])) / factor[i, i]
            here[:, i + 1 :] -= np.outer(errors[:, i], factor[i, i + 1 :])
        free[:, end:] -= errors @ inverse[begin:end, end:]
    scale, zero = np.stack([grid.scale for grid in grids], 1), np.stack([grid.zero for grid in grids], 1)
    return Quantized(codes, scale, zero.astype(np.uint8), group_of)


def _inverse_factor(hessian: np.ndarray) -> Floats:
    """The upper triangular U with UT U = H^-1. With H = R RT and R upper triangular, it is R^-1: one factor is inverted, and never
    H, whose condition is the square of R's. R is the Cholesky factor of H read backwards."""
    backwards = np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]
    return np.asarray(np.triu(np.linalg.inv(backwards)), np.float32)
