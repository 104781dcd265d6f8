"""Print the tables of docs/benchmarks, of README.md, serving/README.md and prefix/README.md, from the JSON files.

python scripts/benchmark_tables.py            all tables
python scripts/benchmark_tables.py FOLDER     those of another folder of `replayssm bench decode --json` files
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


def decode_table(result: dict[str, Any]) -> str:
    """One row per state dtype and batch size: the best packed kernel, ours, replay, and how near to the roof."""
    heads = ("state", "batch", "best packed kernel", "µs", "our packed µs", "replay µs", "× best packed")
    heads += ("mode auto × our packed", "of the read ceiling", "check: output, state")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for key in dict.fromkeys((row["state_dtype"], row["batch"]) for row in result["rows"]):
        rows = [r for r in result["rows"] if (r["state_dtype"], r["batch"]) == key and r["status"] == "ok"]
        packed = [r for r in rows if r["route"] == "packed"]
        own = {r["kernel"]: r for r in rows if not r["peer"]}
        if not packed or set(own) != {"packed", "replay"}:
            continue
        best, replay = min(packed, key=lambda r: r["us"]), own["replay"]
        name = "ours" if not best["peer"] else best["kernel"]
        cells = [key[0], str(key[1]), name, f"{best['us']:.1f}", f"{own['packed']['us']:.1f}", f"{replay['us']:.1f}"]
        cells += [f"{best['us'] / replay['us']:.2f}", f"{replay['auto_vs_packed']:.2f} ({replay['auto_route']})"]
        cells.append(f"{replay['of_ceiling']:.2f}")
        cells.append(f"{replay['check']['output']:.1e}, {replay['check']['state']:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def peer_table(result: dict[str, Any]) -> str:
    """µs of every kernel of other packages, by state dtype and batch size."""
    peers = list(dict.fromkeys(row["kernel"] for row in result["rows"] if row["peer"]))
    lines = ["| state | batch | " + " | ".join(peers) + " |", "|" + "---|" * (2 + len(peers))]
    for key in dict.fromkeys((row["state_dtype"], row["batch"]) for row in result["rows"]):
        found = {r["kernel"]: r for r in result["rows"] if (r["state_dtype"], r["batch"]) == key and r["peer"]}
        cells = [f"{found[p]['us']:.1f}" if p in found and found[p]["status"] == "ok" else "–" for p in peers]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {key[0]} | {key[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def geometry_table(results: list[dict[str, Any]]) -> str:
    """Our packed over our replay, and what mode auto makes of it, for each geometry, state dtype and batch size."""
    batches = sorted({row["batch"] for result in results for row in result["rows"]})
    lines = ["| layer | heads | K, V | state | " + " | ".join(f"B = {b}" for b in batches) + " |"]
    lines.append("|" + "---|" * (4 + len(batches)))
    for result in results:
        layer = result["layer"]
        replay = {(r["state_dtype"], r["batch"]): r for r in result["rows"] if r["kernel"] == "replay"}
        for dtype in dict.fromkeys(key[0] for key in replay):
            cells = []
            for batch in batches:
                row = replay.get((dtype, batch))
                if row is None or row["status"] != "ok":
                    cells.append("–")
                else:
                    cells.append(f"{row['vs_packed']:.2f} ({row['auto_vs_packed']:.2f})")
            shape = f"{layer['num_k_heads']}/{layer['num_v_heads']} | {layer['head_k_dim']}, {layer['head_v_dim']}"
            lines.append(f"| {result['name']} | {shape} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def serving_table(result: dict[str, Any]) -> str:
    """One row per batch size: tokens a second and time per token of mode auto and of packed decode."""
    heads = ("batch", "packed tokens/s", "auto tokens/s", "ratio", "route", "packed ms", "auto ms (p99)", "GPU busy")
    lines = ["| " + " | ".join((*heads, "tokens against packed")) + " |", "|" + "---|" * (len(heads) + 1)]
    rows = {(row["batch"], row["mode"]): row for row in result["rows"] if row["status"] == "ok"}
    for batch in dict.fromkeys(batch for batch, _ in rows):
        packed, auto = rows[batch, "packed"], rows[batch, "auto"]
        cells = [str(batch), f"{packed['decode_tokens_per_s']:.0f}", f"{auto['decode_tokens_per_s']:.0f}"]
        cells += [f"{auto['vs_packed']:.2f}", auto["route"], f"{packed['tpot_ms']['mean']:.2f}"]
        cells += [f"{auto['tpot_ms']['mean']:.2f} ({auto['tpot_ms']['p99']:.2f})", f"{auto['gpu_busy']:.0%}"]
        check = auto["check"]
        same = "equal" if check["position"] is None else f"near-tie at {check['position']}, gap {check['gap']:.2g}"
        lines.append("| " + " | ".join((*cells, same)) + " |")
    return "\n".join(lines)


def prefix_table(result: dict[str, Any]) -> str:
    """One row per case: time to the first token without a cache and with one, and what it took over, for each mode."""
    modes = list(dict.fromkeys(row["mode"] for row in result["rows"]))
    heads = [f"{mode} {name}" for mode in modes for name in ("cold ms", "warm ms", "ratio", "tokens reused")]
    lines = ["| part | case | prompt | " + " | ".join(heads) + " |", "|" + "---|" * (3 + len(heads))]
    rows = {(row["part"], row["case"], row["mode"]): row for row in result["rows"] if row["status"] == "ok"}
    for part, case in dict.fromkeys((part, case) for part, case, _ in rows):
        mine = [rows[part, case, mode] for mode in modes]
        cells = [part, case, str(mine[0]["prompt_tokens"])]
        for row in mine:
            cells += [f"{row['cold_ms']['median']:.0f}", f"{row['warm_ms']['median']:.0f}", f"{row['ratio']:.2f}"]
            cells.append(f"{sum(row['cached_tokens']) / row['requests']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tree_table(result: dict[str, Any]) -> str:
    """One row per page size: µs in the tree of prefixes, mean and p99."""
    lines = ["| page size | look-up µs (p99) | entry µs (p99) | entry of all pages µs | room for a page µs |"]
    lines.append("|---|---|---|---|---|")
    for row in result["tree"]:
        cells = [str(row["page_size"])]
        cells += [f"{row[name]['mean']:.0f} ({row[name]['p99']:.0f})" for name in ("match_us", "insert_us")]
        cells += [f"{row[name]['mean']:.0f}" for name in ("fresh_us", "evict_us")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(folder: Path = FOLDER) -> dict[str, str]:
    """Title -> markdown."""
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    found: dict[str, str] = {}
    for stem in [name for name in read if name.startswith("decode-")]:
        found[stem] = decode_table(read[stem])
        found[f"{stem}, others"] = peer_table(read[stem])
    geometries = [read[name] for name in read if name.startswith("geometry-")]
    if geometries:
        found["geometries"] = geometry_table(geometries)
    for path in sorted((folder / "serving").glob("throughput-*.json")):
        found[f"serving, {path.stem}"] = serving_table(json.loads(path.read_text(encoding="utf-8")))
    for path in sorted((folder / "prefix").glob("prefix-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found[f"prefix, {path.stem}"] = prefix_table(result)
        if result["tree"]:
            found[f"prefix, {path.stem}, tree"] = tree_table(result)
    return found


if __name__ == "__main__":
    for title, text in tables(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER).items():
        print(f"{title}\n\n{text}\n")
