"""plan() as a pure function: what it promises for any state of the queues and the cache."""

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import testing


def plan(running=(), waiting=(), references=None, available=None, total=16, budget=8, sequences=4, page_tokens=4, rows=64):
    """`running`: (known, computed, pages[, slots[, whole[, scored]]]); `waiting`: the same with unheld for pages."""
    running = [(*r, *(1, 0, 0)[len(r) - 3 :]) for r in running]
    waiting = [(*w, *(1, 0, 0)[len(w) - 3 :]) for w in waiting]
    held = [page for r in running for page in r[2]]
    if references is None:
        references = [held.count(page) for page in range(total)]
    if available is None:
        available = references.count(0)
    scheduler = testing.Scheduler(
        token_budget=budget, max_sequences=sequences, page_tokens=page_tokens, total_pages=total, logit_rows=rows
    )
    first = scheduler.plan(running, waiting, references, available)
    assert scheduler.plan(running, waiting, references, available) == first, "a plan depends on its arguments only"
    return first


def test_decodes_come_first_and_chunks_fill_the_budget():
    got = plan(running=[(20, 4, [0]), (6, 5, [1, 2]), (9, 8, [3, 4])], budget=8)
    assert got["running"] == {1: 1, 2: 1, 0: 6}
    assert got["admitted"] == got["preempted"] == {} or got["preempted"] == []


def test_a_prompt_within_the_budget_is_not_cut():
    assert plan(waiting=[(8, 0, 0), (5, 0, 0)], budget=16)["admitted"] == {0: 8, 1: 5}
    assert plan(waiting=[(8, 0, 0), (5, 0, 0)], budget=10)["admitted"] == {0: 8, 1: 2}


def test_a_prompt_that_must_be_whole_waits_for_a_step_with_room():
    waiting = [(5, 0, 0), (6, 0, 0, 1, 6), (2, 0, 0)]
    assert plan(waiting=waiting, budget=10)["admitted"] == {0: 5}, "nobody overtakes it"
    assert plan(waiting=waiting[1:], budget=10)["admitted"] == {0: 6, 1: 2}
    assert plan(waiting=[(9, 0, 0, 1, 6)], budget=7)["admitted"] == {0: 7}, "what follows the prompt may be cut"
    assert plan(running=[(7, 6, [0, 1], 1, 6), (9, 0, [], 1, 9)], budget=9)["running"] == {0: 1}
    assert plan(running=[(9, 0, [2], 1, 9)], total=3, references=[1, 1, 1], available=0)["running"] == {}


def test_rows_of_logits_limit_what_is_scored_and_nothing_else():
    scored = (12, 0, 0, 1, 0, 11)
    assert plan(waiting=[scored], budget=16, rows=5)["admitted"] == {0: 5}
    assert plan(waiting=[(12, 0, 0, 1, 0, 7)], budget=16, rows=5)["admitted"] == {0: 9}, "the first four need no row"
    assert plan(running=[(12, 4, [0], 1, 0, 7)], budget=16, rows=5)["running"] == {0: 5}
    assert plan(running=[(9, 8, [0, 1, 2]), (12, 5, [3, 4], 1, 0, 6)], budget=16, rows=5)["running"] == {0: 1, 1: 4}
    assert plan(waiting=[scored, (6, 0, 0), (1, 0, 0)], budget=20, rows=4)["admitted"] == {0: 4, 1: 5}, (
        "a row is missing at the end"
    )


def test_what_the_prefix_cache_has_costs_no_budget():
    assert plan(waiting=[(12, 8, 2)], budget=8)["admitted"] == {0: 4}


def test_slots_limit_admission_and_nobody_overtakes():
    assert plan(waiting=[(2, 0, 0, 3), (2, 0, 0, 2), (2, 0, 0, 1)], sequences=4)["admitted"] == {0: 2}
    got = plan(running=[(5, 4, [0, 1])], waiting=[(74, 0, 0), (2, 0, 0)], total=20, budget=100)
    assert got["admitted"] == {}, "the first needs 19 pages; the second must not starve it"


def test_admission_leaves_the_pages_that_running_sequences_need_next():
    running = [(4, 3, [0])]
    assert plan(running=running, waiting=[(3, 0, 0)], total=3)["admitted"] == {0: 3}
    assert plan(running=running, waiting=[(3, 0, 0)], total=2)["admitted"] == {}


def test_the_last_in_order_is_preempted_when_pages_run_out():
    running = [(9, 8, [0, 1]), (9, 8, [2, 3]), (9, 8, [4, 5])]
    got = plan(running=running, total=6)
    assert got["preempted"] == [2]
    assert got["running"] == {0: 1, 1: 1}


def test_preemption_frees_only_pages_that_nobody_else_holds():
    # The two forks at the end share everything: only both together free a page.
    running = [(9, 8, [0, 1]), (8, 7, [2, 3]), (8, 7, [2, 3])]
    got = plan(running=running, total=4)
    assert got["preempted"] == [2, 1]
    assert got["running"] == {0: 1}


