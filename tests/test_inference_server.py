"""The routes of the built-in engine over HTTP, against one server for all tests of this file."""

from __future__ import annotations

import base64
import io
import json
import socket
import time

import numpy as np
import pytest
from inference_server import CONTROL, LIMIT_S, TOKEN, Client, running_server, slow_steps
from jinja2 import TemplateError

from prl.models.text.chat import ChatRenderer
from prl.orchestrator.engines.concurrency import EngineLoad
from prl.orchestrator.engines.watch import parse_loads

OVERRIDES = ["inference.return_routed_experts=true", "inference.api_key_var=PRL_TEST_KEY", "inference.max_num_seqs=32"]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def client(cache_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRL_TEST_KEY", "user-key")
        with running_server(OVERRIDES, cache_dir) as client:
            yield client


@pytest.fixture(autouse=True)
def clean(client: Client):
    """Every test leaves the server running, awake and idle."""
    yield
    assert not client.error, client.error
    assert client.get("/is_paused").body == {"is_paused": False}
    client.until("num_requests_running", 0)
    client.until("num_requests_waiting", 0)


# --- generate ---------------------------------------------------------------------------------------------------------


def test_generate_answers_in_the_shape_of_the_protocol(client: Client) -> None:
    reply = client.generate("abc", n=2, max_tokens=6, model="tiny_qwen3_moe", return_token_ids=True).body
    version = client.get("/weight_info").body["weight_version"]
    assert reply["request_id"] == "abc"
    assert reply["model"] == "tiny_qwen3_moe"
    assert reply["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert reply["prompt_token_ids"] == [258, 104, 105, 256, 259]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    for choice in reply["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        assert all(set(entry) == {"token_id", "logprob", "rank", "top_logprobs"} for entry in content)
        assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 6}]
        routed = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        assert (routed.shape, routed.dtype) == ((5 + 6 - 1, 4, 2), np.uint8)


def test_flat_logprobs_are_the_same_numbers(client: Client) -> None:
    (flat,) = client.generate("f", flat_logprobs=True).body["choices"]
    (choice,) = client.generate("f").body["choices"]
    assert flat["logprobs"] is None
    assert "token_logprobs" not in choice
    assert flat["token_logprobs"] == pytest.approx([c["logprob"] for c in choice["logprobs"]["content"]], abs=1e-5)
    assert flat | {"logprobs": 0, "token_logprobs": 0} == choice | {"logprobs": 0, "token_logprobs": 0}


def test_frames_hold_the_same_numbers_and_routing_from_where_it_is_asked_for(client: Client) -> None:
    asked = {"flat_logprobs": True, "max_tokens": 6}
    (plain,) = client.generate("f", **asked).body["choices"]
    (framed,) = client.generate("f", **asked, extra_args={"frames": True, "routing_start": 4}).body["choices"]
    whole = np.load(io.BytesIO(base64.b64decode(plain["routed_experts"])), allow_pickle=False)
    assert np.array_equal(framed["routed_experts"], whole[4:])
    assert framed["routed_experts"].dtype == whole.dtype
    assert framed["routing_start"] == 4
    assert framed["token_ids"].tolist() == plain["token_ids"]
    assert framed["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=1e-5)
    numbers = dict.fromkeys(("token_ids", "token_logprobs", "routed_experts", "routing_start"))
    assert framed | numbers == plain | numbers
    refused = client.generate("f", extra_args={"frames": True, "routing_start": 6})
    assert (refused.status, "behind the prompt" in str(refused.body)) == (400, True)


def test_without_max_tokens_the_completion_fills_the_context(client: Client) -> None:
    reply = client.post("/inference/v1/generate", {"token_ids": [1] * 250, "sampling_params": {"ignore_eos": True}})
    choice = reply.body["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"], choice["logprobs"]) == (6, "length", None)


