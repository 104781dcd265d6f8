"""`/metrics` against what was asked and what the engine did."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.common import connect, serving, shipped, until
from tests.server.test_robust import drop, slow_steps


def read(running) -> dict[tuple[str, tuple[str, ...]], float]:
    """Value by name and labels."""
    reply = running.call("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(reply.text):
        assert family.documentation
        for sample in family.samples:
            key = sample.name.removeprefix("replayssm_"), tuple(sample.labels.values())
            assert key not in found
            found[key] = sample.value
    return found


def test_numbers_are_those_of_what_was_asked():
    with serving(shipped(), {"max_requests": 4, "page_size": 16, "prefix_cache": True}) as running:
        before = read(running)
        assert before["generation_tokens_total", ()] == 0, "the warm-up is not counted"
        assert before["ready", ()] == 1
        text = "It was the best of times. " * 14
        for _ in range(3):
            running.call("/v1/completions", {"prompt": text, "max_tokens": 20, "ignore_eos": True})
        running.call("/v1/completions", {"prompt": text, "max_tokens": 9, "n": 2, "ignore_eos": True})
        running.call("/v1/completions", {"prompt": "x", "max_tokens": 0})
        running.call("/v1/chat/completions", {"messages": [], "model": "other"})
        running.call("/nowhere")
        now = read(running)
        engine = running.engine
        length = len(engine.tokenizer.encode(text))
    made = 3 * 20 + 2 * 9
    assert now["generation_tokens_total", ()] == made
    assert now["outputs_total", ("length",)] == 5
    assert now["outputs_total", ("abort",)] == 0
    assert now["http_responses_total", ("/v1/completions", "200")] == 4
    assert now["http_responses_total", ("/v1/completions", "400")] == 1
    assert now["http_responses_total", ("/v1/chat/completions", "400")] == 1
    assert now["http_responses_total", ("other", "404")] == 1
    # requests of one output have a first token each; the second of n = 2 has one of its own
    assert now["time_to_first_token_seconds_count", ()] == 5
    assert now["inter_token_latency_seconds_count", ()] == made - 5
    assert now["request_seconds_count", ()] == 5
    assert now["time_to_first_token_seconds_sum", ()] <= now["request_seconds_sum", ()]
    assert now["decode_batch_size_sum", ()] == now["decode_rows_total", ("replay",)]
    assert now["decode_rows_total", ("replay",)] == made - 5
    assert now["prefix_lookups_total", ()] == 4
    assert now["prefix_hits_total", ()] == 3
    assert now["prefix_asked_tokens_total", ()] == 4 * length
    hit = now["prefix_hit_tokens_total", ()]
    assert hit == 3 * 64 == now["prompt_tokens_cached_total", ()]
    assert now["prompt_tokens_total", ()] == 4 * length - hit
    assert now["state_bytes_saved_total", ()] == engine.runner.meter.saved > 0
    assert now["state_bytes_moved_total", ()] == engine.runner.meter.moved
    assert now["ring_flushes_total", ()] == engine.runner.meter.flushes >= 3 * 20 // 8
    assert (now["slots", ()], now["ring_len", ()]) == (4, 8)


def test_drafts_are_counted():
    options = {"max_requests": 2, "spec": "ngram", "ring_len": 16, "spec_adaptive": False}
    asked = {"prompt": "the sea the sea the sea", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with serving(shipped()) as running:
        alone = running.call("/v1/completions", asked).json["choices"]
        now = read(running)
        assert now["draft_tokens_total", ()] == now["decode_rows_total", ("window",)] == 0
    with serving(shipped(), options) as running:
        assert read(running)["draft_tokens_total", ()] == 0, "the warm-up is not counted"
        assert running.call("/v1/completions", asked).json["choices"] == alone
        running.call("/v1/completions", {**asked, "temperature": 1, "seed": 1})
        now, stats, engine = read(running), running.call("/stats").json, running.engine.stats
    kept, drafted = now["draft_tokens_kept_total", ()], now["draft_tokens_total", ()]
    assert (kept, drafted) == (engine.drafts_kept, engine.drafted)
    assert 20 < kept < drafted
    rows = {route: now["decode_rows_total", (route,)] for route in ("replay", "packed", "window")}
    assert sum(rows.values()) == now["decode_batch_size_sum", ()] == 2 * 59 - kept
    assert kept / 4 <= rows["window"] < rows["window"] + rows["replay"]
    assert (stats["spec"], stats["drafted"], stats["drafts_kept"]) == ("ngram", drafted, kept)
    assert stats["window_rows"] == rows["window"]


def test_gauges_while_requests_run_and_wait():
    """States may be all taken while pages are nearly free, and the other way round: they have gauges of their own."""
    with serving(engine={"max_requests": 2}) as running, slow_steps(running, 0.03):
        asked = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        clients = [connect(running.port, "/v1/completions", asked) for _ in range(3)]
        until(lambda: len(running.engine.scheduler.running) == 2 and running.engine.stats.generated_tokens > 10)
        now = read(running)
        assert (now["slots_used", ()], now["requests_running", ()], now["requests_waiting", ()]) == (2, 2, 1)
        assert now["kv_pages_used", ()] / now["kv_pages", ()] < 0.5
        assert 0 <= now["ring_records", ()] <= 2 * now["ring_len", ()]
        for client in clients:
            drop(client)
        until(lambda: read(running)["slots_used", ()] == 0)
        now = read(running)
        assert (now["requests_running", ()], now["requests_waiting", ()], now["ring_records", ()]) == (0, 0, 0)
        assert now["outputs_total", ("abort",)] == 3
        running.wait_idle()


def test_histograms_are_whole():
    with serving() as running:
        running.call("/v1/completions", {"prompt": "x", "max_tokens": 30, "ignore_eos": True})
        now = read(running)
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "decode_batch_size"):
            buckets = [(float(labels[0]), n) for (key, labels), n in now.items() if key == f"{name}_bucket"]
            counts = [count for _, count in sorted(buckets)]
            assert counts == sorted(counts)
            assert counts[-1] == now[f"{name}_count", ()]
        running.wait_idle()


@pytest.mark.parametrize("path", ["/metrics", "/stats"])
def test_asking_often_disturbs_nothing(server, path):
    asked = {"prompt": "x", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    alone = server.call("/v1/completions", asked).json["choices"]
    with ThreadPoolExecutor(3) as pool:
        going = [pool.submit(server.call, "/v1/completions", asked) for _ in range(2)]
        while not all(one.done() for one in going):
            assert server.call(path).status == 200
    assert [one.result().json["choices"] for one in going] == [alone, alone]
