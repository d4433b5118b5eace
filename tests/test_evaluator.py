"""The parts of `prl.eval`: intervals, where a policy is found, served models, what compare shows, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from runs import run
from test_compare import compared

from prl.compare.points import read_point
from prl.compare.table import render_text
from prl.config import ConfigError, compose
from prl.config.errors import AwayError, UserError
from prl.config.schema import InferenceConfig, SamplingConfig
from prl.metrics.writer import MetricsWriter
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.served import ServedEngines, gave_nothing
from prl.orchestrator.intervals import bootstrap, interval_over_tasks, wilson
from prl.planning.planner import make_plan
from prl.runtime.agent import freeze
from prl.runtime.directory.checkpoints import TRAINER, commit, staging_dir
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import StatusFile, read_status
from prl.runtime.launch import run as launch
from prl.runtime.policy_source import find_policy
from prl.status import WHY_WIDTH
from prl.status import render as status_of
from prl.watch.store import Store

# --- intervals --------------------------------------------------------------------------------------------------------


def test_wilson_is_that_of_the_textbook():
    low, high = wilson(8, 10)  # of statsmodels' proportion_confint(8, 10, method="wilson")
    assert math.isclose(low, 0.490162, abs_tol=1e-5)
    assert math.isclose(high, 0.943318, abs_tol=1e-5)
    assert wilson(0, 16)[0] == 0.0 < wilson(0, 16)[1] < 0.2
    assert wilson(16, 16)[1] == 1.0


def test_the_bootstrap_is_as_wide_as_the_standard_error_says():
    values = [0.1, 0.3, 0.2, 0.8, 0.5, 0.55, 0.7, 0.35] * 16
    low, high = bootstrap(values)
    mean = sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values)) / len(values)
    assert math.isclose((high - low) / 2, 1.96 * error, rel_tol=0.03)
    assert low < mean < high
    assert bootstrap(values) == (low, high), "always the same draws"


def test_tasks_that_count_0_or_1_have_wilsons_interval_and_one_task_has_none():
    assert interval_over_tasks([1.0, 0.0, 1.0]) == wilson(2, 3)
    assert interval_over_tasks([1.0, 0.5, 0.0]) == bootstrap([1.0, 0.5, 0.0])
    assert interval_over_tasks([1.0]) is None


# --- the policy of a step ---------------------------------------------------------------------------------------------


def make_run(path: Path, saved: tuple[int, ...] = (2, 4), state: str = "done", *more: str) -> Path:
    plan = make_plan(compose([f"output_dir={path}", "warm_start=none", f"cache_dir={path.parent}/cache", *more]))
    claim(plan).release()
    for step in saved:
        for part in (TRAINER, "orchestrator"):
            (staging_dir(path, step) / part).mkdir()
            (staging_dir(path, step) / part / "file").write_text("x")
        commit(path, step, 9, (TRAINER, "orchestrator"))
    status = StatusFile(path, plan.point_id, "rl", "rl", 6)
    status.update(state=state, step=6 if state == "done" else max(saved, default=0))
    status.write()
    return path


def found(run: Path, step: object = "last"):
    return find_policy(compose([f"eval.run={run}", f"eval.step={step}"], "eval"))


def test_a_step_is_found_in_its_checkpoint_and_the_last_of_a_finished_run_in_its_export(tmp_path):
    run = make_run(tmp_path / "run")
    assert found(run) == (4, None), "nothing was exported"
    (run / "export").mkdir()
    (run / "export/config.json").write_text("{}")
    assert found(run) == found(run, 6) == (6, run / "export")
    assert found(run, 2) == (2, None)
    assert found(run, 0) == (0, None), "made from its card"


def test_an_unfinished_run_has_a_last_checkpoint_and_no_export_that_counts(tmp_path):
    run = make_run(tmp_path / "run", state="stopped")
    (run / "export").mkdir()
    (run / "export/config.json").write_text("{}")
    assert found(run) == (4, None)


def test_a_point_that_is_refused_says_why_wherever_it_is_shown(tmp_path):
    point = tmp_path / "sweep/step-77"
    words = [f"eval.run={make_run(tmp_path / 'run')}", "eval.step=77", f"output_dir={point}"]
    config = compose([*words, "logging=none", f"cache_dir={tmp_path}/cache"], "eval")
    freeze(point, make_plan(config))
    with pytest.raises(UserError, match="no checkpoint of step 77"):
        launch(config)
    why = f"config: root: {tmp_path}/run has no checkpoint of step 77."
    assert read_point(point, "step-77").why == Store(tmp_path / "sweep").overview()["runs"][0]["why"] == why
    assert why[: WHY_WIDTH - 1].strip() in status_of(tmp_path / "sweep")[0]
    assert "| do:    eval.step=4" in status_of(point)[0]


@pytest.mark.parametrize("step", ["3", "6"])
def test_a_step_that_was_not_kept_is_refused_with_those_that_were(step, tmp_path):
    with pytest.raises(UserError, match=f"no checkpoint of step {step}") as refused:
        found(make_run(tmp_path / "run"), step)
    assert "there are: 0, 2, 4" in refused.value.render()
    assert "eval.step=4" in refused.value.render()


def test_a_run_without_checkpoints_says_so_and_a_damaged_one_is_named(tmp_path):
    with pytest.raises(UserError, match="has no checkpoint"):
        found(make_run(tmp_path / "none", ()))
    run = make_run(tmp_path / "run")
    (run / "checkpoints/step_4" / TRAINER / "file").write_text("y")
    assert found(run) == (2, None)
    with pytest.raises(UserError, match="step 4 is damaged"):
        found(run, 4)


@pytest.mark.parametrize("step", ["last", 6])
def test_in_the_place_of_a_damaged_step_the_newest_intact_one_is_named(step, tmp_path, capsys):
    run = make_run(tmp_path / "run", (2, 4, 6))
    for damaged, instead in ((6, "eval.step=4;"), (4, "eval.step=2;"), (2, "eval.step=0, which it began with: no ")):
        (run / f"checkpoints/step_{damaged}" / TRAINER / "file").write_text("torn")
        with pytest.raises(UserError, match="step 6 is damaged") as refused:
            found(run, step)
        assert f"do:    {instead}" in refused.value.render()
    told = capsys.readouterr().err
    assert "checkpoint of step 4 is damaged and skipped: " in told, "as when a run resumes"
    with pytest.raises(UserError, match="no checkpoint of step 3") as refused:
        found(run, 3)
    assert "no other checkpoint is intact" in refused.value.render()


def test_the_last_step_of_a_run_of_which_nothing_is_intact_is_refused_in_words(tmp_path):
    run = make_run(tmp_path / "run", (2,), "stopped")
    (run / "checkpoints/step_2" / TRAINER / "file").write_text("torn")
    with pytest.raises(UserError, match="has no checkpoint that is intact") as refused:
        found(run)
    assert "eval.step=0, which it began with" in refused.value.render()


def test_a_step_that_cannot_be_read_now_is_no_traceback(tmp_path, monkeypatch):
    def stale(path, parts):
        raise OSError(116, "Stale file handle", str(path))

    run = make_run(tmp_path / "run")
    monkeypatch.setattr("prl.runtime.directory.checkpoints.find_damage", stale)
    with pytest.raises(UserError, match="step 4 cannot be read now: Stale file handle"):
        found(run, 4)


def test_the_model_is_that_of_the_run(tmp_path):
    run = make_run(tmp_path / "run", (), "done", "model=tiny_qwen3", "model.init_seed=3")
    config = compose([f"eval.run={run}"], "eval")
    assert config.model == compose(["model=tiny_qwen3", "model.init_seed=3"]).model
    assert config.choices["model"] == "tiny_qwen3"
    for said in ("model=tiny_qwen3_moe", "model=tiny_qwen3", "model.init_seed=3"):
        assert compose([f"eval.run={run}", said], "eval").model == config.model


# --- refusals ---------------------------------------------------------------------------------------------------------

URL = "inference.urls=[http://127.0.0.1:1]"
WRONG = {
    "eval.interval=3": "eval.interval has no effect",
    "eval.step=3": "eval.step has no effect",
    "eval.run=nowhere": "There is no directory",
    "algo.batch_size=3": "There is no key 'algo.batch_size'",
    "parallelism=fsdp": "There is no key 'parallelism'",
    "deployment=colocated": "no trainer to take turns with",
    "deployment.num_train_gpus=2": "deployment.num_train_gpus has no effect",
    "debug.keep_rollouts=true": "debug.keep_rollouts has no effect",
    "logging.rollouts.groups=2": "logging.rollouts.groups has no effect",
    "eval.k=2 eval.temperature=0": "Greedy evaluation",
    "eval=none": "",
    "model.path=/a/b eval.step=last": "",
    f"{URL} inference.control_key_var=K": "inference.control_key_var has no effect",
    f"{URL} inference.tp=2": "inference.tp has no effect",
    f"{URL} deployment.num_infer_gpus=2": "deployment.num_infer_gpus has no effect",
    f"{URL} inference.router.type=builtin": "A router does not stand before",
    URL: "",
}


@pytest.mark.parametrize("words", WRONG)
def test_keys_without_meaning_here_are_refused(words):
    told = ""
    try:
        compose(words.split(), "eval")
    except ConfigError as error:
        told = error.render()
    assert (WRONG[words] in told) if WRONG[words] else told == ""


def test_another_model_than_the_runs_is_refused_and_so_are_weights_for_served_ones(tmp_path):
    run = make_run(tmp_path / "run", ())
    for said in ("model=tiny_qwen3", "model.dtype=bfloat16"):
        with pytest.raises(ConfigError, match="The run says which model"):
            compose([f"eval.run={run}", said], "eval")
    with pytest.raises(ConfigError, match="the weights that they have"):
        compose([f"eval.run={run}", URL], "eval")


def test_a_run_that_trains_has_no_key_of_evaluations_by_themselves():
    with pytest.raises(ConfigError, match=r"eval\.run has no effect"):
        compose(["eval.run=x"])


def test_roles_are_engines_environments_and_who_leads_them():
    assert [role.name for role in make_plan(compose([], "eval")).roles] == [
        "inference/0",
        "orchestrator",
        "env/reverse_text",
    ]
    served = make_plan(compose([URL], "eval"))
    assert [role.name for role in served.roles] == ["orchestrator", "env/reverse_text"]
    assert (served.num_devices, served.gpus_per_node) == (0, 0)


# --- served models ----------------------------------------------------------------------------------------------------


class Letters:
    """A renderer whose tokens are letters, and 0 the end."""

    tokenizer = SimpleNamespace(eos_token_id=0)

    def encode(self, text):
        return [ord(letter) for letter in text]


class StockServer:
    """OpenAI's routes and nothing else."""

    def __init__(self, key=None, length=None, text="ab", reason="stop", forbids=False, owner="me"):
        self.key, self.length, self.text, self.reason, self.bodies = key, length, text, reason, []
        self.owner = owner
        self.forbids = forbids  # a route that is there, as in vLLM

    async def models(self, request):
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no"}, status=401)
        return web.json_response({"data": [{"id": "stock", "owned_by": self.owner, "max_model_len": self.length}]})

    async def complete(self, request):
        self.bodies.append(await request.json())
        told = {"token_ids": [5, 6]} if self.bodies[-1].get("return_token_ids") else {}
        return web.json_response({"choices": [{"text": self.text, "finish_reason": self.reason, **told}]})

    async def forbid(self, request):
        is_good = (await request.json()).get("token_ids")
        return web.json_response({"error": "--enable-scale-out"}, status=403 if is_good else 422)

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        if self.forbids:
            app.router.add_post("/inference/v1/generate", self.forbid)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        finally:
            await runner.cleanup()


