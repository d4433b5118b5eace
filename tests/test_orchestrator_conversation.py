"""Messages in, exactly the sampled tokens kept: the exact-prefix property, splits, limits."""

import asyncio
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from fake_engine import pool_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import END, byte_tokenizer

from prl.config import compose
from prl.config.errors import UserError
from prl.config.schema import InferenceConfig, SamplingConfig
from prl.envs.protocol import Score
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.loop_watch import LoopWatch
from prl.orchestrator.rollouts.conversation import Conversation
from prl.orchestrator.rollouts.rollout import Sample
from prl.orchestrator.rollouts.runner import RolloutRunner
from prl.orchestrator.rollouts.tasks import TaskChoice

# drops all but the last assistant turn's content before "]", as reasoning models' templates drop earlier thoughts
REWRITING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ '<|assistant|>' + m['content'].split(']')[-1] + '<|end|>' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def rewriting(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.chat_template = REWRITING
    return tokenizer


LONG_ONES = (
    "model.card.max_position_embeddings=4096",
    "inference.max_model_len=4096",
    "inference.sampling.max_tokens=4000",
)


@pytest.mark.parametrize(("tokens", "beside"), [(2_000, False), (2_001, True)])
def test_long_turns_become_text_beside_the_event_loop(tokens, beside, tokenizer, monkeypatch):
    renderer, threads = ChatRenderer(tokenizer), set()
    decode = renderer.decode
    monkeypatch.setattr(renderer, "decode", lambda *args: (threads.add(threading.get_ident()), decode(*args))[1])
    config = compose(["seq_len=8192", *LONG_ONES]).inference
    conversation = Conversation(renderer, config, 1, Scripted([65] * (tokens - 1) + [END]))
    reply = asyncio.run(conversation.reply([{"role": "user", "content": "?"}]))
    assert reply.content == "A" * (tokens - 1)
    assert (threading.get_ident() not in threads) is beside


class Scripted:
    """Stands for an engine: gives the next ids and remembers what it was asked. Versions count the calls."""

    def __init__(self, *answers, experts=False):
        self.answers, self.experts, self.prompts, self.limits = list(answers), experts, [], []
        self.known = []  # of how many tokens the experts were

    async def __call__(self, prompt_ids, max_tokens, routed):
        version = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        self.limits.append(max_tokens)
        self.known.append(routed)
        ids = list(self.answers.pop(0))[:max_tokens]
        found = None
        if self.experts:
            length = len(prompt_ids) + len(ids) - 1
            found = np.broadcast_to(np.arange(routed, length, dtype=np.uint8)[:, None, None], (length - routed, 2, 1))
        reason = "stop" if ids and ids[-1] == END else "length"
        return Generation(ids, [-0.5 - version] * len(ids), [version] * len(ids), reason, found, routing_start=routed)


def routing_of(sample):
    return np.concatenate(sample.routed_experts(len(sample.input_ids)))


def talk(tokenizer, engine, *turns, max_turns=8, max_model_len=200, max_tokens=64):
    """Feed user turns; returns the conversation and what was replied."""
    config = InferenceConfig(max_model_len=max_model_len, sampling=SamplingConfig(max_tokens=max_tokens))
    conversation = Conversation(ChatRenderer(tokenizer), config, max_turns, engine)

    async def scenario():
        replies = [await conversation.reply([{"role": "user", "content": turn}]) for turn in turns]
        return [reply.content if reply else None for reply in replies]

    return conversation, asyncio.run(scenario())


def test_a_long_text_is_tokenised_beside_the_event_loop(tokenizer):
    class Slow(ChatRenderer):
        def encode(self, text):
            time.sleep(0.2 if len(text) > 8_000 else 0.0)
            return super().encode(text)

    async def scenario():
        engine, watch = Scripted(said("ok")), LoopWatch()
        conversation = Conversation(Slow(tokenizer), InferenceConfig(max_model_len=20_000), 8, engine)
        watching = asyncio.create_task(watch.follow())
        await asyncio.sleep(0.02)
        await conversation.reply([{"role": "user", "content": "a" * 10_000}])
        watching.cancel()
        assert len(engine.prompts[0]) > 10_000
        return watch.take()[0]

    assert asyncio.run(scenario()) < 0.15


def test_a_rollout_that_is_over_needs_no_garbage_collector_to_go(tokenizer):
    """Its tokens and experts would stay until a full collection."""
    begun = []

    class OneReply:
        connected = asyncio.Event()

        async def run(self, split, index, answer):
            begun.append(weakref.ref(answer.__self__))
            await answer([{"role": "user", "content": "hi"}], None, [])
            return "task", Score(1.0, {})

    async def scenario():
        async with pool_of() as (pool, _):
            config = compose(["warm_start=none"])
            runner = RolloutRunner(config, pool, {"a": OneReply()}, ChatRenderer(tokenizer), None)
            rollout = await runner.start_rollout(TaskChoice("a", 0), "train", "r", config.inference.sampling)
            assert rollout.completion_tokens == 2
            await asyncio.sleep(0)
            return begun[0]()

    gc.disable()
    try:
        assert asyncio.run(scenario()) is None
    finally:
        gc.enable()


def said(text):
    return [*text.encode(), END]


def test_two_turns_are_one_sample_of_exactly_what_was_sampled(tokenizer):
    engine = Scripted(said("hi"), said("bye"))
    conversation, replies = talk(tokenizer, engine, "a", "b")
    assert replies == ["hi", "bye"]
    (sample,) = conversation.finished_samples()
    assert tokenizer.decode(list(sample.input_ids)) == (
        "<|user|>a<|end|><|assistant|>hi<|end|><|user|>b<|end|><|assistant|>bye<|end|>"
    )
    trained = [i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m]
    assert trained == said("hi") + said("bye")
    assert [v for v in sample.versions if v >= 0] == [0] * 3 + [1] * 4
    assert sorted(set(sample.logp_infer)) == [-1.5, -0.5, 0.0]
    assert (conversation.turns, conversation.prompt_tokens, conversation.completion_tokens) == (2, 4, 7)
    assert not conversation.truncated


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 261), min_size=1, max_size=12), min_size=1, max_size=5),
    st.lists(st.text(max_size=6), min_size=5, max_size=5),
    st.booleans(),
)
def test_earlier_tokens_never_change(tokenizer, answers, turns, ends):
    """Whatever is sampled, invalid UTF-8 and special tokens included: the trained tokens are the sampled ones, and
    within a sample every prompt begins with the prompt and the answer before it.
    """
    answers = [[*answer, END] if ends else answer for answer in answers]
    engine = Scripted(*answers)
    conversation, _ = talk(tokenizer, engine, *turns[: len(answers)], max_model_len=10_000)
    samples = conversation.finished_samples()
    trained = [i for s in samples for i, m in zip(s.input_ids, s.loss_mask, strict=True) if m]
    assert trained == [token for answer in answers for token in answer]
    starts = 0
    for turn, prompt in enumerate(engine.prompts):
        before = engine.prompts[turn - 1] + answers[turn - 1] if turn else []
        if turn and prompt[: len(before)] != before:
            starts += 1
        assert any(list(s.input_ids[: len(prompt) + len(answers[turn])]) == prompt + answers[turn] for s in samples)
    assert len(samples) == starts + 1
    for sample in samples:
        assert len({len(x) for x in (sample.input_ids, sample.loss_mask, sample.logp_infer, sample.versions)}) == 1


