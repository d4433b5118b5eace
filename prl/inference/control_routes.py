"""Control over the engine: pause and resume, weights, sleep, caches, health, metrics."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from prl.inference.worker import EngineWorker
from prl.transport.weights import receive


def add_control_routes(app: web.Application, worker: EngineWorker) -> None:
    engine = worker.engine
    updating = {"active": False}

    async def pause(http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"mode must be abort, wait or keep, not {mode!r}")
        await worker.pause(mode)  # type: ignore[arg-type]
        return web.json_response({"status": "paused"})

    async def resume(http: web.Request) -> web.Response:
        await worker.resume()
        return web.json_response({"status": "resumed"})

    async def is_paused(http: web.Request) -> web.Response:
        return web.json_response({"is_paused": worker.paused})

    async def abort_requests(http: web.Request) -> web.Response:
        aborted = await worker.abort((await _body(http)).get("request_ids") or None)
        return web.json_response({"status": "aborted", "aborted": aborted})

    async def init_weight_transfer(http: web.Request) -> web.Response:
        if not isinstance((await _body(http)).get("init_info"), dict):
            raise ValueError("init_info must be an object")
        return web.json_response({"message": "Weight transfer initialized"})  # both transports describe themselves per update

    async def start_update(http: web.Request) -> web.Response:
        updating["active"] = True
        return web.json_response({"message": "Weight update started"})

    async def update_weights(http: web.Request) -> web.Response:
        if not updating["active"]:
            raise ValueError("/update_weights before /start_weight_update")
        info = (await _body(http))["update_info"]
        await worker.run(lambda: engine.load(receive(info)))
        return web.json_response({"message": "Weights updated"})

    async def finish_update(http: web.Request) -> web.Response:
        version = (await _body(http)).get("weight_version")
        if version is not None:
            await worker.run(lambda: engine.set_version(str(version)))
        else:  # no name to tell old KV from new by
            await worker.run(engine.reset_prefix_cache)
        updating["active"] = False
        return web.json_response({"message": "Weight update finished"})

    async def weight_info(http: web.Request) -> web.Response:
        return web.json_response({"weight_version": engine.version})

    async def sleep(http: web.Request) -> web.Response:
        level = int(http.query.get("level", "1"))
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, not {level}")
        if not worker.asleep:
            worker.asleep = True
            await worker.run(lambda: engine.sleep(level))
        return web.Response(status=200)

    async def wake_up(http: web.Request) -> web.Response:
        if worker.asleep:
            await worker.run(engine.wake_up)
            worker.asleep = False
        return web.Response(status=200)

    async def is_sleeping(http: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": worker.asleep})

    async def reset_prefix_cache(http: web.Request) -> web.Response:
        await worker.run(engine.reset_prefix_cache)
        return web.Response(status=200)

    async def health(http: web.Request) -> web.Response:
        return web.Response(status=200 if worker.error is None else 503)

    async def metrics(http: web.Request) -> web.Response:
        return web.Response(text=prometheus_text(worker), content_type="text/plain")

    posts = {
        "/pause": pause,
        "/resume": resume,
        "/abort_requests": abort_requests,
        "/init_weight_transfer_engine": init_weight_transfer,
        "/start_weight_update": start_update,
        "/update_weights": update_weights,
        "/finish_weight_update": finish_update,
        "/sleep": sleep,
        "/wake_up": wake_up,
        "/reset_prefix_cache": reset_prefix_cache,
    }
    gets = {
        "/is_paused": is_paused,
        "/weight_info": weight_info,
        "/is_sleeping": is_sleeping,
        "/health": health,
        "/metrics": metrics,
    }
    app.router.add_routes([web.post(path, handler) for path, handler in posts.items()])
    app.router.add_routes([web.get(path, handler) for path, handler in gets.items()])


async def _body(http: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await http.text() or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


def prometheus_text(worker: EngineWorker) -> str:
    """Under vLLM's names, so that dashboards and the orchestrator read either engine."""
    engine, stats = worker.engine, worker.engine.stats
    used = len(engine.running) / engine.config.max_num_seqs
    lines = [
        ("gauge", "num_requests_running", len(engine.running)),
        ("gauge", "num_requests_waiting", worker.num_waiting),
        ("gauge", "kv_cache_usage_perc", used),
        ("counter", "prompt_tokens_total", stats.prompt_tokens),
        ("counter", "generation_tokens_total", stats.generation_tokens),
        ("counter", "prefix_cache_queries_total", stats.prefix_queries),
        ("counter", "prefix_cache_hits_total", stats.prefix_hits),
        ("counter", "num_preemptions_total", stats.preemptions),
        ("counter", "request_success_total", stats.finished),
    ]
    return "".join(f"# TYPE vllm:{name} {kind}\nvllm:{name} {value}\n" for kind, name, value in lines)
