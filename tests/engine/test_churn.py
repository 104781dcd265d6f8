"""Thousands of short requests that end in every way there is, and nothing is lost, mixed up or kept."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
import torch

from replayssm.engine.params import SamplingParams
from tests.engine.common import (
    MOST_STEPS,
    as_loaded,
    assert_idle,
    engine_of,
    greedy,
    random_tokens,
    run,
)
from tests.models import tiny

REQUESTS = 3000
PROMPTS = [random_tokens(length, seed) for length in (1, 2, 5, 9) for seed in (1, 2, 3)] + [random_tokens(23, 4)]


class BadStream:
    """Of a request whose text fails, after so many tokens or at the end."""

    text, stopped = "", None

    def __init__(self, good: int, at_end: bool) -> None:
        self.good, self.at_end = good, at_end

    def push(self, token, may_stop=True):
        self.good -= 1
        if self.good < 0 and not self.at_end:
            raise ValueError("no such character")
        return ""

    def finish(self):
        if self.at_end:
            raise ValueError("no such end")
        return ""


def smallest_model():
    """A linear layer, then an attention layer."""
    torch.manual_seed(2)
    config = tiny.config_of(
        "qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], hidden_size=16,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=16, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=4, head_dim=8,
    )  # fmt: skip
    model = tiny.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5 if "conv1d" in name else 1.2 / parameter.shape[-1] ** 0.5)
    return model


class Churn:
    """Submits, steps, aborts and breaks things at random. What an answer must be is known from a first, quiet run."""

    def __init__(self, engine, truth, seed):
        self.engine, self.truth, self.rng = engine, truth, random.Random(seed)
        self.ways: Counter[str] = Counter()
        self.plans: dict[object, str] = {}  # a request, and how it is to end
        self.roots: deque = deque()
        self.told: Counter[object] = Counter()

    def listener(self, request, text):
        assert not self.told[request]  # nothing comes after the end
        self.told[request] += request.finished
        if self.plans.get(request) == "listener":
            raise KeyError("nobody listens")
        if request.parent is not None and request.finished:
            self.check(request)

    def submit(self):
        rng = self.rng
        prompt = rng.choice(PROMPTS)
        tokens = rng.randint(1, 4)
        how = rng.choice(["length", "length", "stop", "stream", "stream end", "listener", "abort", "abort", "forks"])
        params = greedy(tokens)
        if how == "stop":
            params = greedy(4, stop_token_ids=(self.truth[prompt][rng.randrange(4)],))
        if how == "forks":
            params = SamplingParams(seed=5, max_tokens=tokens, n=3)
        request = self.engine.make(prompt, params)
        self.plans[request] = how
        if how.startswith("stream"):
            request.stream = BadStream(rng.randrange(3), how == "stream end")
        self.engine.submit(request, self.listener)
        self.roots.append(request)

    def phase(self, request):
        if request.finished:
            return "after its end"
        if request.status == "waiting":
            return "preempted" if request.preemptions else "waiting"
        if request.computed < len(request.prompt):
            return "in its prompt" if request.computed else "before its prompt"
        return "with a token in flight" if len(request.tokens) < request.length else "decoding"

    def disturb(self):
        rng, engine = self.rng, self.engine
        groups = engine.scheduler.running, engine.scheduler.waiting, [r for r in self.roots if r.preemptions]
        (group,) = rng.choices(groups, [6, 1, 12])
        doomed = [r for r in group if self.plans.get(r) == "abort" and not r.finished]
        if doomed and rng.random() < 0.8:
            request = rng.choice(doomed)
            self.ways[f"abort {self.phase(request)}"] += 1
            engine.abort(request)
            assert request.finished
        if rng.random() < 0.1 and engine.scheduler.running:
            forked = [r.parent for r in engine.scheduler.running if r.parent is not None]
            if forked:
                self.ways["abort of forks"] += 1
                engine.abort(forked[0])
                alive = [*engine.scheduler.running, *engine.scheduler.waiting]
                assert not [r for r in alive if forked[0] in (r, r.parent)]
        if rng.random() < 0.1:
            engine.drain()
            if engine.scheduler.running:
                engine.scheduler._evict(engine.scheduler.running[-1])
        if rng.random() < 0.01:
            self.break_a_launch()

    def break_a_launch(self):
        launch = self.engine.runner.launch

        def broken(step, drafts=None):
            self.engine.runner.launch = launch
            if self.rng.random() < 0.5:
                launch(step)  # and then its tokens are lost
            self.ways["launch"] += 1
            raise RuntimeError("no device")

        self.engine.runner.launch = broken

    def check(self, request):
        how, want = self.plans.get(request, "fork"), self.truth[tuple(request.prompt)]
        if request.parent is not None or request.params.n > 1:
            want = self.truth[tuple(request.prompt), request.index]
        self.ways[f"{request.reason}"] += 1
        assert request.output == want[: len(request.output)], (how, request)
        if request.reason == "length":
            assert len(request.output) == request.params.max_tokens
        elif request.reason == "stop":
            (stop,) = request.params.stop_token_ids
            assert request.output.index(stop) == len(request.output) - 1
        elif request.reason == "error":
            assert request.error
            assert how.startswith("stream") or how == "listener" or "no device" in request.error, request.error
        else:
            assert request.reason == "abort"
        assert (request.slot, request.pages, request.saved) == (-1, [], None)

    def go(self, requests, ways):
        """So many requests, and more of them as long as one of `ways` to end did not occur."""
        for _ in range(3 * MOST_STEPS):
            wanted = len(self.plans) < requests or (len(self.plans) < 4 * requests and not ways <= set(self.ways))
            while wanted and len(self.engine.scheduler.waiting) < 6:
                self.submit()
            self.disturb()
            self.engine.step()
            while self.roots and self.roots[0].finished:
                self.check(self.roots.popleft())
            if not wanted and self.engine.idle:
                return
        raise AssertionError("no end")


def truth_of(model):
    """Greedy answers, and those of three sampled outputs."""
    found = {}
    with engine_of(model, max_requests=13) as engine:
        requests = {prompt: engine.add(prompt, greedy(4)) for prompt in PROMPTS}

        def listener(request, text):
            found[tuple(request.prompt), request.index] = request.output

        for prompt in PROMPTS:
            engine.add(prompt, SamplingParams(seed=5, max_tokens=4, n=3), listener)
        run(engine)
    return found | {prompt: request.output for prompt, request in requests.items()}


def test_the_quiet_run_is_stock_decoding():
    model = smallest_model()
    truth = truth_of(as_loaded(model))
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert truth[prompt] == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_thousands_of_requests_end_in_every_way(overlap, prefix):
    model = as_loaded(smallest_model())
    truth = truth_of(model)
    with engine_of(
        model, 15, max_requests=8, chunk_tokens=12, page_size=2, ring_len=2, overlap=overlap, prefix_cache=prefix,
        prefix_interval=2, preempt="offload" if overlap else "recompute",
    ) as engine:  # fmt: skip
        churn = Churn(engine, truth, seed=overlap + 2 * prefix)
        ways = {
            "length", "stop", "abort", "error", "launch", "abort waiting", "abort in its prompt", "abort preempted",
            "abort with a token in flight" if overlap else "abort decoding", "abort of forks",
        }  # fmt: skip
        churn.go(REQUESTS // 4, ways)
        assert_idle(engine)
        assert not churn.roots
        assert set(churn.told.values()) == {1}
        assert set(churn.told) >= set(churn.plans)
        assert ways <= set(churn.ways), churn.ways