def ask(server, sampling=None, timeout_s=60.0, **config):
    async def talk():
        async with server.serving() as url:
            pool = ServedEngines(InferenceConfig(urls=(url,), **config), Letters())
            try:
                await pool.wait_healthy(timeout_s)
                return await pool.generate([7, 8], 5, 11, "salt", sampling or SamplingConfig(), "name")
            finally:
                await pool.close()

    return asyncio.run(talk())


def test_of_several_served_models_one_is_named():
    """A server lists its base model before adapters."""

    class Two(StockServer):
        async def models(self, request):
            listed = [{"id": name, "max_model_len": length} for name, length in (("base", 10), ("adapter", 10**6))]
            return web.json_response({"data": listed})

    with pytest.raises(UserError, match="serves 2 models") as refused:
        ask(Two())
    assert "base, adapter" in refused.value.why
    assert refused.value.fix == "inference.served_model=base, or another of these"
    with pytest.raises(UserError, match="serves no model other"):
        ask(Two(), served_model="other")
    server = Two()
    ask(server, served_model="adapter")
    assert server.bodies[0]["model"] == "adapter"
    with pytest.raises(UserError, match="serves no model other"):
        ask(StockServer(), served_model="other")
    with pytest.raises(ConfigError, match="served_model has no effect"):
        compose(["inference.served_model=a"])


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ({"status": 302, "headers": {"Location": "http://other:1/v1/models"}}, "redirects to http://other:1."),
        ({"status": 301, "headers": {"Location": "/v1/models"}}, "redirects to http://127.0.0.1"),
        ({"text": '{"data": []}'}, "lists no model."),
    ],
)
def test_what_lists_no_models_is_told_for_what_it_is(answer, what):
    class Odd(StockServer):
        async def models(self, request):
            return web.Response(**answer)

    with pytest.raises(UserError) as refused:
        ask(Odd(), timeout_s=1.0)
    assert what in refused.value.what


