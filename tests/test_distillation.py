"""On-policy distillation: what a teacher says of the policy's tokens, from its server to each token's advantage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_server import running_server
from runs import UNEVALUATED, environment, finish, rows, run, start, wait_for, wait_for_step
from test_external_engines import ONE_THREAD
from tiny import END, byte_tokenizer, moe_card, moe_checkpoint

from prl.config import compose
from prl.config.errors import AwayError, ConfigError, UserError
from prl.config.schema import InferenceConfig
from prl.inference.engine import TorchEngine
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.models.checkpoints.reading import load_model
from prl.models.layers.packed_attention import packed_attention
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.rollouts.producer import Producer
from prl.orchestrator.rollouts.rollout import Group, Rollout, Sample
from prl.orchestrator.rollouts.teacher import FLOOR, Teacher, read_logprobs, teacher_columns
from prl.runtime.directory.status_file import read_status

CPU = torch.device("cpu")
KEY_VAR = "PRL_TEST_KEY"


# --- the built-in engine ----------------------------------------------------------------------------------------------


def test_the_built_in_engine_says_what_it_thinks_of_a_prompt(tmp_path) -> None:
    """As the model's own forward pass has it, whatever the prefix cache holds, and for all who share the prompt."""
    path = moe_checkpoint(tmp_path, std=0.2)
    model = load_model(path, moe_card(), torch.float32, CPU)
    prompts = [[5, 9, 2, 7, 7, 1], list(range(40)), [3]]
    with torch.no_grad():
        wanted = []
        for ids in prompts:
            attend = packed_attention([len(ids)], CPU)
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), attend)
            logp = model.logits(hidden).float().log_softmax(-1)
            wanted.append([float(logp[i, token]) for i, token in enumerate(ids[1:])])
    config = InferenceConfig(max_num_seqs=8, max_model_len=64)
    engine = TorchEngine(load_model(path, moe_card(), torch.float32, CPU), config, (END,))
    for again in range(2):
        sequences = []
        for index, ids in enumerate(prompts):
            for asks in (None, 0):  # who does not ask shares the prompt, and is told nothing
                params = SamplingParams(n=2, max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=asks)
                sequences += engine.prepare(Request(f"{again}-{index}-{asks}", ids, params, "salt", arrival=index))
        engine.submit(sequences)
        while engine.busy:
            engine.step()
        for sequence in sequences:
            asked = sequence.request.params.prompt_logprobs is not None
            expected = wanted[prompts.index(sequence.request.prompt_ids)] if asked else []
            assert sequence.prompt_logprobs == pytest.approx(expected, abs=1e-5)


def test_only_the_route_for_tokens_tells_it(tmp_path) -> None:
    with running_server([], tmp_path) as client:
        asked = {"max_tokens": 1, "prompt_logprobs": 0}
        reply = client.post("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": asked})
        first, *others = reply.body["prompt_logprobs"]
        assert first is None
        assert [list(entry) for entry in others] == [["6"], ["7"]]
        asked["prompt_logprobs"] = 1
        assert client.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": asked}).status == 400
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "prompt_logprobs": 0}
        assert client.post("/v1/chat/completions", chat).status == 400


# --- what is made of it -----------------------------------------------------------------------------------------------


def sample_of(prompt: list[int], completion: list[int], logp: float = -1.0) -> Sample:
    sample = Sample()
    sample.append_prompt(prompt)
    sample.append_generation(Generation(completion, [logp] * len(completion), [0] * len(completion), "stop", None))
    return sample


def group_of(*samples: Sample, rewards: tuple[float, ...] = (0.0, 0.0)) -> Group:
    rollouts = [
        Rollout("env", "task", reward, [sample], 2, 3, False, 1)
        for sample, reward in zip(samples, rewards, strict=True)
    ]
    return Group(0, "env", len(rollouts), list(rollouts))


