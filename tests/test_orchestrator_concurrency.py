"""The limit of rollouts in flight: the gate, the rule, what it makes of engines with a KV ceiling."""

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engines import Engine, adaptive, fixed, simulate

from prl.config.schema import ConcurrencyConfig, InferenceConfig
from prl.orchestrator.engines.concurrency import CREEP, Controller, Demand, EngineLoad, Limiter, start_limit

# --- the gate ---------------------------------------------------------------------------------------------------------


class Crowd:
    """Jobs that enter the limiter and stay until they are told to go."""

    def __init__(self, limiter):
        self.limiter, self.jobs, self.inside, self.order = limiter, {}, set(), []

    def come(self, name):
        self.jobs[name] = (asyncio.create_task(self.stay(name, leave := asyncio.Event())), leave)

    async def stay(self, name, leave):
        async with self.limiter:
            self.inside.add(name)
            self.order.append(name)
            try:
                await leave.wait()
            finally:
                self.inside.discard(name)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
def test_the_limiter_is_fair_and_never_lets_in_too_many(seed):
    async def scenario():
        rng = random.Random(seed)
        crowd = Crowd(Limiter(3))
        cancelled, admitted = set(), []
        for _ in range(150):
            known = len(crowd.order)
            for _ in range(rng.randrange(1, 4)):  # several at the same moment
                kind, name = rng.choice(["come", "come", "leave", "cancel", "resize"]), None
                if kind == "come":
                    crowd.come(len(crowd.jobs))
                elif kind == "resize":
                    crowd.limiter.resize(rng.randrange(1, 8))
                elif kind == "leave" and crowd.inside:
                    crowd.jobs[rng.choice(sorted(crowd.inside))][1].set()
                elif kind == "cancel" and crowd.jobs:
                    name = rng.choice(sorted(crowd.jobs))
                    crowd.jobs[name][0].cancel()
                    cancelled.add(name)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            await settle()
            inside, limiter = crowd.inside, crowd.limiter
            assert limiter.in_flight == len(inside)
            alive = [name for name, (job, _) in crowd.jobs.items() if not job.done()]
            assert limiter.wanting == len(alive) - len(inside)
            assert limiter.wanting == 0 or len(inside) >= limiter.limit  # no room is left empty
            assert len(inside) <= 8
            admitted.append(sorted(crowd.order[known:]))  # at the same moment: in any order
        known = len(crowd.order)
        crowd.limiter.resize(1 << 30)
        for job, leave in crowd.jobs.values():
            leave.set()
            await asyncio.gather(job, return_exceptions=True)
        order = [*itertools.chain(*admitted), *sorted(crowd.order[known:])]
        assert order == sorted(order)
        assert set(range(len(crowd.jobs))) - cancelled <= set(crowd.order)
        assert (crowd.limiter.in_flight, crowd.limiter.wanting) == (0, 0)
        assert crowd.limiter.demand().ended == len(crowd.order)
        assert crowd.limiter.demand() == Demand(0, 0, 0, 0)

    asyncio.run(scenario())


def test_shrinking_ends_nobody_and_lets_nobody_in():
    async def scenario():
        crowd = Crowd(Limiter(4))
        for name in range(6):
            crowd.come(name)
        await settle()
        crowd.limiter.resize(2)
        await settle()
        assert crowd.inside == {0, 1, 2, 3}
        for name, left in ((0, {1, 2, 3}), (1, {2, 3}), (2, {3, 4})):
            crowd.jobs[name][1].set()
            await settle()
            assert crowd.inside == left
        crowd.limiter.resize(3)
        await settle()
        assert crowd.inside == {3, 4, 5}
        for _, leave in crowd.jobs.values():
            leave.set()
        await asyncio.gather(*(job for job, _ in crowd.jobs.values()))

    asyncio.run(scenario())


def test_who_is_cancelled_when_let_in_makes_room():
    async def scenario():
        crowd = Crowd(Limiter(1))
        for name in range(3):
            crowd.come(name)
        await settle()
        crowd.limiter.resize(2)  # it is the turn of 1, which does not know yet
        crowd.jobs[1][0].cancel()
        await settle()
        assert crowd.inside == {0, 2}
        assert crowd.limiter.in_flight == 2
        for job, leave in crowd.jobs.values():
            leave.set()
            await asyncio.gather(job, return_exceptions=True)
        assert crowd.limiter.in_flight == 0

    asyncio.run(scenario())


# --- the rule ---------------------------------------------------------------------------------------------------------


