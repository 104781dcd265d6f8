"""Four times as many clients as slots, for a while: each takes something else, many leave early, nothing may be lost.

    python -m tests.server.load --seconds 300 --json docs/benchmarks/server/load.json

Every answer is checked: texts forced by a grammar are known, greedy texts were made alone before, structured outputs
are parsed, refusals must be what was asked for. Pages are few, so that requests are preempted on the way. At the end no
slot or page may be taken, and the memory of the process may not have grown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.engine.common import with_pages
from tests.server.common import Running, call, connect, events, exactly, said, serving, shipped
from tests.server.test_robust import drop

GREEDY = [
    f"{words} {i}" for i, words in enumerate(("In the beginning", "It was the best of times and", "Sum:", "Yea,"))
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXTS = ("Grüße 🙂 an alle", "alpha beta gamma delta", "0123456789")
PATH, CHAT = "/v1/completions", "/v1/chat/completions"


class Client(threading.Thread):
    """Asks until the time is over; what went wrong is in `trouble`."""

    def __init__(self, port: int, seed: int, end: float, alone: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.port, self.draw, self.end, self.alone = port, random.Random(seed), end, alone
        self.done: Counter[str] = Counter()
        self.trouble: list[str] = []

    def run(self) -> None:
        kinds = (
            self.greedy,
            self.forced,
            self.stopped,
            self.schema,
            self.several,
            self.leaves,
            self.leaves,
            self.wrong,
        )
        while time.monotonic() < self.end and not self.trouble:
            kind = self.draw.choice(kinds)
            try:
                self.done[kind() or kind.__name__] += 1
            except Exception as error:
                self.trouble.append(f"{kind.__name__}: {type(error).__name__}: {str(error)[:500]}")

    def ask(self, body: dict[str, Any], path: str = PATH) -> tuple[str, str, dict[str, Any]] | None:
        """Text, reason and usage; None when the queue was full."""
        stream = self.draw.random() < 0.6
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body
        reply = call(self.port, path, asked)
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) >= 1
            time.sleep(self.draw.uniform(0.05, 0.3))
            return None
        assert reply.status == 200, reply
        if not stream:
            choice = reply.json["choices"][0]
            return (
                choice.get("text", choice.get("message", {}).get("content")),
                choice["finish_reason"],
                reply.json["usage"],
            )
        chunks = events(reply.text)
        reason = next(r for chunk in chunks for c in chunk["choices"] if (r := c["finish_reason"]))
        return said(chunks), reason, chunks[-1]["usage"]

    def greedy(self) -> str | None:
        prompt = self.draw.choice(GREEDY)
        found = self.ask({"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True})
        if found is None:
            return "queue full"
        assert found[:2] == (self.alone[prompt], "length"), (found, self.alone[prompt])
        assert found[2]["completion_tokens"] == 40
        return None

    def forced(self) -> str | None:
        text = self.draw.choice(TEXTS)
        found = self.ask({"prompt": "x", "max_tokens": 60, "response_format": exactly(text)})
        if found is None:
            return "queue full"
        assert found[:2] == (text, "stop"), found
        return None

    def stopped(self) -> str | None:
        text = self.draw.choice(TEXTS)
        at = self.draw.randrange(len(text) - 2)
        body = {"prompt": "x", "max_tokens": 60, "response_format": exactly(text), "stop": [text[at : at + 3]]}
        found = self.ask(body)
        if found is None:
            return "queue full"
        assert found[:2] == (text[: text.index(text[at : at + 3])], "stop"), found
        return None

    def schema(self) -> str | None:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        messages = [{"role": "user", "content": "x"}]
        seed = self.draw.randrange(10**6)
        found = self.ask({"messages": messages, "max_tokens": 120, "response_format": wanted, "seed": seed}, CHAT)
        if found is None:
            return "queue full"
        assert found[1] == "stop", found
        answer = json.loads(found[0])
        assert set(answer) == {"a", "b"}
        assert 0 <= answer["a"] <= 99
        return None

    def several(self) -> str | None:
        reply = call(self.port, PATH, {"prompt": "It was", "n": 3, "max_tokens": 15, "ignore_eos": True})
        if reply.status == 429:
            time.sleep(self.draw.uniform(0.05, 0.3))
            return "queue full"
        assert reply.status == 200, reply
        assert [choice["finish_reason"] for choice in reply.json["choices"]] == ["length"] * 3
        assert reply.json["usage"]["completion_tokens"] == 45
        return None

    def leaves(self) -> None:
        body = {"prompt": "word " * self.draw.randrange(1, 120), "max_tokens": 120, "n": self.draw.choice((1, 1, 2))}
        made = connect(self.port, PATH, {**body, "stream": self.draw.random() < 0.7, "ignore_eos": True})
        with contextlib.suppress(TimeoutError):
            made.settimeout(self.draw.uniform(0, 1.5) + 1e-3)
            for _ in range(self.draw.randrange(6)):
                if not made.recv(4096):
                    break
        drop(made) if self.draw.random() < 0.5 else made.close()

    def wrong(self) -> None:
        body, status = self.draw.choice((
            (b"{", 400), ({"prompt": "x" * 100_000}, 400), ({"prompt": "x", "temperature": -1}, 400),
            ({"prompt": "x", "model": "other"}, 404),
            ({"prompt": "x", "response_format": {"type": "regex", "regex": "("}}, 400),
        ))  # fmt: skip
        reply = call(self.port, PATH, body)
        assert reply.status in (status, 429), reply
        assert reply.error["message"]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(running: Running, clients: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Load a server; raises when a client was wronged or something was lost."""
    alone = {}
    for prompt in GREEDY:
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        alone[prompt] = running.call(PATH, body).json["choices"][0]["text"]
    start = time.monotonic()
    made = [Client(running.port, seed + i, start + seconds, alone) for i in range(clients)]
    for client in made:
        client.start()
    memory, slots, waiting = [], [], []
    while any(client.is_alive() for client in made):
        time.sleep(0.25)
        memory.append(resident())
        slots.append(running.engine.slots.used_slots)
        waiting.append(max(0, running.server.service.desk.outputs - slots[-1]))
        assert time.monotonic() < start + seconds + 120, "clients hang"
    took = time.monotonic() - start
    trouble = [one for client in made for one in client.trouble]
    assert not trouble, trouble
    states = running.engine.prefix.states.used_slots if running.engine.prefix is not None else 0
    running.wait_idle()
    stats = running.engine.stats
    quarter = max(1, len(memory) // 4)
    early, late = memory[quarter : 2 * quarter], memory[-quarter:]
    ended: Counter[str] = sum((client.done for client in made), Counter())
    return {
        "clients": clients,
        "slots": running.engine.plan.slots,
        "pages": running.engine.plan.pages,
        "seconds": took,
        "requests": dict(sorted(ended.items())),
        "requests_per_s": sum(ended.values()) / took,
        "outputs": dict(stats.finished),
        "generated_tokens": stats.generated_tokens,
        "tokens_per_s": stats.generated_tokens / took,
        "preemptions": stats.preemptions,
        "prefix_states_kept_at_the_end": states,
        "mean_slots_used": sum(slots) / len(slots),
        "mean_waiting": sum(waiting) / len(waiting),
        "slots_and_pages_lost": 0,  # or `wait_idle` had raised
        "memory_second_quarter_bytes": sum(early) / len(early) if early else None,
        "memory_last_quarter_bytes": sum(late) / len(late),
        "threads_at_the_end": threading.active_count(),
    }


@contextlib.contextmanager
def loaded_server(slots: int, pages: int):
    with with_pages(pages, states=40), contextlib.ExitStack() as stack:
        engine = {"max_requests": slots, "context": 512, "page_size": 16, "prefix_cache": True, "mode": "auto"}
        yield stack.enter_context(serving(shipped(), engine, max_queue=2 * slots))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--json")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with loaded_server(args.slots, 5 * args.slots // 2) as running:
        found = run(running, 4 * args.slots, args.seconds)
    print(json.dumps(found, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
