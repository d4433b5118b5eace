"""Who may call the built-in server: keys, open servers, web pages."""

from __future__ import annotations

import http.client

import pytest
from inference_server import CONTROL, TOKEN, running_server

from prl.config.errors import UserError
from prl.runtime.process.keys import users_key


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("job", "status"), [("inference", 200), ("rl", 401)])
def test_without_a_key_variable_only_servers_on_their_own_are_open(cache_dir, job: str, status: int) -> None:
    with running_server([], cache_dir, job=job) as client:
        for key in (None, "", "anything"):
            assert client.get("/v1/models", key=key).status == status
            assert client.post("/pause?mode=keep", key=key).status == 401
        assert client.get("/v1/models", key=TOKEN).status == 200
        assert client.post("/pause?mode=keep", key=TOKEN).status == 401, "who samples does not control"
        assert client.post("/resume", key=CONTROL).status == 200


def test_an_open_server_answers_no_web_pages(cache_dir) -> None:
    """A page in a local browser sends an Origin, or, by DNS rebinding, a Host of its own."""
    with running_server([], cache_dir, job="inference") as client:
        statuses = []
        for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
            connection = http.client.HTTPConnection("127.0.0.1", client.port)
            connection.request("GET", "/v1/models", headers=headers)
            statuses.append(connection.getresponse().status)
            connection.close()
        assert statuses == [200, 401, 401, 401]


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_a_key_variable_without_a_key_is_a_user_error(monkeypatch, value: str | None) -> None:
    monkeypatch.delenv("PRL_TEST_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("PRL_TEST_KEY", value)
    with pytest.raises(UserError, match="PRL_TEST_KEY"):
        users_key("inference.api_key_var", "PRL_TEST_KEY", "API key of this server")