def test_the_same_seed_gives_the_same_completion_among_other_requests(client: Client) -> None:
    alone = client.generate(seed=5, max_tokens=20).body["choices"][0]["token_ids"]
    others = [client.start_generate(f"other {i}", seed=i, max_tokens=30) for i in range(8)]
    assert client.generate(seed=5, max_tokens=20).body["choices"][0]["token_ids"] == alone
    assert client.generate(seed=6, max_tokens=20).body["choices"][0]["token_ids"] != alone
    assert {future.result().status for future in others} == {200}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff{", "not JSON"),
        pytest.param(b"[" * 200_000, "not JSON", id="deep"),
        ([], "object"),
        ({}, "token_ids"),
        ({"token_ids": []}, "empty"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [999]}, "token ids"),
        ({"token_ids": [1] * 256}, "inference.max_model_len"),
        ({"token_ids": [1], "stream": True}, "stream"),
        ({"token_ids": [1], "output_mode": "text"}, "output_mode"),
        ({"token_ids": [1], "cache_salt": ""}, "cache_salt"),
        ({"token_ids": [1], "cache_salt": 3}, "cache_salt"),
        ({"token_ids": [1], "priority": "high"}, "priority"),
        ({"token_ids": [1], "sampling_params": []}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"temperature": float("nan")}}, "NaN is no number"),
        pytest.param({"token_ids": [1], "sampling_params": {"temperature": 10**400}}, "temperature", id="huge"),
        ({"token_ids": [10**30]}, "token ids"),
        ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"token_ids": [1], "sampling_params": {"n": 1.5}}, "n must be an integer"),
        ({"token_ids": [1], "sampling_params": {"seed": 1 << 70}}, "seed"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": [1 << 40]}}, "stop_token_ids"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs=1"),
        ({"token_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty=0.5"),
        ({"token_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
    ],
    ids=str,
)
def test_bad_requests_are_told_what_is_wrong(client: Client, body, words: str) -> None:
    reply = client.post("/inference/v1/generate", body)
    assert reply.status == 400
    assert words in reply.body["error"]["message"]
    assert reply.body["error"]["code"] == 400


def test_parameters_at_their_neutral_values_are_accepted(client: Client) -> None:
    neutral = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "stop": [], "detokenize": False, "logit_bias": None}
    assert client.generate(**neutral).status == 200


def test_unknown_models_and_routes_are_not_found(client: Client) -> None:
    assert client.generate(model="gpt").status == 404
    assert client.get("/nowhere").body["error"]["code"] == 404


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_gives_text_and_on_request_tokens_and_logprobs(client: Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    asked = {"messages": messages, "max_tokens": 5, "seed": 1, "logprobs": True, "return_token_ids": True}
    reply = client.post("/v1/chat/completions", asked).body
    (choice,) = reply["choices"]
    assert reply["prompt_token_ids"] == [258, 104, 105, 256, 259]
    same = client.generate(max_tokens=5, ignore_eos=False).body["choices"][0]
    assert choice["token_ids"] == same["token_ids"]
    assert [c["logprob"] for c in choice["logprobs"]["content"]] == pytest.approx(
        [c["logprob"] for c in same["logprobs"]["content"]], abs=1e-5
    )
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    plain = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).body
    assert plain["choices"][0]["logprobs"] is None
    assert "token_ids" not in plain["choices"][0]
    assert client.get("/v1/models").body["data"][0]["id"] == "tiny_qwen3_moe"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"tools": [{}]}, "tools"),
        ({"stop": ["\n"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
    ids=str,
)
def test_chat_refuses_what_it_would_ignore(client: Client, change: dict, words: str) -> None:
    reply = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **change})
    assert reply.status == 400
    assert words in reply.body["error"]["message"]


def test_a_chat_template_that_refuses_the_messages_is_the_clients_error(client: Client, monkeypatch) -> None:
    def refuse(*args, **options):
        raise TemplateError("roles must alternate")

    monkeypatch.setattr(ChatRenderer, "text", refuse)
    reply = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert reply.status == 400
    assert "roles must alternate" in reply.body["error"]["message"]


# --- keys and health --------------------------------------------------------------------------------------------------


def test_every_route_but_health_wants_one_of_the_two_keys(client: Client) -> None:
    assert client.get("/health", key=None).status == 200
    for key in (None, "", "wrong", TOKEN[:-1], "küy"):
        assert client.get("/v1/models", key=key).status == 401, key
        assert client.post("/pause?mode=keep", key=key).status == 401, key
    for key in (TOKEN, "user-key"):
        assert client.get("/v1/models", key=key).status == 200


