"""Programs as data: what validate refuses and how it says so, what fuse joins and leaves, what ops cost."""

from collections.abc import Callable
from typing import Any

import pytest
from maga_transformer._core import Program, View, cost, fuse

ALL = {"linear_residual": True, "gated_linear": True, "prepare_qkv": True}
NO_FUSION = dict.fromkeys(ALL, False)

HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 8}


def program() -> Program:
    p = Program()
    p.vocab = 50
    return p


def weight(p: Program, *shape: int) -> int:
    return p.weight(f"weight{len(p.weights)}", ["-"], list(shape))


def names(p: Program) -> list[str]:
    return [op["op"] for op in p.ops]


# --- validate ---


def narrow_linear(p: Program) -> None:
    p.linear(p.value("y", 6), p.input("x", 5), weight=weight(p, 6, 4))


def linear_bias(p: Program) -> None:
    p.linear(p.value("y", 6), p.input("x", 5), weight=weight(p, 6, 5), bias=weight(p, 5))


def linear_onto_itself(p: Program) -> None:
    x = p.input("x", 8)
    p.linear(View(x.value, 0, 4), View(x.value, 2, 4), weight=weight(p, 4, 4))


def linear_residual_shifted(p: Program) -> None:
    y = p.input("y", 8)
    p.linear(View(y.value, 0, 4), p.input("x", 4), weight=weight(p, 4, 4), residual=View(y.value, 1, 4))


def unknown_weight(p: Program) -> None:
    p.linear(p.value("y", 6), p.input("x", 5), weight=3)


def read_before_written(p: Program) -> None:
    x = p.input("x", 4)
    y = p.value("y", 4)
    p.add(p.value("z", 4), x, x)
    p.add(p.value("out", 4), x, y)


def half_written(p: Program) -> None:
    x, y = p.input("x", 4), p.value("y", 8)
    p.add(View(y.value, 0, 4), x, x)
    p.activation(p.value("out", 8), y, None, kind="silu")


def outside_value(p: Program) -> None:
    x = p.input("x", 4)
    p.add(p.value("y", 4), x, View(x.value, 2, 4))


def unknown_value(p: Program) -> None:
    p.add(p.value("y", 4), p.input("x", 4), View(9, 0, 4))


def empty_view(p: Program) -> None:
    p.add(p.value("y", 4), p.input("x", 4), View(-1, 0, 0))


def mixed_rows(p: Program) -> None:
    x = p.input("x", 4)
    s = p.value("s", 4, "logits")
    p.select(s, x)
    p.add(p.value("y", 4), x, s)


def select_to_tokens(p: Program) -> None:
    p.select(p.value("y", 4), p.input("x", 4))


def attention(
    p: Program, *, k_width: int = 16, layer: int = 0, heads: int = 4, out: int = 24, twice: bool = False, k: bool = True
) -> None:
    p.cache_layer(2, 8, 6)
    q, keys, v = p.input("q", 32), p.input("k", k_width), p.input("v", 12)
    sizes = {"layer": layer, "heads": heads, "kv_heads": 2, "head_dim": 8, "scale": 1.0}
    p.attention(p.value("out", out), q, keys if k else None, v if k else None, **sizes)
    if twice:
        p.attention(p.value("again", out), q, keys, v, **sizes)


def attention_without_v(p: Program) -> None:
    p.cache_layer(2, 8, 8)
    p.attention(p.value("out", 32), p.input("q", 32), p.input("k", 16), None, layer=0, scale=1.0, **HEADS)


def attention_window(p: Program) -> None:
    p.cache_layer(2, 8, 8)
    p.attention(p.value("o", 32), p.input("q", 32), p.input("k", 16), p.input("v", 16), layer=0, scale=1.0, window=-1, **HEADS)


def latent_attention(p: Program, *, v_dim: int = 6, v: bool = False) -> None:
    p.cache_layer(2, 8, v_dim, values_in_keys=True)
    q, k, values = p.input("q", 32), p.input("k", 16), p.input("v", 2 * v_dim)
    p.attention(p.value("out", 4 * v_dim), q, k, values if v else None, layer=0, scale=1.0, **HEADS)