@pytest.mark.parametrize("ids", [[-1, 5], [2**40], ["5"], [True]])
def test_token_ids_that_are_none_cost_a_rollout(ids):
    class Odd(StockServer):
        async def complete(self, request):
            return web.json_response({"choices": [{"text": "a", "token_ids": ids}]})

    with pytest.raises(EngineError, match="token ids that are none"):
        ask(Odd(owner="vllm"))


@pytest.mark.parametrize(
    ("said", "kind", "fix"),
    [
        ("http://u:1: it answered /v1/completions by 500: oops", AwayError, "tries again"),
        ("http://u:1: it answered /v1/completions by 429: slow down", AwayError, "tries again"),
        ("an engine's answer cannot be read: JSONDecodeError", AwayError, "tries again"),
        ("http://u:1: it answered /v1/completions by 500: refused by 404", AwayError, "tries again"),
        ("http://u:1: it answered /v1/completions by 401: key", UserError, "inference.api_key_var=NAME"),
        ("http://u:1: it answered /v1/completions by 404: Not Found", UserError, "the address of a server"),
    ],
)
def test_servers_that_give_nothing_may_pass_or_not(said, kind, fix):
    told = gave_nothing(InferenceConfig(urls=("http://u:1",)), said)
    assert type(told) is kind
    assert fix in told.fix
    assert told.why == said


