"""`replayssm serve`: say what was set up, then serve until told to stop."""

from __future__ import annotations

import logging
import sys
import time

import torch

from replayssm.cli import speculation
from replayssm.cli.console import print_table
from replayssm.cli.decoding import load, state_dtype
from replayssm.cli.memory import print_memory
from replayssm.cli.serve_request import ServeRequest
from replayssm.engine.core import Engine
from replayssm.errors import OptionError
from replayssm.kernels.choose import backend
from replayssm.models.loading import LoadedModel, find_model
from replayssm.models.mtp import check_mtp
from replayssm.server.run import Server
from replayssm.server.service import Service


def run_command(request: ServeRequest) -> int:
    """Return 0 when stopped. Raises why it cannot serve."""
    folder = find_model(request.model)
    if request.engine.spec == "mtp":
        check_mtp(folder, request.model)
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if request.decode_backend == "triton" and not device.startswith("cuda"):
        raise OptionError(f"--linear-attn-decode-backend triton does not run on {device}; drop it, or use a GPU")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    loaded: list[LoadedModel] = []

    def make() -> LoadedModel:
        loaded.append(load(request.model, request.dtype, request.device))
        return loaded[0]

    if (note := speculation.ring_note(request.engine, request.given.get("ring_len"))) is not None:
        print(note, file=sys.stderr)
    start = time.perf_counter()
    server = Server(make, request.model, request.server, request.engine, lambda service: ready(service))

    def ready(service: Service) -> None:
        describe(request, service, loaded[0])
        seconds = time.perf_counter() - start
        print(f"ready: {service.name} at {server.url}/v1 after {seconds:.1f} s and a warm-up request", flush=True)

    print(f"loading {request.model}; {server.url}/health says when it is ready", file=sys.stderr, flush=True)
    server.run()
    print("stopped", file=sys.stderr)
    return 0


def describe(request: ServeRequest, service: Service, loaded: LoadedModel) -> None:
    """Memory, capacity and kernels, on stderr."""
    engine, options = service.engine, request.server
    print_memory(engine)
    dtype = state_dtype(loaded, request.engine)
    prefix = "off"
    if engine.prefix is not None:
        prefix = f"{engine.prefix.states.slots} states, one every {engine.options.prefix_interval} tokens"
    rows = [
        *((("kernels" if i == 0 else ""), line) for i, line in enumerate(kernels(engine))),
        ("decode", decode_route(engine)),
        ("drafts", speculation.describe(engine.options)),
        ("state", f"{dtype.name} ({dtype.source})"),
        ("prefix cache", prefix),
        ("chat template", service.chat.source),
        ("queue", f"{options.max_queue} outputs wait at most, more get 429"),
        ("key", "needed" if options.api_key else "none: whoever reaches the port may use it"),
    ]
    print(file=sys.stderr)
    print_table(("", ""), rows, sys.stderr, left=2)


def kernels(engine: Engine) -> list[str]:
    """Which kernels run, and why."""
    device = engine.slots.device
    module = backend(device.type)
    name = module.__name__.rpartition(".")[2].removesuffix("_backend")
    why = "a GPU with Triton" if device.type == "cuda" and name != "torch" else f"the device is {device.type}"
    if device.type == "cuda" and name == "torch":
        why = "Triton cannot be imported"
    described = module.describe() if hasattr(module, "describe") else []
    graphs = [] if engine.runner.graphs is None else ["decode steps are CUDA graphs, recorded when first needed"]
    return [f"{name} on {device}: {why}", *described, *graphs]


def decode_route(engine: Engine) -> str:
    """What decodes at which batch, and who decided it."""
    runner, ring = engine.runner, engine.slots.ring_len
    if runner.windows is not None and runner.windows.strategy != "ring":
        return f"packed: windows of drafts by {runner.windows.strategy} leave no ring for other steps"
    if ring is None:
        return "packed (mode packed): no ring"
    if runner.mode == "replay":
        return f"replay, ring of {ring} (mode replay)"
    routes = [runner._route(rows) for rows in range(1, engine.plan.slots + 1)]
    first = next((rows for rows, route in enumerate(routes, 1) if route == "replay"), None)
    if first is None:
        return f"packed up to {len(routes)} requests (mode auto: a ring does not pay there by the measured table)"
    below = f", packed below {first}" if first > 1 else ""
    return f"replay with a ring of {ring} from batch {first} on{below} (mode auto, by a measured table)"
