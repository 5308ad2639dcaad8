"""Pages and prefix cache as pure units, against a model that remembers every prefix in a dictionary."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from maga_transformer import _core
from simulation import testing


def computed_chain(cache, tokens, salt=""):
    """A sequence that computed `tokens` and entered its full pages."""
    pages = [cache.allocate() for _ in range(-(-len(tokens) // 4))]
    return cache.insert(salt, tokens, pages, testing.Position())


def test_pool_counts_holders():
    pool = testing.PagePool(3)
    page = pool.take()
    pool.hold(page)
    assert (pool.free, pool.references(page)) == (2, 2)
    assert pool.drop(page) == 1
    with pytest.raises(_core.MagaError, match="hold it"):
        pool.give_back(page)
    assert pool.drop(page) == 0
    pool.give_back(page)
    assert pool.free == 3
    with pytest.raises(_core.MagaError, match="nobody holds"):
        pool.drop(page)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    assert pool.take() == -1


@pytest.mark.parametrize("length", range(13))
def test_match_finds_full_pages_only(length):
    cache = testing.PrefixCache(8, 4)
    tokens = list(range(12))
    _, pages = computed_chain(cache, tokens)
    position, found = cache.match("", tokens[:length])
    assert found == pages[: length // 4]
    assert position.pages == length // 4
    assert cache.peek("", tokens[:length]) == (length // 4, 0)


def test_same_tokens_after_other_prefix_or_salt_do_not_match():
    cache = testing.PrefixCache(8, 4)
    computed_chain(cache, [1, 1, 1, 1, 2, 2, 2, 2], salt="a")
    assert cache.peek("b", [1, 1, 1, 1])[0] == 0
    assert cache.peek("", [1, 1, 1, 1])[0] == 0
    assert cache.peek("a", [2, 2, 2, 2])[0] == 0
    assert cache.peek("a", [1, 1, 1, 1, 2, 2, 2, 2])[0] == 2


def test_least_recently_used_is_evicted_first_and_from_the_back():
    cache = testing.PrefixCache(4, 4)
    first, second = [1] * 8, [2] * 8
    for tokens in (first, second):
        cache.release(computed_chain(cache, tokens)[1])
    _, held = cache.match("", first)
    cache.release(held)  # now `second` is older
    cache.allocate()
    assert (cache.peek("", first)[0], cache.peek("", second)[0]) == (2, 1)
    cache.allocate()
    assert (cache.peek("", first)[0], cache.peek("", second)[0]) == (2, 0)


def test_held_pages_are_pinned():
    cache = testing.PrefixCache(3, 4)
    cache.release(computed_chain(cache, [1] * 4)[1])
    _, pinned = cache.match("", [1] * 4)
    assert [cache.allocate() != -1 for _ in range(3)] == [True, True, False]
    cache.release(pinned)
    assert cache.allocate() == pinned[0]
    assert cache.peek("", [1] * 4)[0] == 0


def test_equal_pages_are_exchanged_for_the_cached_one():
    cache = testing.PrefixCache(4, 4)
    _, first = computed_chain(cache, [1] * 4)
    _, second = computed_chain(cache, [1] * 4)
    assert first == second
    assert cache.references(first[0]) == 2
    assert cache.free == 3


def test_forgotten_pages_and_what_follows_them_are_not_found():
    cache = testing.PrefixCache(8, 4)
    _, pages = computed_chain(cache, [1] * 12)
    cache.forget(pages[1:2])
    assert cache.peek("", [1] * 12)[0] == 1
    _, again = computed_chain(cache, [1] * 8)
    assert cache.peek("", [1] * 12)[0] == 2, "the old third page hangs on the forgotten one"
    cache.release(again)
    cache.release(pages)
    assert cache.free + cache.cached == cache.total


def test_disabled_cache_keeps_nothing():
    cache = testing.PrefixCache(4, 4, enabled=False)
    _, pages = computed_chain(cache, [1] * 8)
    assert cache.peek("", [1] * 8)[0] == 0
    cache.release(pages)
    assert (cache.free, cache.cached) == (4, 0)


class CacheMachine(RuleBasedStateMachine):
    """Sequences that start from a match, grow, fork and end. `contents` says what each page was computed from."""

    PAGES, PAGE_TOKENS = 7, 2

    def __init__(self):
        super().__init__()
        self.cache = testing.PrefixCache(self.PAGES, self.PAGE_TOKENS)
        self.sequences = []  # [salt, tokens, pages, position]
        self.contents = {}

    @rule(salt=st.sampled_from(["", "x"]), tokens=st.lists(st.integers(0, 1), max_size=8))
    def start(self, salt, tokens):
        expected = self.cache.peek(salt, tokens)
        before = self.cache.available
        position, pages = self.cache.match(salt, tokens)
        assert (len(pages), before - self.cache.available) == expected
        for i, page in enumerate(pages):
            assert self.contents[page] == (salt, tuple(tokens[: (i + 1) * self.PAGE_TOKENS]))
        matched = len(pages) * self.PAGE_TOKENS
        self.sequences.append([salt, tokens[:matched], pages, position])
        self.grow(len(self.sequences) - 1, tokens[matched:])

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, which, tokens):
        sequence = self.sequences[which % len(self.sequences)]
        for token in tokens:
            salt, known, pages, position = sequence
            if len(known) % self.PAGE_TOKENS == 0:
                page = self.cache.allocate()
                assert (page == -1) == (len({p for s in self.sequences for p in s[2]}) == self.PAGES)
                if page == -1:
                    return
                pages.append(page)
            elif self.cache.references(pages[-1]) > 1:
                page = self.cache.allocate()
                if page == -1:
                    return
                self.cache.release(pages[-1:])
                pages[-1] = page
            known.append(token)
            self.contents[pages[-1]] = (salt, tuple(known))
            sequence[3], sequence[2] = self.cache.insert(salt, known, pages, position)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100))
    def fork(self, which):
        salt, tokens, pages, position = self.sequences[which % len(self.sequences)]
        for page in pages:
            self.cache.hold(page)
        self.sequences.append([salt, list(tokens), list(pages), position])

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100), forget=st.booleans())
    def end(self, which, forget):
        _, _, pages, _ = self.sequences.pop(which % len(self.sequences))
        if forget:
            self.cache.forget(pages)
        self.cache.release(pages)

    @invariant()
    def every_page_is_accounted_for(self):
        held = [page for sequence in self.sequences for page in sequence[2]]
        for page in range(self.PAGES):
            assert self.cache.references(page) == held.count(page)
        assert len(set(held)) + self.cache.cached + self.cache.free == self.PAGES


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
