"""Which replica gets a request: prefixes, loads, turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.config.schema import RouterConfig
from prl.inference.router.policy import Policy
from prl.inference.router.prefixes import BLOCK_CHARS, BLOCK_TOKENS, PrefixTable, prompt_keys

LOADS = st.dictionaries(st.integers(0, 5), st.integers(0, 100), min_size=1)
KEYS = st.lists(st.integers(0, 20), max_size=6)


def tokens(count, start=0):
    return list(range(start, start + count * BLOCK_TOKENS))


def keys(ids, **more):
    return prompt_keys({"token_ids": ids, **more})


# --- keys -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=100), st.lists(st.integers(0, 3), max_size=100))
def test_prompts_share_as_many_keys_as_whole_blocks_of_their_common_prefix(one, other):
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    shared = [a == b for a, b in zip(keys(one), keys(other), strict=False)]
    whole = common // BLOCK_TOKENS
    assert shared == [True] * whole + [False] * (len(shared) - whole)
    assert len(keys(one)) == len(one) // BLOCK_TOKENS


@pytest.mark.parametrize("other", [{"cache_salt": "train-4"}, {"model": "another"}], ids=str)
def test_requests_that_share_no_kv_share_no_keys(other):
    body = {"token_ids": tokens(2), "cache_salt": "train-3", "model": "m"}
    assert not set(prompt_keys(body)) & set(prompt_keys(body | other))


def test_a_conversation_keeps_its_keys_when_it_grows():
    first = [{"role": "user", "content": "x" * 3 * BLOCK_CHARS}]
    longer = [*first, {"role": "assistant", "content": "y" * 99}, {"role": "user", "content": "z" * 99}]
    short_keys, long_keys = prompt_keys({"messages": first}), prompt_keys({"messages": longer})
    assert len(short_keys) == 3
    assert long_keys[:3] == short_keys
    assert len(long_keys) > 5
    assert prompt_keys({"messages": first, "tools": [{"name": "t"}]})[0] != short_keys[0]


@pytest.mark.parametrize(
    "body",
    [{}, {"token_ids": None}, {"token_ids": [[1] * 99, "x"]}, {"token_ids": [{}] * 99}, {"messages": "no list"},
     {"prompt": 5}, {"messages": [5, None]}],
    ids=str,
)  # fmt: skip
def test_bodies_that_an_engine_will_refuse_do_not_stop_the_router(body):
    assert len(prompt_keys(body)) <= 6


# --- the table --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(KEYS, st.integers(0, 3)), max_size=30), KEYS, st.sets(st.integers(0, 3), min_size=1))
def test_the_longest_known_prefix_is_found(history, asked, among):
    table, seen = PrefixTable(), {}
    for recorded, replica in history:
        table.record(recorded, replica)
        for key in recorded:
            seen.setdefault(key, set()).add(replica)
    count, holders = table.match(asked, among)
    whole = {r: next((i for i, k in enumerate(asked) if r not in seen.get(k, ())), len(asked)) for r in among}
    assert count == max(whole.values())
    assert holders == ({r for r, length in whole.items() if length == count} if count else set())


@given(st.lists(st.tuples(KEYS, st.integers(0, 3)), max_size=40), st.integers(1, 8))
def test_the_table_is_bounded_and_forgets(history, capacity):
    table = PrefixTable(capacity)
    for recorded, replica in history:
        table.record(recorded, replica)
        assert len(table.seen) <= capacity
    table.forget(2)
    assert all(holders and not holders >> 2 & 1 for holders in table.seen.values())


def test_a_prefix_outlives_what_extends_it():
    table = PrefixTable(3)
    table.record([1, 2, 3], 0)
    table.record([9], 0)
    assert table.match([1, 2, 3], {0}) == (2, {0})


# --- the choice -------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(st.tuples(KEYS, LOADS), min_size=1, max_size=20), st.sampled_from(["cache_aware", "round_robin"]))
def test_only_offered_replicas_are_chosen(requests, policy):
    chooser = Policy(RouterConfig(policy=policy))
    for asked, loads in requests:
        assert chooser.choose(asked, loads) in loads
    assert 0 <= chooser.matched <= chooser.blocks == sum(len(asked) for asked, _ in requests)


@given(KEYS, LOADS, st.integers(0, 5), st.integers(0, 40))
def test_nobody_is_sent_beyond_the_imbalance_that_is_allowed(asked, loads, holder, threshold):
    config = RouterConfig(balance_abs_threshold=threshold, balance_rel_threshold=1.5)
    chooser = Policy(config)
    chooser.table.record(asked, holder)
    chosen, least = loads[chooser.choose(asked, loads)], min(loads.values())
    assert chosen - least <= threshold or chosen <= 1.5 * least
    if holder not in loads or not asked:
        assert chosen == least


def test_a_prompt_follows_its_prefix_while_loads_are_balanced():
    chooser = Policy(RouterConfig(balance_abs_threshold=4))
    first = chooser.choose(keys(tokens(4)), {0: 0, 1: 0})
    other = 1 - first
    assert chooser.choose(keys(tokens(5)), {first: 4, other: 0}) == first
    assert chooser.choose(keys(tokens(5)), {first: 5, other: 0}) == other
    assert chooser.choose(keys(tokens(5)), {first: 3, other: 2}) == other, "now both have seen it: the idler one"
    chooser.forget(other)
    assert chooser.choose(keys(tokens(5)), {first: 3, other: 2}) == first


@pytest.mark.parametrize(("own", "chosen"), [(4, 1), (3, 0)])
def test_a_system_prompt_that_all_share_decides_only_where_it_is_most_of_the_prompt(own, chosen):
    chooser = Policy(RouterConfig(cache_threshold=0.5))
    chooser.table.record(keys(tokens(4)), 0)
    assert chooser.choose(keys([*tokens(4), *tokens(own, 10_000)]), {0: 3, 1: 0}) == chosen


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
def test_idle_replicas_take_turns_and_one_that_returns_is_not_flooded(policy):
    chooser = Policy(RouterConfig(policy=policy))
    turns = [chooser.choose([], {0: 0, 1: 0}) for _ in range(10)]
    assert turns == [0, 1] * 5
    assert [chooser.choose([], {0: 0, 1: 0, 2: 0}) for _ in range(6)] == [2, 0, 1, 2, 0, 1]


def test_round_robin_looks_at_nothing():
    chooser = Policy(RouterConfig(policy="round_robin"))
    assert [chooser.choose(keys(tokens(4)), {0: 50, 1: 0}) for _ in range(4)] == [0, 1, 0, 1]