def test_a_shared_partial_page_costs_a_copy_for_all_but_the_last_writer():
    running = [(7, 6, [0, 1]), (7, 6, [0, 1])]
    assert plan(running=running, total=3)["running"] == {0: 1, 1: 1}
    got = plan(running=running, total=2)
    assert got["running"] == {0: 1}
    assert got["preempted"] == [1]


def test_a_prefill_takes_what_fits_before_it_preempts():
    got = plan(running=[(40, 4, [0]), (40, 4, [1])], total=3, budget=32)
    assert got["running"] == {0: 4}
    assert got["preempted"] == []


def test_what_can_never_fit_is_rejected():
    got = plan(waiting=[(64, 0, 0)], total=16)
    assert got["reject_first"]
    assert not plan(waiting=[(63, 0, 0)], total=16)["reject_first"]


@st.composite
def states(draw):
    """A state that the engine could be in: pages held by running sequences, some shared by forks."""
    page_tokens = draw(st.integers(1, 4))
    total = draw(st.integers(2, 24))
    references = [0] * total
    unused = list(range(total))
    running = []
    for _ in range(draw(st.integers(0, 5))):
        if running and draw(st.integers(0, 3)) == 0:
            known, computed, pages, _ = running[-1]
            running.append((known, computed, pages, 1))
        else:
            count = draw(st.integers(0, min(len(unused), 4)))
            pages = [unused.pop() for _ in range(count)]
            computed = count * page_tokens - (draw(st.integers(0, page_tokens - 1)) if count else 0)
            room = total * page_tokens - 1 - computed
            if room < 1:
                for page in pages:
                    unused.append(page)
                continue
            running.append((computed + draw(st.integers(1, room)), computed, pages, 1))
        for page in running[-1][2]:
            references[page] += 1
    # Some score tokens before their last one.
    running = [(*r, 0, draw(st.sampled_from([0, r[0] - 1 - r[1]]))) for r in running]
    waiting = []
    for _ in range(draw(st.integers(0, 3))):
        known = draw(st.integers(1, total * page_tokens - 1))
        cached = draw(st.integers(0, min(len(unused), (known - 1) // page_tokens)))
        scored = draw(st.sampled_from([0, known - 1 - cached * page_tokens]))
        waiting.append((known, cached * page_tokens, cached, draw(st.integers(1, 2)), 0, scored))
    sequences = max(len(running), 2) + draw(st.integers(0, 3))
    return {
        "running": running,
        "waiting": waiting,
        "references": references,
        "total": total,
        "page_tokens": page_tokens,
        "sequences": sequences,
        "budget": sequences + draw(st.integers(0, 20)),
        "rows": sequences + draw(st.integers(0, 6)),
    }


@settings(max_examples=1500, deadline=None)
@given(states())
def test_every_plan_is_sound_and_makes_progress(state):
    got = plan(**state)
    running, waiting, size = state["running"], state["waiting"], state["page_tokens"]
    if running or waiting:
        assert got["running"] or got["admitted"], "somebody computes something"
    assert not got["reject_first"]
    assert sum(got["running"].values()) + sum(got["admitted"].values()) <= state["budget"]
    runs = [(running[i], tokens) for i, tokens in got["running"].items()]
    runs += [(waiting[i], tokens) for i, tokens in got["admitted"].items()]
    assert sum(max(0, tokens - (r[0] - 1 - r[5] - r[1])) for r, tokens in runs) <= state["rows"]

    # Carry the plan out, in the order the engine does, and see that the pages suffice.
    references, available = list(state["references"]), state["references"].count(0)
    for victim in got["preempted"]:
        assert victim not in got["running"]
        for page in running[victim][2]:
            references[page] -= 1
            available += references[page] == 0
    for i, tokens in got["running"].items():
        known, computed, pages = running[i][:3]
        assert 1 <= tokens <= known - computed
        at = computed // size
        if at < len(pages) and references[pages[at]] > 1:
            references[pages[at]] -= 1
            available -= 1
        available -= max(0, -(-(computed + tokens) // size) - len(pages))
    for i, tokens in got["admitted"].items():
        known, computed, unheld = waiting[i][:3]
        assert 1 <= tokens <= known - computed
        available -= unheld + -(-(computed + tokens) // size) - computed // size
    assert available >= 0

    # Order: only the last are preempted, nobody after a preempted sequence keeps waiting pages it has not used, no overtaking.
    assert not (got["preempted"] and got["admitted"])
    if got["preempted"]:
        last = min(got["preempted"])
        assert all(i < last or i in got["running"] or i in got["preempted"] for i in range(len(running)))
    assert list(got["admitted"]) == list(range(len(got["admitted"])))
    slots = sum(r[3] for r in running) + sum(waiting[i][3] for i in got["admitted"])
    assert slots <= state["sequences"] or not got["admitted"]
    # Every decode that comes before a sequence which got tokens in its turn got its own.
    decodes = [i for i, r in enumerate(running) if r[0] - r[1] == 1]
    served = [i for i in decodes if i in got["running"]]
    assert served == decodes[: len(served)]
