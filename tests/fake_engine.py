"""A small engine over real HTTP, and the orchestrator's pool of several."""

import asyncio
import contextlib

from aiohttp import web

from prl.config.schema import InferenceConfig, SamplingConfig
from prl.orchestrator.engines.pool import EnginePool
from prl.runtime.process.keys import RunKeys
from prl.transport.answers import encode_answer

SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(256,))


class FakeEngine:
    """Answers /inference/v1/generate while not paused. `log` holds control routes and the sets admitted together."""

    def __init__(self):
        self.log, self.bodies, self.held, self.running = [], [], [], 0
        self.asked = []  # control routes with their queries
        self.loaded = []  # the update_info of each update
        self.go = asyncio.Event()
        self.go.set()
        self.choice = {}  # overrides of the answer
        self.refuse = set()  # request ids
        self.silent = 0  # times that /health is left unanswered
        self.dying = None  # what it does instead of answering
        self.missing = 0  # times that weights are not to be had
        self.stuck_at = ""  # a control route that fails, but not before `stuck` is set
        self.stuck = asyncio.Event()
        self.unknown = ""  # a control route that this engine does not have
        self.framed = False  # whether `choice` has arrays
        self.lost = set()  # routes whose next answer is lost: the connection closes when all has been done
        self.metrics = "nothing yet"  # what it answers; None: 503

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application(middlewares=[self.lose_answers])
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_get("/load", self.load)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_post("/{route}", self.control)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        finally:
            await runner.cleanup()

    @property
    def lose_answers(self):
        @web.middleware
        async def lose(request, handler):
            answer = await handler(request)
            if request.path in self.lost:
                self.lost.discard(request.path)
                request.transport.abort()
            return answer

        return lose

    async def generate(self, request):
        assert request.headers["Authorization"] == "Bearer token"
        body = await request.json()
        self.bodies.append(body)
        if self.dying is not None:
            await self.dying(request)
        if body["request_id"] in self.refuse:
            return web.json_response({"error": "the prompt is too long"}, status=400)
        self.held.append(body["request_id"])
        await self.go.wait()
        if self.held:
            self.log.append(sorted(self.held))
            self.held = []
        ids = body["token_ids"][-1:] * 2
        choice = {
            "token_ids": ids,
            "finish_reason": "stop",
            "logprobs": {"content": [{"token_id": i, "logprob": -0.25} for i in ids]},
            "routed_experts": None,
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        }
        answer = {"choices": [choice | self.choice]}
        return web.Response(body=bytes(encode_answer(answer))) if self.framed else web.json_response(answer)

    async def load(self, request):
        return web.json_response({"server_load": len(self.held)})

    async def health(self, request):
        if self.silent:
            self.silent -= 1
            await asyncio.sleep(60)
        return web.Response()

    async def show_metrics(self, request):
        return web.Response(status=503) if self.metrics is None else web.Response(text=self.metrics)

    async def control(self, request):
        assert request.headers["Authorization"] == "Bearer control"
        route = request.match_info["route"]
        self.log.append(route)
        self.asked.append(route + (f"?{request.query_string}" if request.query_string else ""))
        if route == self.stuck_at:
            await self.stuck.wait()
            return web.Response(status=500)
        if route == self.unknown:
            return web.Response(status=404)
        if route == "pause":
            self.go.clear()
        if route == "resume":
            self.go.set()
        if route == "update_weights":
            self.loaded.append((await request.json())["update_info"])
            if self.missing:
                self.missing -= 1
                return web.Response(status=400, text="the weights cannot be fetched")
        if route == "reset_prefix_cache":
            return web.Response(status=500, text="cannot")
        return web.json_response({})


@contextlib.asynccontextmanager
async def pool_of(count=1, processes=None, **config):
    engines = [FakeEngine() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine.serving()) for engine in engines]
        pool = EnginePool(
            urls, InferenceConfig(**config), RunKeys(generate="token", control="control"), processes=processes
        )
        stack.push_async_callback(pool.close)
        yield pool, engines


def generate(pool, request_id="r", replica=None, prompt=(1, 2, 9)):
    return pool.generate(list(prompt), 7, 11, "train-3", SAMPLING, request_id, replica)
