"""`bench serve` against the real server."""

from __future__ import annotations

import json

from replayssm.cli import main
from tests.server.common import serving, shipped


def test_it_measures_this_server(tmp_path, capsys):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    with serving(shipped(), {"max_requests": 4, "context": 512}, api_key="k") as running:
        for endpoint in ("completions", "chat"):
            code = main([
                "bench", "serve", "--url", running.url, "--concurrency", "1,4", "--requests", "8", "--output-tokens",
                "12", "--prompt-words", "20", "--ignore-eos", "--json", str(out), "--plot", str(plot), "--endpoint",
                endpoint, "--warm-up", "1", "--api-key", "k",
            ])  # fmt: skip
            assert code == 0, capsys.readouterr()
            found = json.loads(out.read_text())
            assert found["model"] == "tiny"
            for row in found["rows"]:
                assert (row["completed"], row["output_tokens"], row["counted"]) == (8, 96, "usage")
                assert 0 < row["ttft_ms"]["median"] <= row["e2el_ms"]["median"]
                assert row["tpot_ms"]["mean"] > 0
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert running.engine.stats.generated_tokens == 2 * 2 * 9 * 12
        assert main(["bench", "serve", "--url", running.url, "--api-key", "wrong", "--requests", "1"]) == 2
        running.wait_idle()
