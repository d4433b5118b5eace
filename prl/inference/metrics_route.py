"""GET /metrics: Prometheus text under vLLM's names, so that dashboards read either engine. GET /load: requests here."""

from __future__ import annotations

from aiohttp import web

from prl.inference.worker import EngineWorker

FINISH_REASONS = ("stop", "length", "abort", "error")


def add_metrics_route(app: web.Application, worker: EngineWorker, model_name: str) -> None:
    async def metrics(http: web.Request) -> web.Response:
        text = prometheus_text(worker, model_name)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def load(http: web.Request) -> web.Response:
        return web.json_response({"server_load": worker.num_requests})

    app.router.add_get("/metrics", metrics)
    app.router.add_get("/load", load)


def prometheus_text(worker: EngineWorker, model_name: str) -> str:
    """Gauges and counters of the engine in the Prometheus text format."""
    engine, stats = worker.engine, worker.engine.stats
    running, waiting = worker.counts
    families = [
        ("gauge", "num_requests_running", running),
        ("gauge", "num_requests_waiting", waiting),
        ("gauge", "kv_cache_usage_perc", len(engine.cache.in_use) / engine.cache.slots),
        ("gauge", "engine_sleep_state", int(not engine.awake)),
        ("counter", "prompt_tokens_total", stats.prompt_tokens),
        ("counter", "generation_tokens_total", stats.generation_tokens),
        ("counter", "prefix_cache_queries_total", stats.prefix_queries),
        ("counter", "prefix_cache_hits_total", stats.prefix_hits),
        ("counter", "num_preemptions_total", stats.preemptions),
    ]
    escaped = model_name.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'engine="0",model_name="{escaped}"'
    lines = []
    for kind, name, value in families:
        lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{labels}}} {value}"]
    lines.append("# TYPE vllm:request_success_total counter")
    lines += [
        f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {stats.finished[reason]}'
        for reason in FINISH_REASONS
    ]
    return "\n".join(lines) + "\n"
