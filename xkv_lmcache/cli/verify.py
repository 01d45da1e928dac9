"""`xkv verify`: whether answers change because of the cache, on one's own deployment."""

from __future__ import annotations

import json
import random
import re
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from xkv_lmcache.cli.complaint import fail, reason
from xkv_lmcache.cli.exit_codes import ExitCode

TIMEOUT_S: Final = 600.0

SETTLE_S: Final = 120.0
"""Longest wait for LMCache's stores to be answered before its memory is emptied."""

CONTROLS: Final = 4
"""Answers without the cache at most, where the first two agree and the one with the cache does not."""

WORDS: Final = (
    "the river carries small boats past old towns where people mend nets and count the days until rain comes "
    "back to hills that were green once and will be green again when spring brings its light"
)

_EXTERNAL_HITS: Final = re.compile(
    r"^vllm:external_prefix_cache_hits_total(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE
)


@dataclass(frozen=True)
class Answer:
    """What the engine generated, and how many of the prompt's tokens it says it took from a cache (None: not said)."""

    tokens: tuple[object, ...]
    cached: int | None


@dataclass
class Outcome:
    """One prompt's answers: without the cache, and with it."""

    prompt: str
    controls: list[Answer]
    cached: Answer

    @property
    def verdict(self) -> str:
        """`same`; or what makes the answers differ: `cache` or `engine`; or `missed`: no cache answered, nothing is shown.

        Where vLLM does not say what it took from a cache, every answer of the last pass counts as one from the cache.
        """
        without = [answer.tokens for answer in self.controls]
        if self.cached.cached == 0:
            return "missed" if {*without, self.cached.tokens} == {without[0]} else "engine"
        if len(set(without)) > 1:
            return "engine"
        return "same" if self.cached.tokens == without[0] else "cache"


class Engine:
    """A vLLM server's completions."""

    def __init__(self, url: str, model: str | None, max_tokens: int, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._max_tokens = max_tokens
        self.model = model or str(self._json("/v1/models")["data"][0]["id"])

    def answer(self, prompt: str, salt: str | None = None) -> Answer:
        """The greedy completion; with a `salt`, no cache knows the prompt."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        found = self._json("/v1/completions", body)
        choice = found["choices"][0]
        tokens = tuple(choice.get("token_ids") or (choice["text"],))
        details = (found.get("usage") or {}).get("prompt_tokens_details") or {}
        return Answer(tokens, details.get("cached_tokens"))

    def external_hits(self) -> float | None:
        """Tokens taken from LMCache so far, by vLLM's own counter; None where it is not shown."""
        try:
            with self._open("/metrics") as answer:
                found = _EXTERNAL_HITS.findall(answer.read().decode())
        except OSError:
            return None
        return sum(map(float, found)) if found else None

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._open(path, body) as answer:
            return json.load(answer)

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return _open(self.url + path, data, self._headers)


def _open(url: str, data: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})) -> Any:
    """What answers at `url`: GET, or POST with `data`. OSError with the URL when it cannot be reached or refuses."""
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, dict(headers)), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:300]
        raise OSError(f"{url} answers {error.code}: {text}") from None
    except urllib.error.URLError as error:
        raise OSError(f"{url} cannot be reached: {error.reason}") from None


@click.command()
@click.option(
    "--url", metavar="URL", default="http://127.0.0.1:8000", show_default=True, help="vLLM's server."
)
@click.option(
    "--model", metavar="NAME", help="As the server calls it; the first that it serves if not given."
)
@click.option("--prompts", "file", metavar="FILE", help="One prompt a line; made on the spot if not given.")
@click.option(
    "--count", metavar="N", default=50, show_default=True, help="Prompts to make, or to take of the file."
)
@click.option("--words", metavar="N", default=600, show_default=True, help="Of each prompt that is made.")
@click.option("--max-tokens", metavar="N", default=64, show_default=True, help="Tokens to generate.")
@click.option("--key-file", metavar="FILE", help="File with the server's API key.")
@click.option(
    "--clear-l1",
    metavar="URL",
    help="LMCache server's HTTP front end: its memory is emptied before the second pass, so that hits come from the "
    "second tier. Not on a server in use: 0.5.4 empties what others are reading, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verify(
    url: str,
    model: str | None,
    file: str | None,
    count: int,
    words: int,
    max_tokens: int,
    key_file: str | None,
    clear_l1: str | None,
    as_json: bool,
) -> None:
    """Compare greedy answers with the cache to answers without it, on a running vLLM.

    Each prompt is answered twice under a salt of its own (vLLM's cache_salt), which no cache knows, once plainly, which
    fills the cache, and once more plainly, from the cache; one at a time. Where the two without the cache differ, it is
    the engine itself that is not deterministic. Prompts must be longer than LMCache's chunk. The salted answers are
    stored, too, and never found again. Exit code 0: no answer changed because of the cache, and the cache was used; 1:
    one did, or nothing is proven; 2: wrong usage.
    """
    if count < 1 or words < 1 or max_tokens < 1:
        raise click.BadParameter("must be above 0", param_hint="--count, --words, --max-tokens")
    try:
        prompts = _read(file)[:count] if file is not None else list(_make(count, words))
        key = Path(key_file).read_text().strip() if key_file is not None else None
    except OSError as error:
        fail(f"{error.filename}: {reason(error)}", ExitCode.USAGE)
    if not prompts:
        fail(f"{file}: holds no prompt; write one a line", ExitCode.USAGE)
    try:
        engine = Engine(url, model, max_tokens, key)
        report = _report(engine, _compare(engine, prompts, clear_l1))
    except (OSError, ValueError) as error:
        fail(reason(error))
    except (LookupError, TypeError) as error:
        fail(f"{url} is no vLLM, or {clear_l1} no LMCache server: an answer has no {error}")
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if as_json else _text(report))
    proven = report["used"] and not report["controls_from_a_cache"]
    sys.exit(ExitCode.OK if proven and not report["because_of_the_cache"] else ExitCode.FAILED)