@contextlib.contextmanager
def teacher_server(answer: Any, routes: dict[str, tuple[int, Any]] | None = None):
    """vLLM's routes as far as a teacher needs them; `answer(ids)`: status and log-probabilities. Yields its URL."""
    routes = {
        "/v1/models": (200, {"data": [{"id": "big", "owned_by": "vllm", "max_model_len": 4096}]}),
        **(routes or {}),
    }

    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(*routes.get(self.path, (404, {})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                return self.reply(*routes.get(self.path, (404, {})))
            assert body["model"] == "big"
            assert (body["prompt_logprobs"], body["temperature"]) == (0, 1.0)
            ids = body["prompt"]
            status, numbers = answer(ids)
            told = [None, *({str(token): {"logprob": p}} for token, p in zip(ids[1:], numbers, strict=False))]
            self.reply(status, {"choices": [{"text": "", "prompt_logprobs": told}]})

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def score(url: str, *overrides: str, group: Group, gone: list[Exception] | None = None) -> None:
    """As a run has it. Raises TimeoutError where it waits for its own end."""
    config = compose(["algo=distill", f"algo.teacher.urls=[{url}]", "deployment.start_timeout_s=1.5", *overrides])

    async def scenario() -> None:
        teacher = Teacher(config, renderer(), ([] if gone is None else gone).append)
        try:
            await teacher.prepare()
            async with asyncio.timeout(6):
                await teacher.score(group)
        finally:
            await teacher.close()

    asyncio.run(scenario())


def renderer():
    with tempfile.TemporaryDirectory() as folder:
        return ChatRenderer(byte_tokenizer(Path(folder)))


def test_each_token_is_told_how_much_more_probable_it_is_to_the_teacher() -> None:
    long, short = sample_of([1, 2], [3, 4, 5]), sample_of([1], [6])
    with teacher_server(lambda ids: (200, [-0.25 * token for token in ids[1:]])) as url:
        group = group_of(long, short)
        score(url, "algo.teacher.tau=2", group=group)
    assert long.bonus is not None
    assert long.bonus.tolist() == [0, 0, 2 * (-0.75 + 1), 2 * (-1 + 1), 2 * (-1.25 + 1)]
    assert long.advantages(0.5).tolist() == [0, 0, 1.0, 0.5, 0.0]
    assert short.bonus is not None
    assert short.bonus.tolist() == [0, 2 * (-1.5 + 1)]
    # of all tokens: -1 in place of each of -0.75, -1, -1.25, -1.5
    assert teacher_columns([long, short], 2.0) == {"teacher_kl": pytest.approx((-1 * 4 + 0.75 + 1 + 1.25 + 1.5) / 4)}
    assert teacher_columns([sample_of([1], [2])], 1.0) == {}


def test_what_a_teacher_would_never_say_counts_so_much_and_no_more() -> None:
    sample = sample_of([1], [2])
    with teacher_server(lambda ids: (200, [-9999.0])) as url:  # as vLLM says minus infinity
        score(url, group=group_of(sample, rewards=(0.0,)))
    assert sample.bonus is not None
    assert sample.bonus.tolist() == [0, FLOOR + 1]


def test_samples_beyond_a_row_are_cut_as_they_are_for_training() -> None:
    sample = sample_of([1] * 10, [2] * 500)
    asked: list[int] = []

    def answer(ids: list[int]) -> tuple[int, list[float]]:
        asked.append(len(ids))
        return 200, [-1.0] * (len(ids) - 1)

    with teacher_server(answer) as url:
        score(url, "seq_len=256", group=group_of(sample, rewards=(0.0,)))
    assert asked == [256]
    assert sample.bonus is not None
    assert len(sample.bonus) == 256
    assert sample.advantages(0.5).tolist() == [0.0] * 10 + [0.5] * 500
    assert teacher_columns([sample], 1.0) == {"teacher_kl": 0.0}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda ids: (400, []), "400"),
        (lambda ids: (200, [-1.0]), "prompt_logprobs were asked for"),
        (lambda ids: (200, ["x"] * (len(ids) - 1)), "could not convert"),
        (lambda ids: (200, [5.0] * (len(ids) - 1)), "above 0"),
        (lambda ids: (200, [None] * (len(ids) - 1)), "TypeError"),
    ],
)
def test_a_server_that_is_no_teacher_ends_the_run_at_once(answer, said: str) -> None:
    with teacher_server(answer) as url, pytest.raises(UserError, match="does not tell what it thinks") as refused:
        score(url, group=group_of(sample_of([1, 2], [3]), rewards=(0.0,)))
    assert said in refused.value.why
    assert url in refused.value.why
    assert "algo.teacher.urls" in refused.value.where


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_teacher_is_asked_again(status: int) -> None:
    asked: list[int] = []
    sample = sample_of([1, 2], [3])

    def answer(ids: list[int]) -> tuple[int, list[float]]:
        asked.append(len(ids))
        return (200 if len(asked) > 1 else status), [-1.0] * (len(ids) - 1)

    with teacher_server(answer) as url:
        score(url, group=group_of(sample, rewards=(0.0,)))
    assert len(asked) == 2
    assert sample.bonus is not None


def test_of_two_teachers_one_may_fail() -> None:
    """The one that fails is always the least busy, and must not be asked for ever."""
    samples = [sample_of([1, 2], [3]) for _ in range(4)]
    with (
        teacher_server(lambda ids: (500, [])) as dead,
        teacher_server(lambda ids: (200, [-1.0] * (len(ids) - 1))) as url,
    ):
        score(f"{dead},{url}", group=group_of(*samples, rewards=(0.0,) * 4))
    assert all(sample.bonus is not None for sample in samples)