def test_a_stock_server_is_asked_with_tokens_and_its_text_is_taken():
    server = StockServer()
    reply = ask(server, SamplingConfig(temperature=0.5))
    assert reply.token_ids == [ord("a"), ord("b"), 0], "with the end that is no text"
    assert reply.finish_reason == "stop"
    assert server.bodies == [
        {"model": "stock", "prompt": [7, 8], "max_tokens": 5, "temperature": 0.5, "top_p": 1.0, "seed": 11}
    ]
    assert ask(StockServer(forbids=True)).token_ids == reply.token_ids
    assert ask(StockServer(reason="length")).token_ids == [ord("a"), ord("b")]
    ask(server, SamplingConfig(top_k=3, min_p=0.1))
    assert (server.bodies[-1]["top_k"], server.bodies[-1]["min_p"]) == (3, 0.1)


def test_a_stock_server_that_says_nothing_has_replied():
    assert ask(StockServer(text="")).token_ids == [0]
    assert ask(StockServer(text="", reason="length")).token_ids == [0], "scored as nothing, and not left out"
    vllm = StockServer(text="", reason="length", owner="vllm")
    assert ask(vllm).token_ids == [5, 6], "tokens that are no text"
    assert vllm.bodies[0]["return_token_ids"] is True


def test_a_served_model_gets_its_key_from_a_variable_and_says_how_long_it_is(monkeypatch):
    monkeypatch.setenv("STOCK_KEY", "k")
    assert ask(StockServer(key="k"), api_key_var="STOCK_KEY").token_ids
    with pytest.raises(UserError, match="does not take the key"):
        ask(StockServer(key="k"))
    with pytest.raises(UserError, match="takes 100 tokens"):
        ask(StockServer(length=100))


