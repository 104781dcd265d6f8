"""What must be known before minutes of work, and plots of what came out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from replayssm.bench import serving, serving_busy, serving_plot
from replayssm.cli.parser import build_parser
from replayssm.errors import OptionError
from replayssm.spec import LayerSpec
from replayssm.state import MemoryPlan, SlotPool

SPECS = (LayerSpec("gdn", 1, 2, 16, 24),) * 3
PACKED = SlotPool.slot_bytes(SPECS, None, "float32", "bfloat16")
REPLAY = SlotPool.slot_bytes(SPECS, 8, "float32", "bfloat16")
PAGE = 100


def plan_for(budget):
    return MemoryPlan(budget, 1000, 500, PACKED, 0, 0, PAGE, 1, 0, 1, 16, PACKED)


def request_of(*words):
    args = build_parser().parse_args(["bench", *words])
    return args.request(args)


@pytest.mark.parametrize(("modes", "room"), [("packed", True), ("auto,packed", False), ("replay", False)])
def test_the_first_engine_tells_whether_the_others_will_hold_the_batch(modes, room):
    """Four packed requests of 17 tokens, two pages each, fit to the byte."""
    plan = plan_for(1500 + 2 * PAGE + 4 * (PACKED + 2 * PAGE))
    engine = SimpleNamespace(plan=plan, slots=SimpleNamespace(conv=torch.zeros(0, dtype=torch.bfloat16)))
    loaded = SimpleNamespace(specs=SPECS)
    words = ("--prompt-tokens", "1", "--output-tokens", "16", "--mode", modes)
    request = request_of("throughput", "--batch", "1,4", *words)
    if room:
        serving._check_room(request, loaded, engine)
        return
    said = rf"--batch 4 exceeds the 2 slots that .* in mode {modes.split(',')[0]} with state float32"
    with pytest.raises(OptionError, match=said):
        serving._check_room(request, loaded, engine)
    serving._check_room(request_of("throughput", "--batch", "2", *words), loaded, engine)
    with pytest.raises(OptionError, match="3 exceeds the 2 slots"):
        serving._check_room(request_of("throughput", "--batch", "3", *words), loaded, engine)
    serving._check_room(request_of("latency", *words), loaded, engine)  # as many as fit


def test_nothing_fits_into_nothing():
    assert serving._fits(plan_for(1500), REPLAY, 17) == 0


@pytest.mark.parametrize(
    ("seen", "busy", "note"),
    [
        (serving_busy.Busy(0.009, 300.0), 0.9, None),
        (serving_busy.Busy(0.011, 300.0), 1.0, None),
        (None, None, "torch.profiler saw no work on the device"),
        (RuntimeError("no\nCUPTI"), None, "no gpu_busy: RuntimeError: no CUPTI"),
    ],
)
def test_a_row_outlives_the_profiler(monkeypatch, seen, busy, note):
    def measure(*args):
        if isinstance(seen, Exception):
            raise seen
        return seen

    monkeypatch.setattr(serving_busy, "measure", measure)
    row = dict(gpu_busy=None, gpu_ms=None, gpu_activities=None, notes=[])
    serving._watch(None, [], 1, 8, 0.010, row)
    assert row["gpu_busy"] == (None if busy is None else pytest.approx(busy))
    assert row["gpu_ms"] == (None if busy is None else pytest.approx(1e3 * seen.seconds))
    assert [note in line for line in row["notes"]] == ([] if note is None else [True])


def test_graphs_that_failed_are_said():
    def engine(graphs):
        return SimpleNamespace(runner=SimpleNamespace(graphs=graphs))

    assert serving._graph_notes(engine(None)) == []
    assert serving._graph_notes(engine(SimpleNamespace(failure=None))) == []
    (note,) = serving._graph_notes(engine(SimpleNamespace(failure="a sync")))
    assert note == "decode ran without CUDA graphs: a sync"


def times(value):
    return dict.fromkeys(("mean", "median", "p90", "p99"), value)


def rows(load, values, **more):
    for state in ("float32", "bfloat16"):
        for at, value in enumerate(values):
            for mode in ("auto", "packed"):
                ok = dict(status="ok", tpot_ms=times(at + 1.0), ttft_ms=times(2.0), decode_tokens_per_s=10.0 * at)
                bad = dict(status="failed", tpot_ms=None, ttft_ms=None, decode_tokens_per_s=None)
                failed = (at, mode, state) == (1, "auto", "bfloat16")
                yield {load: value, "mode": mode, "state_dtype": state, **(bad if failed else ok), **more}


@pytest.mark.parametrize("name", ["throughput", "latency"])
def test_plots_have_a_line_for_each_mode_and_state_dtype(tmp_path, monkeypatch, name):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    seen = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: (seen.append(figure), real(figure, *args)))
    load, values = ("batch", [8, 1]) if name == "throughput" else ("rate", [None, 2.0])
    getattr(serving_plot, name)(list(rows(load, values)), "title", tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")
    for axes in seen[0].axes:
        labels = [line.get_label() for line in axes.lines if not line.get_label().startswith("_")]
        assert labels == [f"{m}, state {s}" for s in ("float32", "bfloat16") for m in ("auto", "packed")]
        ticks = [tick.get_text() for tick in axes.get_xticklabels()]
        assert ticks == (["1", "8"] if name == "throughput" else ["2", "all at once"])
    getattr(serving_plot, name)(list(rows(load, values, status="failed")), "title", tmp_path / "empty.png")