def test_a_teacher_that_stays_away_lets_the_run_end_in_order() -> None:
    gone: list[Exception] = []
    group = group_of(*(sample_of([1, 2], [3]) for _ in range(5)), rewards=(0.0,) * 5)  # told by one of them
    with teacher_server(lambda ids: (503, [])) as url, pytest.raises(TimeoutError):
        score(url, group=group, gone=gone)
    (error,) = gone
    assert isinstance(error, AwayError)
    assert "No teacher has answered for 2 s" in str(error)
    assert url in str(error)


def test_a_teacher_that_takes_a_request_and_never_answers_is_away() -> None:
    over, gone = threading.Event(), list[Exception]()

    def answer(ids: list[int]) -> tuple[int, list[float]]:
        over.wait(20)
        return 200, [-1.0] * (len(ids) - 1)

    with teacher_server(answer) as url:
        with pytest.raises(TimeoutError):
            score(url, group=group_of(sample_of([1, 2], [3]), rewards=(0.0,)), gone=gone)
        over.set()
    (error,) = gone
    assert url in str(error)


def test_another_tokenizer_and_a_short_context_are_told_before_anything_is_sampled() -> None:
    group = group_of(sample_of([1, 2], [3]), rewards=(0.0,))
    good = {"/tokenize": (200, {"tokens": renderer().encode("Hello")})}
    with teacher_server(lambda ids: (200, []), good) as url, pytest.raises(UserError, match="another tokenizer"):
        score(url, group=group)
    models = {"/v1/models": (200, {"data": [{"id": "big", "max_model_len": 256}]})}
    with teacher_server(lambda ids: (200, []), models) as url, pytest.raises(UserError) as short:
        score(url, group=group)
    assert "takes 256 tokens" in short.value.what
    assert "start it with 257" in short.value.fix
    with teacher_server(lambda ids: (200, [-1.0] * (len(ids) - 1)), {"/tokenize": (200, [1, 2])}) as url:
        score(url, group=group_of(sample_of([1, 2], [3]), rewards=(0.0,)))  # who does not say it is believed
    none = {"/v1/models": (200, {"data": []})}
    with teacher_server(lambda ids: (200, []), none) as url, pytest.raises(AwayError, match="lists no model") as empty:
        score(url, group=group)
    assert "for 1 s" in empty.value.why, "before the supervisor would say that the orchestrator does not come up: 1.5 s"
    assert empty.value.where == "algo.teacher.urls"
    two = {"/v1/models": (200, {"data": [{"id": "a"}, {"id": "b"}]})}
    with teacher_server(lambda ids: (200, []), two) as url, pytest.raises(UserError) as several:
        score(url, group=group)
    assert "algo.teacher.served_model=a" in several.value.fix


@pytest.mark.parametrize(
    "answer",
    [[1, 2], {}, {"choices": []},
     {"prompt_logprobs": "x"}, {"prompt_logprobs": [None]}, {"prompt_logprobs": [None, None]},
     {"prompt_logprobs": [None, {"9": {"logprob": -1}}]}, {"prompt_logprobs": [None, {"2": {"logprob": "nan"}}]},
     {"prompt_logprobs": [None, {"2": -1.0}]}],
)  # fmt: skip
def test_answers_that_are_none_are_no_numbers(answer: Any) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        read_logprobs(answer, [1, 2])
    assert read_logprobs({"prompt_logprobs": [None, {"2": {"logprob": -1}}]}, [1, 2]).tolist() == [0, -1]


def test_groups_without_signal_in_rewards_are_learnt_from() -> None:
    """Where there is a teacher; its part comes before the group is taken, and rewards weigh adv_tau."""
    overrides = ["warm_start=none", "algo.group_size=2", "algo.batch_size=2", "algo.adv_tau=0.5",
                 "algo.teacher.urls=[http://h:1]"]  # fmt: skip
    config = compose(overrides)

    class Stub:
        async def score(self, group: Group) -> None:
            for rollout in group.finished:
                for sample in rollout.samples:
                    sample.bonus = np.full(len(sample.input_ids), 0.25, np.float32)

    class Runner:
        version = 0

        def start_group(self, index: int, choice: Any, size: int) -> asyncio.Task[Group]:
            rewards = (1.0, 1.0) if index == 0 else (0.0, 1.0)

            async def work() -> Group:
                return group_of(sample_of([1], [2]), sample_of([1], [3]), rewards=rewards)

            return asyncio.create_task(work())

    class Sampler:
        def __getitem__(self, index: int) -> None:
            return None

    async def scenario() -> list[list[float]]:
        producer = Producer(config, Runner(), Sampler(), False, Stub())  # type: ignore[arg-type]
        steps = [await producer.next_step(), await producer.next_step()]
        await producer.stop()
        assert [step.no_signal_share for step in steps] == [0, 0]
        assert [step.filtered_groups for step in steps] == [0, 0]
        return [
            sample.advantages(rollout.advantage).tolist()
            for step in steps
            for group in step.groups
            for rollout in group.finished
            for sample in rollout.samples
        ]

    # the bonus of a prompt's token is 0 in life; here it shows that nothing else is added to it
    first, second, third, fourth = asyncio.run(scenario())
    assert first == second == [0.25, 0.25]
    assert (third, fourth) == ([0.25, 0.0], [0.25, 0.5])