def test_a_server_that_is_away_is_named():
    async def look():
        pool = ServedEngines(InferenceConfig(urls=("http://127.0.0.1:9",)), Letters())
        try:
            await pool.wait_healthy(60)
        finally:
            await pool.close()

    with pytest.raises(AwayError, match="does not answer"):
        asyncio.run(look())


def mute():
    """Who takes connections, and never says a word."""
    return contextlib.closing(socket.create_server(("127.0.0.1", 0)))


@pytest.mark.parametrize("owes", ["models", "generate"])
def test_a_server_that_never_answers_is_told_in_time(owes):
    class Mute(StockServer):
        async def models(self, request):
            return await super().models(request) if owes == "generate" else await asyncio.sleep(3)

        async def forbid(self, request):
            await asyncio.sleep(3)

    began = time.monotonic()
    with pytest.raises(AwayError, match=r"No engine has answered for 1 s: http://127.0.0.1:\d+\.") as refused:
        ask(Mute(forbids=True), timeout_s=1.0)
    assert time.monotonic() - began < 2.5
    assert "takes connections" in refused.value.why


def test_an_evaluation_of_a_server_that_never_answers_ends_as_a_run_does(tmp_path):
    with mute() as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        words = [f"inference.urls=[{url}]", "deployment.start_timeout_s=10", f"output_dir={tmp_path}/out"]
        done = run([*words, "logging.wandb.mode=disabled", f"cache_dir={tmp_path}/cache"], tmp_path, module="prl.eval")
    assert done.code == 2, done.output
    assert f"No engine has answered for 10 s: {url}." in done.output
    assert "hang" not in done.output
    assert "File " not in done.output, "no stacks"
    failure = read_status(tmp_path / "out")["failure"]
    assert failure["class"] == "node"
    assert "No engine has answered" in failure["message"]


# --- compare ----------------------------------------------------------------------------------------------------------


def make_evaluation(path: Path, k: int, average: float) -> None:
    config = compose([f"eval.k={k}", f"output_dir={path}"], "eval")
    plan = make_plan(config.model_copy(update={"swept": {"eval.k": str(k)}}))
    claim(plan).release()
    names = {f"eval/letters/avg@{k}": average, f"eval/letters/pass@{k}": 0.9}
    ends = {f"{name}{end}": value + by for name, value in names.items() for end, by in (("_low", -0.1), ("_high", 0.1))}
    MetricsWriter(path, "orchestrator").log(step=20, **{"eval/reward": average}, **names, **ends)
    status = StatusFile(path, plan.point_id, "eval", "eval", 1)
    status.update(state="done", step=1)
    status.write()


def test_compare_shows_evaluations_with_their_intervals_the_best_first(tmp_path):
    make_evaluation(tmp_path / "a", 1, 0.25)
    make_evaluation(tmp_path / "b", 4, 0.5)
    comparison = compared(tmp_path)
    assert [(group.key, group.rank) for group in comparison.groups] == [(("4",), 1), (("1",), 2)]
    text = render_text(comparison)
    assert "0.5000 [0.400, 0.600]" in text
    assert "letters avg@1" in text
    assert "letters pass@4" in text
    assert "optimizer steps" not in text
    assert "in steps" not in text
    assert json.loads(json.dumps(comparison.points[0].figures))["letters avg@4_low"] == 0.4
