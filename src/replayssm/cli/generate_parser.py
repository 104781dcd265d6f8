"""Words and help of `replayssm generate`, beside what it shares with other commands."""

from __future__ import annotations

import argparse
from typing import Any

from replayssm.cli.speculation import DRAFTERS, HELP, SPEC_STATES

DEFAULT_MAX_TOKENS = 200

GENERATE_EXAMPLES = """\
The engine makes the text. Decoding is greedy unless --temperature, --top-k, --top-p or --min-p is given; the sampling
seed is then 0 unless --seed says otherwise. The prompt is continued as plain text: no chat template is applied.

After the text the same prompt is decoded again, by packed decode in the engine and by generate() of stock transformers
with the same seed. The tokens must be equal; a first difference within the numerical noise of the model counts as a
near-tie and is named.

With --spec a step verifies several drafted tokens, and the text is the same: it is decoded once more without drafts,
which says how much faster it was. Without --ring-len the ring is long enough for the windows.

With --jsonl each line is an object with "prompt", a text or token ids, and any fields of SamplingParams, as in
{"id": 7, "prompt": "Once", "max_tokens": 20, "temperature": 0.8, "n": 2, "stop": ["."]}. Sampling options of the
command line hold for lines that do not say otherwise; where no seed is named, prompt i (from 0) has --seed plus i.
Other keys come back in the result. Results are lines of JSON in the order of the prompts, each written as soon as those
before it are: "line" (from 1), "prompt_tokens", "text", "token_ids", "finish_reason", "logprobs" if asked for, "ttft"
and "seconds" (since the start, to the first and the last token), "drafted" and "drafts_kept" (by --spec),
"cached_tokens", with n > 1 a list "outputs"; or "error", which stops no other line. Replay or packed decode is taken by
the number of requests, and there is no second decode.

examples:
  replayssm generate gdn --prompt "In the beginning" --max-tokens 100
  replayssm generate gdn --temperature 0.8 --top-p 0.95 --seed 7
  cat letter.txt | replayssm generate gdn --prompt-file - --quiet
  replayssm generate gdn --state-dtype fp16 --ring-len 32
  replayssm generate gdn --spec mtp
  replayssm generate gdn --spec ngram --spec-tokens 8 --no-spec-adaptive --prompt "To be, or not to be, to be"
  replayssm generate gdn --json --quiet | python3 -m json.tool
  replayssm generate gdn --jsonl prompts.jsonl --out results.jsonl --temperature 0.8 --stop "Chapter"

exit code: 0 equal or near-tie (or --no-check), 1 tokens differ or a line failed, 2 wrong input
"""


def add_prompts(group: Any) -> None:
    """Beside `--prompt` and `--prompt-file`."""
    group.add_argument("--jsonl", metavar="FILE", help="many prompts, an object a line; '-' is standard input")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, and when the text ends."""
    parser.add_argument("--out", metavar="FILE", help="results of --jsonl (default: standard output)")
    length = parser.add_argument_group("length")
    length.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default %(default)s")
    length.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    length.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--greedy", action="store_true", help="take the likeliest token (the default)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="> 0; 0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest of total mass P")
    sampling.add_argument("--min-p", type=float, metavar="P", help="leave out what is below P times the likeliest")
    sampling.add_argument("--repetition-penalty", type=float, metavar="R", help="> 1 disfavours tokens of the text")
    sampling.add_argument("--presence-penalty", type=float, metavar="R", help="off the logits of generated tokens")
    sampling.add_argument("--frequency-penalty", type=float, metavar="R", help="the same for each time")
    sampling.add_argument("--seed", type=int, metavar="N", help="of the sampling, >= 0 (default 0)")
    sampling.add_argument("--n", type=int, metavar="N", help="outputs of each prompt of --jsonl (default 1)")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="of the tokens and the N likeliest, with --json(l)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """How the engine is set up."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--memory", metavar="SIZE", help="as in 8GB or 8GiB (default: 0.9 of the GPU's; 4 GiB beside a CPU's weights)"
    )
    engine.add_argument(
        "--max-requests", type=int, metavar="N", help="of --jsonl at once (default: what fits, 256; on a CPU 32)"
    )
    engine.add_argument(
        "--chunk-tokens", type=int, default=2048, metavar="N", help="of prompts in a step (default %(default)s)"
    )
    engine.add_argument("--context", type=int, metavar="N", help="longest prompt with answer (default: the model's)")
    engine.add_argument(
        "--prefix-cache", action="store_true", help="compute what prompts of --jsonl begin with alike only once"
    )
    engine.add_argument("--spec", choices=DRAFTERS, help=HELP["spec"])
    engine.add_argument("--spec-tokens", type=int, metavar="N", help=HELP["spec_tokens"])
    engine.add_argument("--spec-state", choices=SPEC_STATES, help=HELP["spec_state"])
    engine.add_argument("--spec-adaptive", action=argparse.BooleanOptionalAction, help=HELP["spec_adaptive"])
    engine.add_argument("--no-replay", action="store_true", help="packed decode: read and write the state every step")


def add_switches(parser: argparse.ArgumentParser) -> None:
    """What is shown and checked."""
    parser.add_argument("--no-check", action="store_true", help="do not decode again for comparison")
    parser.add_argument("--quiet", action="store_true", help="the text only: no prompt, progress or summary")