def config_of(start=64, maximum=256, seats=32, **keys):
    concurrency = ConcurrencyConfig(mode="adaptive", start=start, **keys)
    return InferenceConfig(max_concurrent_rollouts=maximum, max_num_seqs=seats, concurrency=concurrency)


def demand(in_flight, wanting, ended):
    return Demand(in_flight, in_flight, wanting, ended)


def loads_of(*loads):
    return {(i, "0"): load for i, load in enumerate(loads)}


LOADS = st.builds(
    EngineLoad,
    running=st.integers(0, 64),
    waiting=st.integers(0, 300),
    kv_usage=st.floats(0, 1),
    preemptions=st.sampled_from([0, 0, 0, 1, 40]),
)
LOOKS = st.lists(
    st.tuples(st.lists(LOADS, min_size=1, max_size=3), st.floats(0, 1.5), st.integers(0, 9), st.integers(0, 900)),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(looks=LOOKS, least=st.integers(1, 64), start=st.integers(64, 200))
def test_the_limit_keeps_its_bounds_and_moves_only_for_a_reason(looks, least, start):
    config = config_of(start, 200, min=least)
    controller = Controller(config, 1)
    assert controller.limit == start
    for loads, filled, wanting, ended in looks:
        before = controller.limit
        in_flight = int(filled * before)
        after = controller.decide(loads_of(*loads), demand(in_flight, wanting, ended))
        assert after == controller.limit
        assert least <= after <= 200
        fullest, preempted = max(load.kv_usage for load in loads), any(load.preemptions for load in loads)
        if preempted and in_flight <= before:
            assert after < before or after == least
            assert after <= max(least, 0.8 * before)
        if after > before:
            assert fullest < config.concurrency.kv_low
            assert not preempted
            assert wanting
            assert in_flight <= before
            assert after <= 2 * before
        elif after < before:
            crowded = any(load.waiting and load.running >= config.max_num_seqs for load in loads)
            assert preempted or crowded or fullest > config.concurrency.kv_high


FULL = demand(64, 5, 0)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (EngineLoad(64, 0, 0.9, 0), 64),  # between the marks it rests
        (EngineLoad(64, 0, 0.99, 0), int(64 * 0.95 / 0.99)),
        (EngineLoad(32, 32, 0.5, 0), 32),  # as many as it has seats
        (EngineLoad(20, 44, 0.96, 0), 20),  # as its KV cache holds
        (EngineLoad(20, 44, 0.5, 0), 64),  # on their way, for there is room
        (EngineLoad(60, 4, 0.9, 3), int(64 * 0.8)),
        (EngineLoad(20, 44, 1.0, 9), 20),
    ],
    ids=["rest", "kv", "seats", "kv queue", "transit", "preempted", "all"],
)
def test_what_engines_say_trims_the_limit(load, expected):
    config = config_of(seats=32 if load.running == 32 else 100)
    controller = Controller(config, 1)
    controller.decide(loads_of(EngineLoad(load.running, load.waiting, 0.9, 0)), demand(64, 0, 0))
    assert controller.decide(loads_of(load), FULL) == expected


def test_a_burst_is_no_queue():
    controller = Controller(config_of(), 1)
    for waiting in (0, 32, 0, 32):
        assert controller.decide(loads_of(EngineLoad(32, waiting, 0.9, 0)), FULL) == 64


def test_the_engine_that_is_worst_off_decides():
    idle, full, preempting = EngineLoad(10, 0, 0.1, 0), EngineLoad(50, 0, 0.99, 0), EngineLoad(10, 0, 0.1, 1)
    for worst, expected in ((full, 61), (preempting, 51), (idle, 128)):
        for loads in ((worst, idle, idle), (idle, idle, worst)):
            controller = Controller(config_of(), 3)
            assert controller.decide(loads_of(*loads), demand(64, 5, 64)) == expected


def test_it_grows_with_the_rollouts_that_end_and_slower_once_it_met_the_ceiling():
    room, controller = EngineLoad(10, 0, 0.1, 0), Controller(config_of(16), 1)
    limits = [controller.decide(loads_of(room), demand(controller.limit, 1, ended)) for ended in (4, 0, 20, 1000)]
    assert limits == [20, 20, 40, 80]
    assert controller.decide(loads_of(EngineLoad(80, 0, 0.5, 0)), demand(80, 1, 80)) == 128  # 0.8 of the cache
    controller.decide(loads_of(EngineLoad(80, 0, 0.9, 1)), demand(128, 1, 0))
    before = controller.limit
    assert controller.decide(loads_of(room), demand(before, 1, before)) == int(before * (1 + CREEP))