def test_invalid_utf8_stays_one_sample(tokenizer):
    engine = Scripted([0xC3, 0x28, 0xFF, END], [*"ü".encode()[:1]], said("ok"))
    conversation, replies = talk(tokenizer, engine, "ä€😀", "b", "c", max_tokens=4)
    assert replies == ["\ufffd(\ufffd", "\ufffd", "ok"]
    (sample,) = conversation.finished_samples()
    assert [i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m] == [
        0xC3, 0x28, 0xFF, END, 0xC3, *said("ok"),
    ]  # fmt: skip
    assert engine.prompts[0] == [258, *"ä€😀".encode(), END, 259]


def test_an_answer_without_end_gets_one_that_is_not_trained(tokenizer):
    engine = Scripted(b"abcdef", said("x"))
    conversation, _ = talk(tokenizer, engine, "a", "b", max_tokens=4)
    (sample,) = conversation.finished_samples()
    assert tokenizer.decode(list(sample.input_ids)) == (
        "<|user|>a<|end|><|assistant|>abcd<|end|><|user|>b<|end|><|assistant|>x<|end|>"
    )
    assert sum(sample.loss_mask) == 4 + 2
    assert conversation.truncated


def test_rewritten_history_starts_a_new_sample(rewriting):
    engine = Scripted(said("[think]one"), said("[more]two"), said("three"))
    conversation, _ = talk(rewriting, engine, "a", "b", "c")
    texts = [rewriting.decode(list(s.input_ids)) for s in conversation.finished_samples()]
    one = "<|user|>a<|end|><|assistant|>"
    assert texts == [
        f"{one}[think]one<|end|>",
        f"{one}one<|end|><|user|>b<|end|><|assistant|>[more]two<|end|>",
        f"{one}one<|end|><|user|>b<|end|><|assistant|>two<|end|><|user|>c<|end|><|assistant|>three<|end|>",
    ]
    trained = [
        rewriting.decode([i for i, m in zip(s.input_ids, s.loss_mask, strict=True) if m])
        for s in conversation.finished_samples()
    ]
    assert trained == ["[think]one<|end|>", "[more]two<|end|>", "three<|end|>"]


