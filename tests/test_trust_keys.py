"""The keys of a run: who holds which, how they are compared, and that nothing shows them."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import re
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from env_serving import serving
from runtime_tree import Start, start

from prl.envs.reverse_text import ReverseText
from prl.runtime.process import keys
from prl.runtime.process.child import Boot
from prl.runtime.process.keys import HELD_BY, RunKeys, bears, make_keys

__all__ = ["start"]  # the fixture

ROOT = Path(__file__).parent.parent
STRANGE = (
    "",
    "Bearer",
    "Bearer ",
    "bearer küy",
    "Bearer \udcff\udcfe",
    "Basic c2VjcmV0",
    "Bearer secret2",
    "Bearer secre",
    "x" * 5000,
)


@pytest.mark.parametrize("authorization", STRANGE)
def test_a_wrong_key_opens_nothing_and_raises_nothing(authorization: str) -> None:
    assert not bears(authorization, [b"secret", b""])
    assert not bears(authorization, [])


def test_every_known_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return hmac.compare_digest(given, key)

    monkeypatch.setattr(keys, "hmac", SimpleNamespace(compare_digest=compare))
    assert bears("Bearer a", [b"a", b"b"])
    assert compared == [(b"a", b"a"), (b"a", b"b")]


def test_nobody_else_compares_a_header() -> None:
    """All servers ask `bears`; the token of the nodes has a comparison of its own."""
    compares = re.compile(
        r"(Bearer|[Aa]uthorization|token|proof)[^:]* [!=]= |[!=]= .*(Bearer|[Aa]uthorization|\btoken\b)"
    )
    files = [
        path
        for folder in ("inference", "orchestrator", "envs", "runtime")
        for path in (ROOT / "prl" / folder).rglob("*.py")
    ]
    found = {line for path in files for line in path.read_text().splitlines() if compares.search(line)}
    found = {line for line in found if not re.search(r"tokens|token_|of_token|api_key_var|stop_|# ", line)}
    assert found == set()


def test_a_role_gets_the_keys_that_it_needs_and_no_others() -> None:
    all_keys = make_keys()
    values = dataclasses.astuple(all_keys)
    assert len(set(values)) == len(values)
    assert all(len(value) == 32 for value in values)
    assert all_keys.of("env") == RunKeys(env=all_keys.env), "where code of others runs"
    assert all_keys.of("trainer") == RunKeys(train=all_keys.train)
    assert all_keys.of("router").control == ""
    assert all_keys.of("") == all_keys.of("wandb") == RunKeys()
    assert [role for role in HELD_BY if all_keys.of(role).control] == ["inference", "orchestrator"]


def test_a_boot_travels_whole() -> None:
    boot = Boot(1, "a:b", {"a": "b"}, make_keys(), "/dev/shm/prl-x", 3, 4, 5, None, "w", 0)
    assert Boot.from_json(json.loads(boot.to_json())) == boot


def test_names_in_shared_memory_hold_nothing_of_a_key(start: Start) -> None:
    root = start(script={"trainer/0": {"print_boot": True}}, environment={})
    code, output = root.wait()
    assert code == 0, output
    log = (root.run_dir / "logs" / "trainer.0.0.log").read_text()
    shared, held = re.findall(r"BOOT (\S+) (\S+)", log)[0]
    assert re.fullmatch(r"/dev/shm/prl-[0-9a-f]{16}", shared)
    (key,) = held.split(",")
    assert len(key) == 32
    assert not any(key[i : i + 6] in shared for i in range(len(key) - 5))


def test_an_environments_websocket_wants_its_key() -> None:
    async def scenario() -> None:
        async with serving(ReverseText(max_chars=10)) as (_, client, _), aiohttp.ClientSession() as session:
            for header in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Bearer s\xe9cret"}):
                async with session.get(f"{client.url}/ws", headers=header) as response:
                    assert response.status == 401
            assert await client.run("train", 10**9, None)  # type: ignore[arg-type]

    with pytest.raises(Exception, match=r"there are .* tasks in train"):
        asyncio.run(scenario())