def test_nothing_grows_where_requests_queue_although_there_is_room():
    """Say, for their prompts to be computed."""
    controller = Controller(config_of(16), 1)
    limits = []
    for waiting in (9, 9, 2, 2):
        loads = loads_of(EngineLoad(10, waiting, 0.1, 0))
        limits.append(controller.decide(loads, demand(controller.limit, 1, 4)))
    assert limits == [20, 20, 24, 28]  # at the first look it may be a burst


def test_a_cut_takes_effect_before_the_next_one():
    controller = Controller(config_of(100, 200), 1)
    thrashing = loads_of(EngineLoad(60, 0, 0.9, 7))
    assert [controller.decide(thrashing, demand(n, 9, 5)) for n in (100, 95, 81)] == [80, 80, 80]
    assert controller.decide(thrashing, demand(80, 9, 5)) == 64


def test_far_too_many_are_not_waited_for():
    """A thousand rollouts are in flight, and the engine holds fifty."""
    controller = Controller(config_of(1000, 1000, seats=256), 1)
    loads = loads_of(EngineLoad(50, 950, 1.0, 3))
    assert [controller.decide(loads, demand(1000, 9, 0)) for _ in range(4)] == [800, 50, 50, 50]


def test_a_limit_that_nobody_reaches_does_not_hide_what_runs():
    controller = Controller(config_of(200), 1)
    assert controller.decide(loads_of(EngineLoad(40, 0, 0.9, 2)), demand(40, 0, 0)) == 32


def test_preemptions_of_rollouts_that_ended_since_cut_no_deeper():
    """At the end of a batch few are left when the counter is read."""
    controller = Controller(config_of(64), 1)
    assert controller.decide(loads_of(EngineLoad(2, 0, 0.1, 5)), Demand(2, 60, 0, 58)) == 48


def test_the_first_limit_is_what_the_engines_seat():
    def first(engines=1, **keys):
        concurrency = ConcurrencyConfig(mode="adaptive", **{k: keys.pop(k) for k in ("start", "min") if k in keys})
        return start_limit(InferenceConfig(max_num_seqs=32, concurrency=concurrency, **keys), engines)

    assert (first(), first(3), first(3, max_concurrent_rollouts=50), first(2, dp=2)) == (32, 96, 50, 128)
    assert (first(start=7), first(min=40)) == (7, 40)
    assert start_limit(InferenceConfig(max_num_seqs=32), 1) == 256


# --- simulated engines ------------------------------------------------------------------------------------------------

ENGINES = {  # KV tokens, seats, mean length of a reply, engines, seconds
    "small": (8000, 256, 100, 1, 150),
    "three": (8000, 256, 100, 3, 100),
    "long replies": (40000, 256, 300, 1, 300),
    "short replies": (2000, 256, 20, 1, 80),
    "few seats": (8000, 32, 100, 1, 150),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_it_comes_near_the_best_fixed_limit_from_both_sides(name):
    capacity, seats, mean_length, count, seconds = ENGINES[name]

    def run(config, seed):
        engines = [Engine(capacity, seats) for _ in range(count)]
        return simulate(config, engines, seconds, mean_length, seed)

    tried = {limit: run(fixed(limit * count, seats), 0).tokens_per_s for limit in (8, 32, 64, 96, 128)}
    best = max(tried.values())
    assert tried[8] < 0.6 * best
    for start in (2, 300 * count):
        outcome = run(adaptive(start, seats), 1)
        late = outcome.limits[len(outcome.limits) // 2 :]
        share, swing = outcome.tokens_per_s / best, max(late) / min(late)
        print(f"{name} from {start}: {share:.2f} of the best, {min(late)} to {max(late)}")
        assert share > 0.8
        assert swing < 2.5


@pytest.mark.slow
def test_the_marks_and_the_least_limit_do_what_they_say():
    def run(**keys):
        outcome = simulate(adaptive(2, 256, **keys), [Engine(8000, 256)], 150, 100, 1)
        late = outcome.limits[len(outcome.limits) // 2 :]
        return sum(late) / len(late), outcome.preemptions

    usual, careful = run(), run(kv_low=0.4, kv_high=0.6)
    assert careful[0] < 0.8 * usual[0]
    assert careful[1] < 0.2 * usual[1]
    assert run(min=200)[0] == 200
