"""What hypothesis draws as rows of logits."""

import numpy as np
from hypothesis import strategies as st

INF = float("inf")


def any_logits(vocab):
    """Rows of every kind: with ties, with one finite value, with none, with NaN and infinities."""
    one = st.one_of(st.floats(-1e4, 1e4, width=32), st.sampled_from([0.0, 1.0, -INF]))
    rows = st.lists(one, min_size=vocab, max_size=vocab)
    single = st.integers(0, vocab - 1).map(lambda at: [1.0 if i == at else -INF for i in range(vocab)])
    bad = st.tuples(rows, st.integers(0, vocab - 1), st.sampled_from([np.nan, INF]))
    broken = bad.map(lambda each: [*each[0][: each[1]], each[2], *each[0][each[1] + 1 :]])
    return st.one_of(rows, rows, rows, single, broken).map(lambda values: np.array(values, np.float32))