def _read(path: str) -> list[str]:
    return [line for line in Path(path).read_text().splitlines() if line.strip()]


def _make(count: int, words: int) -> Iterator[str]:
    """Prompts that differ from their first word on, and from those of every other run."""
    source = random.Random(secrets.randbits(64))
    for number in range(count):
        yield " ".join([f"{source.randrange(10**6)} {number}:", *source.choices(WORDS.split(), k=words)])


@dataclass
class Findings:
    """What the passes gave. The counts are vLLM's of tokens taken from LMCache; None where it does not show them."""

    outcomes: list[Outcome]
    tokens_from_lmcache: float | None
    """In the pass with the cache."""
    control_tokens_from_lmcache: float | None
    """While answers without the cache were asked for: above 0, they were not without, or others use the server."""


def _compare(engine: Engine, prompts: Sequence[str], clear_l1: str | None) -> Findings:
    """Every prompt's answers."""
    taken: float | None = 0.0

    def control(prompt: str) -> Answer:
        nonlocal taken
        before = engine.external_hits()
        answer = engine.answer(prompt, salt=secrets.token_hex(16))
        grown = _difference(before, engine.external_hits())
        taken = None if taken is None or grown is None else taken + grown
        return answer

    controls = []
    with click.progressbar(prompts, label="without the cache, and filling it", file=sys.stderr) as shown:
        for prompt in shown:
            first = control(prompt)
            engine.answer(prompt)
            controls.append([first, control(prompt)])
    if clear_l1 is not None:
        _clear_l1(clear_l1.rstrip("/"))
    before = engine.external_hits()
    outcomes = []
    with click.progressbar(
        list(zip(prompts, controls, strict=True)), label="with the cache", file=sys.stderr
    ) as pairs:
        for prompt, answers in pairs:
            outcomes.append(Outcome(prompt, answers, engine.answer(prompt)))
    hits = _difference(before, engine.external_hits())
    for outcome in outcomes:
        # Rare nondeterminism of the engine is not to be taken for the cache's.
        while outcome.verdict == "cache" and len(outcome.controls) < CONTROLS:
            outcome.controls.append(control(outcome.prompt))
    return Findings(outcomes, hits, taken)


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _clear_l1(url: str) -> None:
    """Empties the memory of the LMCache server at `url`, once its second tier has answered every store."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        with _open(f"{url}/status") as answer:
            manager = json.load(answer)["storage_manager"]
        stores, memory = manager["store_controller"], manager["l1_manager"]
        if not any(
            (
                stores["pending_keys_count"],
                stores["in_flight_task_count"],
                memory["write_locked_count"],
                memory["read_locked_count"],
            )
        ):
            break
        if time.monotonic() > deadline:
            raise ValueError(f"{url}: LMCache still stores after {SETTLE_S:g} s; try again on an idle server")
        time.sleep(0.2)
    with _open(f"{url}/cache/clear", b""):
        pass


def _report(engine: Engine, findings: Findings) -> dict[str, Any]:
    outcomes, hits = findings.outcomes, findings.tokens_from_lmcache

    def those(verdict: str) -> list[Outcome]:
        return [outcome for outcome in outcomes if outcome.verdict == verdict]

    def first_difference(outcome: Outcome) -> int:
        pairs = zip(outcome.controls[0].tokens, outcome.cached.tokens, strict=False)
        return next((index for index, (one, other) in enumerate(pairs) if one != other), 0)

    cached = sum(1 for outcome in outcomes if outcome.cached.cached)
    every_answer = [answer for outcome in outcomes for answer in outcome.controls]
    if any(answer.cached is None for answer in every_answer):
        mixed = bool(findings.control_tokens_from_lmcache)
    else:
        mixed = any(answer.cached for answer in every_answer)
    return {
        "model": engine.model,
        "prompts": len(outcomes),
        "same": len(those("same")),
        "because_of_the_cache": len(those("cache")),
        "because_of_the_engine": len(those("engine")),
        "missed": len(those("missed")),
        "prompts_from_a_cache": cached,
        "tokens_from_lmcache": hits,
        "used": bool(cached or hits),
        "controls_from_a_cache": mixed,
        "differences": [
            {"prompt": outcome.prompt[:80], "first_different_token": first_difference(outcome)}
            for outcome in those("cache")
        ],
    }


def _text(report: dict[str, Any]) -> str:
    hits = report["tokens_from_lmcache"]
    lines = [
        f"{report['prompts']} prompts on {report['model']}",
        f"{report['same']} answers are the same with and without the cache",
        f"{report['because_of_the_engine']} differ without any cache: the engine is not deterministic there",
        f"{report['because_of_the_cache']} differ because of the cache",
        (
            f"tokens taken from LMCache: {'vLLM does not say' if hits is None else f'{hits:.0f}'}; "
            f"prompts answered from a cache: {report['prompts_from_a_cache']}"
        ),
    ]
    for each in report["differences"]:
        lines.append(f"  token {each['first_different_token']} of {each['prompt']!r}...")
    if report["missed"]:
        lines.append(
            f"{report['missed']} were not answered from a cache the second time: nothing is shown by them"
        )
    if report["controls_from_a_cache"]:
        lines.append(
            "NOT PROVEN: answers that were to be without the cache took tokens from it; ask an idle server, whose "
            "caches heed cache_salt"
        )
    if not report["used"]:
        lines.append(
            "NOT PROVEN: no hit was seen; use longer prompts, or start vLLM with --enable-prompt-tokens-details"
        )
    return "\n".join(lines)