def latent_prepare(p: Program) -> None:
    p.cache_layer(2, 8, 8, values_in_keys=True)
    p.prepare_qkv(p.input("q", 32), p.input("k", 16), p.input("v", 16), layer=0, **HEADS)


def head_linear(p: Program, *, heads: int = 3, out: int = 24, shape: tuple[int, ...] = (3, 5, 4)) -> None:
    p.head_linear(p.value("y", out), p.input("x", 21), weight=weight(p, *shape), heads=heads)


def rope(p: Program, table: int = 0, rotary: int = 8, head_dim: int = 8) -> None:
    p.rope_table(rotary, [1.0] * (rotary // 2))
    p.rope(p.input("x", 16), head_dim=head_dim, table=table)


def bad_table(p: Program, rotary: int = 8, frequencies: int = 4, **dynamic: Any) -> None:
    p.rope_table(rotary, [1.0] * frequencies, **dynamic)


def norm(p: Program, group: int = 4, size: int = 4, eps: float = 1e-5) -> None:
    p.norm(p.value("y", 8), p.input("x", 8), weight=weight(p, size), kind="rms", eps=eps, group=group)


def norm_bias_of_runs(p: Program) -> None:
    p.norm(p.value("y", 8), p.input("x", 8), weight=weight(p, 4), bias=weight(p, 8), kind="layer", eps=1e-5, group=4)


def add_positions(p: Program, rows: int) -> None:
    p.max_positions = 8
    p.add_positions(p.value("y", 4), p.input("x", 4), table=weight(p, rows, 4), offset=2)


def gated(p: Program) -> None:
    p.gated_linear(p.value("y", 6), p.input("x", 5), weight=weight(p, 6, 5), kind="silu")


def prepare(p: Program, k_offset: int = 32) -> None:
    p.cache_layer(2, 8, 8)
    qkv = p.input("qkv", 64)
    views = [View(qkv.value, offset, width) for offset, width in ((0, 32), (k_offset, 16), (48, 16))]
    p.prepare_qkv(*views, q_norm=weight(p, 4) if k_offset == 32 else -1, layer=0, **HEADS)


def embed(p: Program) -> None:
    p.embed(p.value("x", 4), weight(p, 49, 4))


def output_unwritten(p: Program) -> None:
    p.output(p.value("y", 4))


def logits_narrow(p: Program) -> None:
    y = p.value("y", 4, "logits")
    p.select(y, p.input("x", 4))
    p.logits = y.value


def moe(p: Program, *, sizes: tuple[int, int] = (12, 8), out: int = 10, corrections: int = 0, **options: Any) -> None:
    """`sizes`: rows of gate and up, and columns of each of six experts."""
    x, logits = p.input("x", 8), p.input("logits", 6)
    sizes_of_all = {"width": 6, "experts": 6, "top_k": 2, "kind": "silu"}
    if corrections:
        options["correction"] = p.corrections([0.0] * corrections)
    gate_up, down = weight(p, 6, *sizes), weight(p, 6, 10, 6)
    p.moe(p.value("y", out), x, logits, gate_up=gate_up, down=down, **{**sizes_of_all, **options})


BROKEN: list[tuple[Callable[[Program], None], str]] = [
    (narrow_linear, r'op 0 \(linear to "y"\): weight "weight0" has shape \(6, 4\); the op needs \(6, 5\)'),
    (linear_bias, r'op 0 \(linear to "y"\): bias "weight1" has shape \(5\); the op needs \(6\)'),
    (linear_onto_itself, r'op 0 \(linear to "x"\): in "x"\[2:6\] overlaps "x"\[0:4\]'),
    (linear_residual_shifted, r'op 0 \(linear to "y"\): residual "y"\[1:5\] overlaps "y"\[0:4\]'),
    (unknown_weight, r'op 0 \(linear to "y"\): weight is weight 3 of 0'),
    (read_before_written, r'op 1 \(add to "out"\): "y" is read before it is written'),
    (half_written, r'op 1 \(activation to "out"\): "y" is read before it is written'),
    (outside_value, r'op 0 \(add to "y"\): columns \[2, 6\) are not in "x", which has 4'),
    (unknown_value, r'op 0 \(add to "y"\): a view names value 9 of 2'),
    (empty_view, r'op 0 \(add to "y"\): a view names value -1 of 2'),
    (mixed_rows, r'op 1 \(add to "y"\): "s" has a row per logits row, but "y" has a row per token'),
    (select_to_tokens, r'op 0 \(select to "y"\): "y" has a row per token; the op needs a row per logits row'),
    (lambda p: attention(p, k_width=8), r'op 0 \(attention to "out"\): k "k" is 8 columns wide; the op needs 16'),
    (lambda p: attention(p, layer=1), r'op 0 \(attention to "out"\): layer 1 of 1 cache layers'),
    (lambda p: attention(p, layer=-1), r'op 0 \(attention to "out"\): layer -1 of 1 cache layers'),
    (lambda p: attention(p, heads=3), r'op 0 \(attention to "out"\): 3 heads over 2 kv_heads'),
    (lambda p: attention(p, out=32), r'op 0 \(attention to "out"\): out "out" is 32 columns wide; the op needs 24'),
    (lambda p: attention(p, twice=True), r'op 1 \(attention to "again"\): layer 0 has its keys and values from op 0'),
    (lambda p: attention(p, k=False), r'op 0 \(attention to "out"\): layer 0 is read before any op writes'),
    (attention_without_v, r'op 0 \(attention to "out"\): k and v must both be given'),
    (attention_window, r'op 0 \(attention to "o"\): window is -1'),
    (lambda p: rope(p, table=1), r'op 0 \(rope to "x"\): rope table 1 of 1'),
    (lambda p: rope(p, rotary=16), r'op 0 \(rope to "x"\): rotary_dim 16 is above head_dim 8'),
    (lambda p: p.rope(p.input("x", 8), head_dim=8, table=p.rope_table(8, [1.0] * 4), offset=1), "rotary_dim 8 is above head_dim 7"),
    (lambda p: rope(p, head_dim=12), r'op 0 \(rope to "x"\): a head_dim of 12 does not divide 16 columns'),
    (lambda p: bad_table(p, frequencies=3), "rope table 0 has 3 frequencies for rotary_dim 8; it needs 4"),
    (lambda p: bad_table(p, rotary=7, frequencies=3), "rope table 0 has rotary_dim 7; it must be positive and even"),
    (lambda p: bad_table(p, dynamic_factor=2.0, max_positions=64), "rope table 0 is dynamic with factor 2, theta 0"),
    (lambda p: bad_table(p, stepped=True, max_positions=64), "rope table 0 is dynamic with factor 0, theta 0"),
    (
        lambda p: bad_table(p, long_inv_freq=[1.0], max_positions=64),
        "rope table 0 has 1 frequencies for long sequences; it needs 4",
    ),
    (
        lambda p: bad_table(p, long_inv_freq=[1.0] * 4, stepped=True, max_positions=64),
        "rope table 0 changes .* in more than one way",
    ),
    (lambda p: bad_table(p, multiplier=float("inf")), "rope table 0 has a frequency or multiplier that is not finite"),
    (lambda p: norm(p, group=3, size=3), r'op 0 \(norm to "y"\): a group of 3 does not divide 8 columns'),
    (lambda p: norm(p, size=5), r'op 0 \(norm to "y"\): weight "weight0" has shape \(5\); the op needs \(4\)'),
    (norm_bias_of_runs, r'op 0 \(norm to "y"\): bias "weight1" has shape \(8\); the op needs \(4\)'),
    (lambda p: add_positions(p, rows=2), r'op 0 \(add_positions to "y"\): table has shape \(2, 4\); .* more than 2 rows of 4'),
    (lambda p: add_positions(p, rows=9), r'op 0 \(add_positions to "y"\): the program has 8 positions, the table 7'),
    (lambda p: p.log_scale(p.input("x", 4), from_=1), r'op 0 \(log_scale to "x"\): from is 1'),
    (lambda p: p.bound(p.value("y", 4), p.input("x", 4), kind="clamp", limit=0), r'op 0 \(bound to "y"\): limit is 0'),
    (lambda p: norm(p, eps=float("nan")), r'op 0 \(norm to "y"\): eps is nan'),
    (gated, r'op 0 \(gated_linear to "y"\): weight "weight0" has shape \(6, 5\); the op needs \(12, 5\)'),
    (lambda p: moe(p, sizes=(12, 7)), r'op 0 \(moe to "y"\): gate_up "weight0" has shape \(6, 12, 7\); the op needs \(6, 12, 8\)'),
    (lambda p: moe(p, out=9), r'op 0 \(moe to "y"\): down "weight1" has shape \(6, 10, 6\); the op needs \(6, 9, 6\)'),
    (lambda p: moe(p, experts=5), r'op 0 \(moe to "y"\): logits "logits" is 6 columns wide; the op needs 5'),
    (lambda p: moe(p, top_k=7), r'op 0 \(moe to "y"\): top_k 7 of 6 experts; 1 to 32 can be taken'),
    (lambda p: moe(p, groups=3, top_groups=1, top_k=3), r'op 0 \(moe to "y"\): top_k 3 of 2 experts'),
    (lambda p: moe(p, groups=4), r'op 0 \(moe to "y"\): 6 experts in 4 groups'),
    (lambda p: moe(p, groups=2, top_groups=3), r'op 0 \(moe to "y"\): top_groups 3 of 2'),
    (lambda p: moe(p, groups=2, group_best=2), r'op 0 \(moe to "y"\): group_best 2 needs corrections'),
    (lambda p: moe(p, corrections=5), r'op 0 \(moe to "y"\): correction has 5 entries for 6 experts'),
    (lambda p: moe(p, correction=1), r'op 0 \(moe to "y"\): correction names table 1 of 0'),
    (lambda p: moe(p, kind="relu", alpha=2.0), r'op 0 \(moe to "y"\): alpha is 2; other values than 1 are for silu'),
    (lambda p: latent_attention(p, v=True), r'op 0 \(attention to "out"\): v is given, but the layer has its values in its keys'),
    (lambda p: latent_attention(p, v_dim=9), r"cache layer 0 has values of 9 in keys of 8"),
    (latent_prepare, r'op 0 \(prepare_qkv to "q"\): layer 0 has its values in its keys'),
    (lambda p: head_linear(p, heads=2), r'op 0 \(head_linear to "y"\): 2 heads in 21 columns'),
    (lambda p: head_linear(p, out=23), r'op 0 \(head_linear to "y"\): out "y" is 23 columns wide; the op needs 24'),
    (lambda p: head_linear(p, shape=(3, 5, 8)), r"weight has shape \(3, 5, 8\); the op needs 3 matrices of at most 7 columns"),
    (lambda p: head_linear(p, shape=(5, 4)), r"weight has shape \(5, 4\); the op needs 3 matrices"),
    (prepare, r'op 0 \(prepare_qkv to "qkv"\): q_norm "weight0" has shape \(4\); the op needs \(8\)'),
    (lambda p: prepare(p, k_offset=31), r'op 0 \(prepare_qkv to "qkv"\): k "qkv"\[31:47\] overlaps "qkv"\[0:32\]'),
    (embed, r'op 0 \(embed to "x"\): table "weight0" has shape \(49, 4\); the op needs \(50, 4\)'),
    (output_unwritten, 'output "y" is never written'),
    (logits_narrow, 'logits "y" is 4 wide .* needs the vocabulary\'s 50 columns'),
]


@pytest.mark.parametrize(("build", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_validate_refuses(build: Callable[[Program], None], message: str) -> None:
    p = program()
    build(p)
    with pytest.raises(ValueError, match=message):
        p.validate()


def test_validate_takes_in_place_ops() -> None:
    p = program()
    x = p.input("x", 16)
    p.norm(x, x, weight=weight(p, 16), kind="rms", eps=1e-6, group=16)
    p.add(x, x, x)
    p.activation(View(x.value, 0, 8), View(x.value, 0, 8), View(x.value, 8, 8), kind="silu")
    p.linear(x, p.input("y", 3), weight=weight(p, 16, 3), residual=x)
    p.validate()


# --- fuse ---


def mlp(p: Program, *, keep: str = "", between: Callable[[View, View], None] | None = None) -> None:
    """x + down(act(gate) * up), with the named value kept as an output, or an op between the linear and what reads it."""
    x, w = p.input("x", 8), p.value("w", 8)
    both, hidden, down, out = p.value("both", 12), p.value("hidden", 6), p.value("down", 8), p.value("out", 8)
    p.activation(w, x, None, kind="relu")
    p.linear(both, w, weight=weight(p, 12, 8))
    if between:
        between(w, both)
    p.activation(hidden, View(both.value, 0, 6), View(both.value, 6, 6), kind="silu")
    p.linear(down, hidden, weight=weight(p, 8, 6), bias=weight(p, 8))
    p.add(out, down, x)
    for view, name in ((both, "both"), (hidden, "hidden"), (down, "down"), (out, "out")):
        if name in ("out", keep):
            p.output(view)
    p.validate()


def test_fuse_mlp() -> None:
    p = program()
    mlp(p)
    fused = fuse(p, **ALL)
    fused.validate()
    assert names(fused) == ["activation", "gated_linear", "linear"]
    _, gated, linear = fused.ops
    assert (gated["in"], gated["out"], gated["weight"], gated["kind"]) == ((1, 0, 8), (3, 0, 6), 0, "silu")
    assert (linear["out"], linear["residual"], linear["weight"], linear["bias"]) == ((5, 0, 8), (0, 0, 8), 1, 2)
    assert names(p) == names(fuse(p, **NO_FUSION)) == ["activation", "linear", "activation", "linear", "add"]
    assert names(fuse(p, **NO_FUSION | {"gated_linear": True})) == ["activation", "gated_linear", "linear", "add"]
    assert names(fuse(p, **NO_FUSION | {"linear_residual": True})) == ["activation", "linear", "activation", "linear"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [("both", ["activation", "linear", "activation", "linear"]), ("hidden", ["activation", "gated_linear", "linear"]),
     ("down", ["activation", "gated_linear", "linear", "add"])],
)  # fmt: skip
def test_fuse_leaves_outputs(keep: str, left: list[str]) -> None:
    p = program()
    mlp(p, keep=keep)
    assert names(fuse(p, **ALL)) == left


def test_fuse_leaves_what_is_read_or_changed_between() -> None:
    for reads in (True, False):
        p = program()
        mlp(p, between=lambda w, both, p=p, reads=reads: p.add(p.value("t", 4), View(both.value, 4, 4), View(both.value, 8, 4))
            if reads else p.add(w, w, w))  # fmt: skip
        assert names(fuse(p, **ALL)) == ["activation", "linear", "add", "activation", "linear"]


def test_fuse_takes_linears_input_that_is_only_read_between() -> None:
    p = program()
    mlp(p, between=lambda w, both: p.add(p.value("t", 8), w, w))
    assert names(fuse(p, **ALL)) == ["activation", "add", "gated_linear", "linear"]


@pytest.mark.parametrize(("gate", "up"), [((6, 6), (0, 6)), ((0, 5), (5, 5)), ((0, 6), None), ((0, 3), (6, 3))])
def test_fuse_leaves_other_halves(gate: tuple[int, int], up: tuple[int, int] | None) -> None:
    p = program()
    both = p.value("both", 12)
    p.linear(both, p.input("x", 8), weight=weight(p, 12, 8))
    out = p.value("out", gate[1])
    p.activation(out, View(both.value, *gate), View(both.value, *up) if up else None, kind="silu")
    p.output(out)
    p.validate()
    assert names(fuse(p, **ALL)) == ["linear", "activation"]


@pytest.mark.parametrize("between", [False, True])
def test_fuse_moe(between: bool) -> None:
    """Takes the sum that follows as its residual, unless what it reads is changed before that."""
    p = program()
    x, logits, y, out = p.input("x", 8), p.input("logits", 4), p.value("y", 8), p.value("out", 8)
    weights = {"gate_up": weight(p, 4, 12, 8), "down": weight(p, 4, 8, 6)}
    p.moe(y, x, logits, **weights, width=6, experts=4, top_k=2, kind="silu")
    if between:
        p.add(logits, logits, logits)
    p.add(out, x, y)
    p.output(out)
    p.validate()
    fused = fuse(p, **ALL)
    fused.validate()
    assert names(fused) == (["moe", "add", "add"] if between else ["moe"])
    if not between:
        (op,) = fused.ops
        assert (op["out"], op["residual"], op["in"]) == ((out.value, 0, 8), (x.value, 0, 8), (x.value, 0, 8))


def test_fuse_reuses_values_layer_by_layer() -> None:
    """The same values in every layer: a later overwrite is no reader."""
    p = program()
    x, y, w = p.input("x", 8), p.value("y", 8), weight(p, 8, 8)
    for _ in range(3):
        p.linear(y, x, weight=w)
        p.add(x, x, y)
    p.output(x)
    p.validate()
    fused = fuse(p, **ALL)
    # out and in would be the same columns.
    assert names(fused) == ["linear", "add"] * 3

    p = program()
    x, h, y, w = p.input("x", 8), p.value("h", 8), p.value("y", 8), weight(p, 8, 8)
    for _ in range(3):
        p.activation(h, x, None, kind="silu")
        p.linear(y, h, weight=w)
        p.add(x, y, x)
    p.output(x)
    fused = fuse(p, **ALL)
    fused.validate()
    assert names(fused) == ["activation", "linear"] * 3
    assert all(op["residual"] == op["out"] == (0, 0, 8) for op in fused.ops[1::2])


def qkv_program(
    *,
    norms: str = "qk",
    ropes: str = "qk",
    q_eps: float = 1e-6,
    k_table: int = 0,
    bias: bool = False,
    keep: str = "",
    apart: bool = False,
    shared_v: bool = False,
    peek: bool = False,
    back: bool = False,
    own: bool = False,
    offset: int = 0,
) -> Program:
    """`apart`: norms write to values of their own. `shared_v`: v is what k is after its rope. `peek`: an op reads k before that.
    `back`: attention writes to where q came from. `own`: a norm weight for each head. `offset`: of the rotated columns."""
    p = program()
    layer = p.cache_layer(2, 8, 8)
    for theta in (1.0, 2.0):
        p.rope_table(8 - offset, [theta] * ((8 - offset) // 2))
    qkv = p.value("qkv", 64)
    p.linear(qkv, p.input("x", 5), weight=weight(p, 64, 5))
    views = {"q": View(qkv.value, 0, 32), "k": View(qkv.value, 32, 16)}
    v = View(qkv.value, 48, 16)
    for name in norms:
        out = p.value(f"{name}_normed", views[name].width) if apart else views[name]
        eps = q_eps if name == "q" else 1e-6
        size = views[name].width if own else 8
        p.norm(out, views[name], weight=weight(p, size), bias=weight(p, 8) if bias else -1, kind="rms", eps=eps, group=8)
        views[name] = out
    if peek:
        p.activation(p.value("peek", 16), views["k"], None, kind="relu")
    for name in ropes:
        p.rope(views[name], head_dim=8, table=k_table if name == "k" else 0, offset=offset)
    out = View(qkv.value, 0, 32) if back else p.value("out", 32)
    p.attention(out, views["q"], views["k"], views["k"] if shared_v else v, layer=layer, scale=1.0, **HEADS)
    p.output(p.value("copy", 32) if back else out)
    if back:
        p.activation(View(len(p.values) - 1, 0, 32), out, None, kind="relu")
    if keep:
        p.output(views.get(keep, qkv))
    p.validate()
    return p


JOINED = ["linear", "prepare_qkv", "attention"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("norms", ["", "q", "k", "qk", "kq"])
@pytest.mark.parametrize("ropes", ["", "qk", "kq"])
def test_fuse_prepare_qkv(norms: str, ropes: str, apart: bool) -> None:
    fused = fuse(qkv_program(norms=norms, ropes=ropes, apart=apart), **ALL)
    fused.validate()
    assert names(fused) == JOINED
    _, prepare, attention_op = fused.ops
    assert (prepare["q"], prepare["k"], prepare["v"]) == ((0, 0, 32), (0, 32, 16), (0, 48, 16))
    assert (prepare["q_norm"] >= 0, prepare["k_norm"] >= 0) == ("q" in norms, "k" in norms)
    assert prepare["rope_table"] == (0 if ropes else -1)
    assert prepare["eps"] == pytest.approx(1e-6 if norms else 0)
    assert (attention_op["q"], attention_op["k"], attention_op["v"]) == (prepare["q"], None, None)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"q_eps": 1e-5}, ["linear", "norm", "norm", *JOINED[1:]]),
        ({"bias": True}, ["linear", "norm", "norm", *JOINED[1:]]),
        ({"own": True}, ["linear", "norm", "norm", *JOINED[1:]]),
        ({"offset": 4}, ["linear", "norm", "norm", "rope", "rope", *JOINED[1:]]),
        ({"k_table": 1}, ["linear", "norm", "norm", "rope", "rope", *JOINED[1:]]),
        ({"ropes": "q"}, ["linear", "norm", "rope", *JOINED[1:]]),
        ({"ropes": "q", "norms": "k"}, ["linear", "rope", *JOINED[1:]]),
        ({"shared_v": True}, ["linear", "norm", "norm", "rope", "rope", *JOINED[1:]]),
        ({"peek": True}, ["linear", "norm", "norm", "activation", *JOINED[1:]]),
        ({"back": True, "apart": True}, ["linear", "norm", "norm", *JOINED[1:], "activation"]),
        ({"keep": "qkv"}, ["linear", "norm", "norm", "rope", "rope", *JOINED[1:]]),
        ({"keep": "q", "apart": True}, ["linear", "norm", "norm", *JOINED[1:]]),
        ({"keep": "k", "apart": True}, ["linear", "norm", "norm", "rope", "rope", *JOINED[1:]]),
        ({"keep": "qkv", "apart": True, "norms": "k"}, JOINED),
        ({"keep": "qkv", "apart": True, "norms": "q"}, ["linear", "norm", "rope", "rope", *JOINED[1:]]),
        ({"keep": "qkv", "apart": True, "norms": "q", "ropes": ""}, ["linear", "norm", *JOINED[1:]]),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_fuse_leaves_parts_of_qkv(changes: dict, left: list[str]) -> None:
    p = qkv_program(**changes)
    fused = fuse(p, **ALL)
    fused.validate()
    assert names(fused) == left
    assert [name for name in names(fuse(p, **NO_FUSION)) if name == "prepare_qkv"] == []


# --- cost ---


def test_cost_by_hand() -> None:
    p = program()
    layer = p.cache_layer(2, 8, 4)
    p.rope_table(6, [1.0] * 3)
    x, qkv, attended = p.value("x", 10), p.value("qkv", 56), p.value("attended", 16)
    p.embed(x, weight(p, 50, 10))
    p.linear(qkv, x, weight=weight(p, 56, 10), bias=weight(p, 56))
    q, k, v = View(qkv.value, 0, 32), View(qkv.value, 32, 16), View(qkv.value, 48, 8)
    p.rope(q, head_dim=8, table=0)
    p.attention(attended, q, k, v, layer=layer, scale=1.0, window=5, **HEADS)
    y = p.value("y", 10)
    p.linear(y, attended, weight=weight(p, 10, 16), residual=x)
    s, logits = p.value("s", 10, "logits"), p.value("logits", 50, "logits")
    p.select(s, y)
    p.linear(logits, s, weight=0)
    p.logits = logits.value
    p.validate()

    # 3 sequences of 4 new tokens after 2; the window of 5 cuts the last: they see 3, 4, 5 and 5 keys, all 6 entries are read.
    work = {"sequences": 3, "tokens_per_sequence": 4, "context": 2, "logit_rows": 2, "kv_dtype": "fp16"}
    costs = cost(p, **work, weight_bytes=[500.0, 560.0, 224.0, 80.0])
    entry = 2 * (8 + 4) * 2
    assert costs == [
        (0, 500 * 12 / 50, 0),
        (12 * 56 * 21, 560 + 224, 0),
        (12 * 4 * 6 * 3, 0, 0),
        (3 * 17 * 4 * (2 * 8 + 2 * 4 + 5), 0, 3 * (6 + 4) * entry),
        (12 * 10 * 33, 80, 0),
        (0, 0, 0),
        (2 * 50 * 20, 500, 0),
    ]
    # A decode step far beyond the window reads only the window.
    work = {"sequences": 1, "tokens_per_sequence": 1, "context": 99, "logit_rows": 0, "kv_dtype": "int8"}
    decode = cost(p, **work, weight_bytes=[500.0, 560.0, 224.0, 80.0])
    assert decode[3] == (5 * 4 * 29, 0, (5 + 1) * (entry / 2 + 2 * 4))  # in 8 bits, with two scales a head
    assert decode[6] == (0, 0, 0)


def test_latent_pages_hold_keys_alone() -> None:
    p = program()
    latent_attention(p)
    p.validate()
    assert p.page_bytes(16, "bf16") == 16 * 2 * 8 * 2
    assert names(fuse(p, **ALL)) == ["attention"]
    work = {"sequences": 1, "tokens_per_sequence": 1, "context": 9, "logit_rows": 0, "kv_dtype": "bf16"}
    assert cost(p, **work, weight_bytes=[]) == [(10 * 4 * (2 * 8 + 2 * 6 + 5), 0, (10 + 1) * 2 * 8 * 2)]


def test_cost_of_head_linear() -> None:
    p = program()
    head_linear(p)
    p.validate()
    work = {"sequences": 2, "tokens_per_sequence": 3, "context": 0, "logit_rows": 0, "kv_dtype": "bf16"}
    assert cost(p, **work, weight_bytes=[60.0]) == [(6 * 3 * 2 * 5 * 4, 60.0, 0)]


def test_cost_of_experts() -> None:
    """Weights count as far as tokens that choose evenly are expected to touch them."""
    p = program()
    moe(p)
    work = {"tokens_per_sequence": 1, "context": 0, "logit_rows": 0, "kv_dtype": "fp16"}
    for tokens, share in ((0, 0), (1, 2 / 6), (2, 1 - (4 / 6) ** 2), (1000, 1)):
        ((flops, weight_bytes, kv_bytes),) = cost(p, sequences=tokens, **work, weight_bytes=[600.0, 60.0])
        assert weight_bytes == pytest.approx(660 * share)
        # Of two experts: gate, up, their product; down, times the weight, added up. Of six: what makes scores.
        assert (flops, kv_bytes) == (tokens * (2 * (6 * (2 * 16 + 2) + 10 * (12 + 2)) + 6 * 3), 0)


def test_cost_of_fused_is_cost_of_plain() -> None:
    p = qkv_program()
    work = {"sequences": 2, "tokens_per_sequence": 3, "context": 7, "logit_rows": 1, "kv_dtype": "fp16"}
    sizes = [float(100 + i) for i in range(len(p.weights))]
    plain, fused = (cost(q, **work, weight_bytes=sizes) for q in (p, fuse(p, **ALL)))
    for column in range(3):
        assert sum(c[column] for c in plain) == pytest.approx(sum(c[column] for c in fused))


def test_cost_needs_every_weight() -> None:
    p = qkv_program()
    with pytest.raises(ValueError, match="2 sizes for 3 weights"):
        cost(p, sequences=1, tokens_per_sequence=1, context=0, logit_rows=1, kv_dtype="fp16", weight_bytes=[1.0, 2.0])