def test_a_full_context_ends_the_conversation_and_leaves_the_sample_as_it_was(tokenizer):
    engine = Scripted(said("x" * 30), said("y"), experts=True)
    conversation, replies = talk(tokenizer, engine, "a", "b" * 70, "c", max_model_len=60)
    assert replies == ["x" * 30, None, None]
    assert conversation.truncated
    (sample,) = conversation.finished_samples()
    assert len(sample.input_ids) == 4 + 31 == len(routing_of(sample))
    assert sample.loss_mask[-1]


def test_a_reply_never_outgrows_the_context(tokenizer):
    engine = Scripted(b"z" * 100)
    conversation, (reply,) = talk(tokenizer, engine, "abc", max_model_len=10)
    assert reply == "zzzz"
    assert engine.limits == [4]
    assert conversation.truncated
    assert len(conversation.finished_samples()[0].input_ids) == 10


def test_max_turns_ends_the_conversation(tokenizer):
    conversation, replies = talk(tokenizer, Scripted(said("1"), said("2")), "a", "b", "c", max_turns=2)
    assert replies == ["1", "2", None]
    assert not conversation.truncated
    assert conversation.turns == 2


def test_an_empty_generation_is_an_error(tokenizer):
    with pytest.raises(RuntimeError, match="returned no token"):
        talk(tokenizer, Scripted([]), "a")


def test_routing_covers_every_token_and_later_turns_bring_what_is_new(tokenizer):
    engine = Scripted(said("hi"), said("bye"), said("so"), experts=True)
    conversation, _ = talk(tokenizer, engine, "a", "b", "c")
    (sample,) = conversation.finished_samples()
    length = len(sample.input_ids)
    ends = [
        len(prompt) + len(answer) for prompt, answer in zip(engine.prompts, map(said, ("hi", "bye", "so")), strict=True)
    ]
    assert engine.known == [0, ends[0] - 1, ends[1] - 1]
    assert routing_of(sample).shape == (length, 2, 1)
    assert routing_of(sample)[:, 0, 0].tolist() == [*range(length - 1), length - 2]


def test_experts_that_do_not_follow_upon_those_that_are_known_are_refused():
    sample, rows = Sample(), np.zeros((3, 2, 1), np.uint8)
    sample.append_prompt([1, 2])
    sample.append_generation(Generation([3, 4], [0.0] * 2, [0] * 2, "stop", rows))
    with pytest.raises(ValueError, match="experts from token 2 on, and 3 are known"):
        sample.append_generation(Generation([5], [0.0], [0], "stop", rows, routing_start=2))


def test_messages_that_are_taken_back_start_a_sample_of_their_own(tokenizer):
    engine = Scripted(said("one"), said("two"), said("three"))
    config = InferenceConfig(max_model_len=200, sampling=SamplingConfig(max_tokens=64))
    conversation = Conversation(ChatRenderer(tokenizer), config, 8, engine)

    async def scenario():
        await conversation.reply([{"role": "user", "content": "a"}], 0)
        await conversation.reply([{"role": "user", "content": "b"}], 2)
        return await conversation.reply([{"role": "user", "content": "c"}], 0)  # as an environment that summarises

    reply = asyncio.run(scenario())
    assert (reply.content, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == ("three", "stop", 4, 6)
    assert [m["content"] for m in conversation.messages] == ["c", "three"]
    appended, new = conversation.finished_samples()
    assert list(appended.input_ids) == [*engine.prompts[1], *said("two")]
    assert sum(appended.loss_mask) == len([*said("one"), *said("two")])
    assert list(new.input_ids) == [*engine.prompts[2], *said("three")]
    assert engine.prompts[2] == [*new.input_ids[:4]]


TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
WITH_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }} Call them in <tool_call>.<|end|>{% endif %}"


def test_tools_are_part_of_the_prompt_and_of_its_prefix(tokenizer, tmp_path):
    copy = byte_tokenizer(tmp_path)
    copy.chat_template = WITH_TOOLS + tokenizer.chat_template
    engine = Scripted(said("<tool_call>{}</tool_call>"), said("7"))
    config = InferenceConfig(max_model_len=400, sampling=SamplingConfig(max_tokens=64))
    conversation = Conversation(ChatRenderer(copy), config, 8, engine)

    async def scenario():
        await conversation.reply([{"role": "user", "content": "3 + 4"}], 0, TOOLS)
        await conversation.reply([{"role": "tool", "content": "7"}], 2, TOOLS)

    asyncio.run(scenario())
    assert b'"name": "add"' in bytes(token for token in engine.prompts[0] if token < 256)
    (sample,) = conversation.finished_samples()
    assert list(sample.input_ids) == [*engine.prompts[1], *said("7")]
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]


def test_a_template_without_tools_is_refused_by_name(tokenizer):
    conversation = Conversation(ChatRenderer(tokenizer), InferenceConfig(), 8, Scripted())
    with pytest.raises(UserError, match="does not show tools"):
        asyncio.run(conversation.reply([{"role": "user", "content": "3 + 4"}], 0, TOOLS))
