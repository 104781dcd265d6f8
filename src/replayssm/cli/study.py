"""`replayssm study`: what state dtype, ring length and rounded operands cost, on layers and whole models.

The JSON object of `study numerics`:

    command, quick   the command line, defaults written out
    device, versions
    drift            rows of `study.drift`: route, state_dtype, ring_len, operands, kind, decay, steps, state_error,
                     output_error
    forgetting       kind, decay, steps, left: of an error made at step 0
    text             model -> rows of `study.text`
    claims           claim, decided_by, value, holds

That of `study task`: command, device, versions, and task: model -> rows of `study.accuracy` and set, that of the
problems.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from replayssm.bench import device
from replayssm.cli.console import counter, print_json, print_table, step
from replayssm.cli.decoding import load
from replayssm.cli.options import StudyRequest, TaskRequest
from replayssm.errors import OptionError, PromptError
from replayssm.models.loading import LoadedModel
from replayssm.shipped import HELD_OUT, SHIPPED
from replayssm.study import accuracy, numerics, tables, task
from replayssm.study.plot import plot


def run_command(request: StudyRequest | TaskRequest) -> int:
    """Return 0: a refuted claim or a low score is a result, not a failure."""
    return _task(request) if isinstance(request, TaskRequest) else _numerics(request)


def _task(request: TaskRequest) -> int:
    args, where = request.args, device.resolve(request.args.device)
    sets = {name: task.SETS[name].draw(request.problems) for name in request.sets}
    models = _load(tuple(SHIPPED) if request.models is None else request.models, str(where))
    result: dict[str, Any] = dict(command=request.command, device=device.describe(where), versions=device.versions())
    result["task"] = {}
    settings = accuracy.SETTINGS
    for name, loaded in models:
        rows = result["task"][name] = []
        for kind, problems in sets.items():
            what = f"model {name}: {len(problems)} problems, {kind}, {len(settings)} settings"
            with counter(what, len(settings)) as tick:
                rows += [dict(set=kind) | row for row in accuracy.measure(loaded, problems, settings, tick)]
    for table in tables.scores(result):
        print(f"\n{table.title}\n")
        print_table(table.header, table.rows, left=table.left)
    if request.file is not None:
        with open(request.file, "w", encoding="utf-8") as file:
            print_json(result, file)
    if args.json:
        print_json(result, args.out)
    return 0


def _load(names: tuple[str, ...], where: str) -> list[tuple[str, LoadedModel]]:
    with step(f"loading {', '.join(names) or 'no model'}"):
        return [(name, load(name, "float32", where)) for name in names]


def _numerics(request: StudyRequest) -> int:
    args = request.args
    if request.source is not None:
        result = _read(request.source)
    else:
        where = device.resolve(args.device)
        names = tuple(SHIPPED) if request.models is None else request.models
        held_out = read_text(request.text or HELD_OUT) if names else ""
        models = _load(names, str(where))
        result = dict(command=request.command, quick=args.quick)
        result |= dict(device=device.describe(where), versions=device.versions())
        result |= numerics.run(models, held_out, request.steps, request.tokens, where, counter)
    for table in tables.tables(result):
        print(f"\n{table.title}\n")
        print_table(table.header, table.rows, left=table.left)
    if request.folder is not None:
        request.folder.mkdir(parents=True, exist_ok=True)
        with open(request.folder / "numerics.json", "w", encoding="utf-8") as file:
            print_json(result, file)
        for path in [request.folder / "numerics.json", *plot(result, request.folder)]:
            print(f"written: {path}")
    if args.json:
        print_json(result, args.out)
    return 0


def read_text(path: Path) -> str:
    """A UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"held-out text {path} cannot be read: {error}; name a UTF-8 file with --text") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        tables.tables(result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"--from {path} holds no results of `replayssm study numerics`: {error}") from error
    return result