# --- configuration ----------------------------------------------------------------------------------------------------

URLS = "algo.teacher.urls=[http://h:1]"


@pytest.mark.parametrize(
    ("overrides", "what", "fix"),
    [
        (["algo=distill"], "Nothing is learnt", "algo.teacher.urls=[http://HOST:PORT]"),
        (["algo.teacher.tau=2"], "algo.teacher.tau has no effect", "leave algo.teacher.tau out"),
        ([URLS, "algo.teacher.tau=0"], "asked for nothing", "algo.teacher.tau=1"),
        ([URLS, "inference.sampling.temperature=0.7"], "drawn otherwise", "inference.sampling.temperature=1"),
        ([URLS, "inference.sampling.top_p=0.9"], "drawn otherwise", "inference.sampling.top_p=1"),
        (["algo.teacher.urls=[http://h:1,http://h:1]"], "named twice", "algo.teacher.urls=[http://h:1]"),
        ([URLS, "inference.urls=[http://h:1]", "inference.control_key_var=K"], "and its teacher", "another address"),
        (["algo.teacher.urls=[http://localhost:1]", "deployment=multi_node"], "teacher on loopback", "--host 0.0.0.0"),
        ([URLS, "algo.group_size=1"], "no baseline", "algo.adv_tau=0"),
        (["algo.teacher.urls=[localhost:80]"], "not valid", "algo.teacher.urls=[http://localhost:80]"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(overrides: list[str], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    (problem,) = [error for error in refused.value.violations if what in error.what]
    assert fix in problem.fix.replace("'", "")


def test_one_rollout_of_a_task_is_enough_for_a_teacher_alone() -> None:
    assert compose(["algo=distill", URLS, "algo.group_size=1"]).algo.group_size == 1


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_policy_comes_closer_to_its_teacher_and_a_teacher_that_dies_costs_no_step(tmp_path) -> None:
    """From a policy after a short warm start, and a teacher after a longer one; rewards are not looked at."""
    cache, env = f"cache_dir={tmp_path / 'cache'}", environment() | {KEY_VAR: "a-key"}
    taught = run(
        [
            cache,
            *ONE_THREAD,
            "eval=none",
            "max_steps=1",
            "warm_start.max_steps=120",
            f"output_dir={tmp_path / 'taught'}",
        ],
        tmp_path,
    )
    assert taught.code == 0, taught.output
    serve = [f"model.path={tmp_path / 'taught' / 'export'}", "inference.max_model_len=257", cache, *ONE_THREAD,
             f"inference.api_key_var={KEY_VAR}", "inference.port=0", f"output_dir={tmp_path / 'server'}"]  # fmt: skip
    server = start(serve, tmp_path, "prl.inference", env)
    out = tmp_path / "run"
    try:
        wait_for(server, lambda: read_status(tmp_path / "server").get("state") == "running", "server", 200)
        url = read_status(tmp_path / "server")["urls"][0]
        told = ["algo=distill", f"algo.teacher.urls=[{url}]", f"algo.teacher.api_key_var={KEY_VAR}"]
        small = [arg for arg in UNEVALUATED if not arg.startswith("warm_start")]
        args = [
            *told,
            *small,
            "warm_start.max_steps=30",
            "optim.lr=0.0007",  # with twice as much, one run of twelve leaves its teacher after ten steps
            cache,
            *ONE_THREAD,
            "deployment.start_timeout_s=30",
            "max_steps=1000",
        ]
        training = start([*args, "ckpt.interval=500", f"output_dir={out}"], tmp_path, env=env)
        try:
            wait_for_step(training, out, 16)
            server.send_signal(signal.SIGKILL)
            server.communicate()
            ended = finish(training)
        finally:
            training.kill()
    finally:
        server.kill()
    assert ended.code == 2, ended.output
    assert "No teacher has answered for 30 s" in ended.output
    kl = [row["teacher_kl"] for row in rows(out, "orchestrator") if "teacher_kl" in row]
    assert min(kl) >= -0.05  # reverse KL as sampled: not below 0 but by chance
    assert np.mean(kl[8:16]) < 0.9 * np.mean(kl[:3])
    (saved,) = (out / "checkpoints").iterdir()
    assert f"the checkpoint of {saved.name.replace('_', ' ')} is kept" in ended.output