def test_metrics_carry_vllms_names_and_count(client: Client) -> None:
    before = {name: client.metric(name) for name in ("generation_tokens_total", "prompt_tokens_total")}
    stopped = client.metric("request_success_total")
    client.generate(n=2, max_tokens=7)
    assert client.metric("generation_tokens_total") - before["generation_tokens_total"] == 14
    assert client.metric("prompt_tokens_total") - before["prompt_tokens_total"] == 10
    assert client.metric("request_success_total") - stopped == 2
    assert client.metric("kv_cache_usage_perc") == 0
    text = client.get("/metrics").body
    assert 'finished_reason="abort"' in text
    assert all(line.startswith("# TYPE vllm:") or line.startswith("vllm:") for line in text.splitlines())


def test_metrics_say_how_full_the_engine_is(client: Client) -> None:
    """As the orchestrator reads them; prefixes that nobody uses take no room."""
    client.post("/reset_prefix_cache")
    seats = client.ctx.plan.config.inference.max_num_seqs
    before = parse_loads(client.get("/metrics").body)["0"]
    assert (before.running, before.waiting, before.kv_usage) == (0, 0, 0.0)
    with slow_steps():
        pending = [client.start_generate(f"r{i}", n=seats // 4, max_tokens=200) for i in range(6)]
        client.until("num_requests_running", seats)
        client.until("num_requests_waiting", seats // 2)
        client.post("/pause?mode=keep")
    full = parse_loads(client.get("/metrics").body)["0"]
    client.post("/resume")
    assert [p.result().status for p in pending] == [200] * 6
    assert full == EngineLoad(seats, seats // 2, 1.0, before.preemptions)


def test_load_counts_requests_also_while_paused(client: Client) -> None:
    client.post("/pause?mode=keep&clear_cache=false")
    pending = [client.start_generate(f"r{i}", n=i + 1) for i in range(3)]
    client.until("num_requests_waiting", 6)
    assert client.get("/load").body == {"server_load": 3}
    client.post("/resume")
    assert [p.result().status for p in pending] == [200] * 3
    assert client.get("/load").body == {"server_load": 0}


def test_the_heart_beats_while_idle(client: Client) -> None:
    before = client.ctx.beats
    deadline = time.monotonic() + LIMIT_S
    while client.ctx.beats < before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- pause, abort, disconnect -----------------------------------------------------------------------------------------


def test_keep_freezes_running_requests_and_holds_new_ones(client: Client) -> None:
    undisturbed = client.generate("a", seed=3, max_tokens=200).body["choices"][0]
    with slow_steps():
        running = client.start_generate("a", seed=3, max_tokens=200)
        client.until("num_requests_running", 1)
        assert client.post("/pause?mode=keep").body == {"status": "paused"}
    assert not running.done()
    held = client.start_generate("b", seed=4)
    client.until("num_requests_waiting", 1)
    done = client.metric("generation_tokens_total")
    time.sleep(0.1)
    assert client.metric("generation_tokens_total") == done
    assert client.get("/is_paused").body == {"is_paused": True}
    assert client.post("/resume").body == {"status": "resumed"}
    assert running.result().body["choices"][0]["token_ids"] == undisturbed["token_ids"]
    assert held.result().status == 200


def test_wait_lets_running_requests_finish_and_holds_new_ones(client: Client) -> None:
    with slow_steps():
        running = client.start_generate("a", max_tokens=40)
        client.until("num_requests_running", 1)
        assert client.post("/pause?mode=wait").status == 200
    assert len(running.result(timeout=LIMIT_S).body["choices"][0]["token_ids"]) == 40
    held = client.start_generate("b")
    client.until("num_requests_waiting", 1)
    client.post("/resume")
    assert held.result().body["choices"][0]["finish_reason"] == "length"


def test_abort_ends_all_with_what_they_have(client: Client) -> None:
    with slow_steps():
        running = client.start_generate("a", max_tokens=250, n=2)
        client.until("num_requests_running", 2)
        client.post("/pause")  # mode abort
    choices = running.result(timeout=LIMIT_S).body["choices"]
    assert [c["finish_reason"] for c in choices] == ["abort", "abort"]
    assert all(len(c["logprobs"]["content"]) == len(c["token_ids"]) < 250 for c in choices)
    client.post("/resume")


def test_single_requests_are_aborted_by_id_held_ones_too(client: Client) -> None:
    client.post("/pause?mode=keep")
    futures = {name: client.start_generate(name, max_tokens=5) for name in ("a", "b", "c")}
    client.until("num_requests_waiting", 3)
    assert client.post("/abort_requests", {"request_ids": ["b", "zzz"]}).body == {"status": "aborted", "aborted": 1}
    empty = futures["b"].result(timeout=LIMIT_S).body["choices"][0]
    assert (empty["finish_reason"], empty["token_ids"], empty["routed_experts"]) == ("abort", [], None)
    client.post("/resume")
    assert [futures[name].result().body["choices"][0]["finish_reason"] for name in "ac"] == ["length", "length"]
    assert client.post("/abort_requests").body["aborted"] == 0


@pytest.mark.parametrize("paused", [False, True], ids=["running", "held"])
def test_a_client_that_hangs_up_takes_its_request_along(client: Client, paused: bool) -> None:
    if paused:
        client.post("/pause?mode=keep")
    body = json.dumps(
        {"token_ids": [1, 2], "sampling_params": {"max_tokens": 250, "ignore_eos": True, "n": 8}}
    ).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    before = client.metric("generation_tokens_total")
    with slow_steps():
        with socket.create_connection(("127.0.0.1", client.port)) as raw:
            raw.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            client.until("num_requests_waiting" if paused else "num_requests_running", 8)
        client.until("num_requests_waiting", 0)
        client.until("num_requests_running", 0)
    assert client.metric("generation_tokens_total") - before < 8 * 250
    if paused:
        client.post("/resume")


def test_control_is_carried_through_when_its_client_hangs_up(client: Client) -> None:
    with slow_steps(), socket.create_connection(("127.0.0.1", client.port)) as raw:
        running = client.start_generate("a", max_tokens=150)
        client.until("num_requests_running", 1)
        raw.sendall(f"POST /sleep?mode=wait HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CONTROL}\r\n\r\n".encode())
        while not client.get("/is_paused").body["is_paused"]:  # while it waits for the request
            time.sleep(0.002)
    assert running.result().body["choices"][0]["finish_reason"] == "length"
    client.until("engine_sleep_state", 1)
    client.post("/wake_up")


def test_wrong_control_arguments_are_refused(client: Client) -> None:
    for route in ("/pause?mode=maybe", "/sleep?level=7", "/sleep?mode=x", "/wake_up?tags=brain"):
        assert client.post(route).status == 400, route
    assert client.post("/abort_requests", {"request_ids": "a"}).status == 400
    assert client.post("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}).status == 400
    assert client.post("/init_weight_transfer_engine", {"init_info": {"verify_checksum": "no"}}).status == 400
    assert client.post("/init_weight_transfer_engine", {"init_info": {"verify_checksum": True}}).status == 200


# --- determinism ------------------------------------------------------------------------------------------------------


def test_requests_sent_while_paused_give_the_same_bits_in_any_order_of_arrival(client: Client) -> None:
    def run(order: list[int]) -> dict[int, list]:
        client.post("/reset_prefix_cache")
        client.post("/pause?mode=keep")
        futures = {}
        for sent, i in enumerate(order):
            ids = [258, *range(60 + i % 5, 70 + 3 * (i % 5)), 259]
            futures[i] = client.start_generate(
                f"request {i:03}", token_ids=ids, seed=i, max_tokens=5 + i % 7, top_p=0.9
            )
            client.until("num_requests_waiting", sent + 1)
        client.post("/resume")
        return {i: future.result().body["choices"] for i, future in futures.items()}

    numbers = list(range(48))  # more than max_num_seqs=32: the rest is admitted as slots become free
    assert run(numbers) == run(numbers[::-1])
