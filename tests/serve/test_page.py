"""The page at /: it shows what the server reports, in a real browser, even if the server fails."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import eagle_mlx as em
from eagle_mlx.plan import RoundResult
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.models import Models
from eagle_mlx.serve.api.routes import HEADERS, PAGE
from eagle_mlx.serve.api.service import ModelSource
from eagle_mlx.serve.decoding_options import renderer
from tests.full import FULL, in_full
from tests.serve.api.given import given_head, given_target
from tests.serve.api.live import DEPTH, NAME, Live, engine, live, wide
from tests.serve.browser import Page, browser, chromium
from tests.vision_targets import picture, vision_folder

browsing = pytest.mark.skipif(chromium() is None, reason="no Chromium; on Debian: apt-get install chromium")
NOTHING = "\u2013"
"""Shown in place of a missing number."""
GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)
HASTE = """{
  const wait = setTimeout, now = performance.now.bind(performance);
  setTimeout = (next, ms) => wait(next, ms / 10);
  performance.now = () => 10 * now();
}"""
"""Makes ten seconds of the page's own clock pass in one."""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=HASTE)
        yield page


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    """Fail tests in which the page raised an error, broke its own policy, or contacted another host."""
    window.events.clear()
    yield window
    window.js("1")  # reads everything sent so far
    origin = window.js("location.origin")
    for event in window.events:
        detail = event["params"]
        assert event["method"] != "Runtime.exceptionThrown", detail
        if event["method"] == "Network.requestWillBeSent":
            assert detail["request"]["url"].startswith((origin, "data:")), detail["request"]["url"]
        if event["method"] == "Log.entryAdded":
            assert detail["entry"]["source"] == "network", detail["entry"]
    window.goto("about:blank")


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    """An idle server after answers, drafts, refusals and disconnected clients."""
    with live(lambda: Loaded(engine("eagle", prefix_cache_bytes=1 << 24), "eagle", DEPTH, {"temperature": 0.0})) as it:
        for prompt in ("def f(x):" * 8, "def f(x):" * 8, "class A:"):
            it.openai.completions.create(model=NAME, prompt=prompt, max_tokens=24)
        assert it.http.post("/v1/completions", json={"prompt": "x" * 4000}).status_code == 400
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        with it.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_raw())
        it.until(lambda: it.idle)
        yield it


class Numbers:
    """The numbers of /metrics, read by Prometheus' own parser."""

    def __init__(self, text: str):
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self._values = {
            (sample.name, *(value for label, value in sample.labels.items() if label != "model_name")): sample.value
            for sample in samples
        }

    def __getitem__(self, name: str | tuple[str, ...]) -> float:
        return self._values[name if isinstance(name, tuple) else (name,)]

    def by_label(self, name: str) -> dict[str, float]:
        return {key[1]: value for key, value in self._values.items() if key[0] == name and len(key) == 2}


def items(page: Page, name: str) -> dict[str, str]:
    """Return a list of the page: the left and right text of each line."""
    lines: dict[str, str] = page.js(
        f"Object.fromEntries([...document.querySelectorAll('#{name} li')]"
        ".map(li => [li.firstChild.innerText, li.lastChild.innerText]))"
    )
    return lines


def percent(share: float) -> str:
    return f"{int(100 * share + 0.5)}\u202f%"


def test_the_page_has_a_policy_that_allows_only_this_server(shared: Live) -> None:
    answer = shared.http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert set(re.findall(r"https?://[^'\"\s]+", answer.text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\son\w+=|\sstyle=|innerHTML|eval\(", answer.text)
    assert len(answer.content) < 32_000
    head = shared.http.head("/")
    assert (head.status_code, head.content) == (200, b"")


def test_the_page_needs_no_key_and_shows_nothing_that_needs_one() -> None:
    with live(settings=wide(api_key="secret")) as running:
        answer = running.http.get("/", headers={"Authorization": ""})
        assert answer.status_code == 200
        assert "secret" not in answer.text


@browsing
def test_the_page_shows_the_numbers_of_the_metrics(page: Page, shared: Live) -> None:
    page.open(shared.base + "/")
    page.until("document.querySelector('#model').innerText === 'tiny' && document.querySelector('#positions .bar')")
    numbers = Numbers(shared.http.get("/metrics").text)
    forwards, tokens = numbers["eagle:row_rounds_total"], numbers["eagle:generation_tokens_total"]
    assert page.text("#state") == "ready"
    assert page.text("#notice") == ""
    assert page.text("#rows") == "0"
    assert page.text("#rows-max") == "of 4"
    assert page.text("#queue") == "0"
    kept, most = numbers["eagle:kv_bytes"] + numbers["eagle:prefix_cache_bytes"], numbers["eagle:kv_bytes_max"]
    assert kept > 0
    whole = f"{most / 1e9:.{2 if most < 1e10 else 0}f}"
    assert page.text("#kv") == f"KV cache {kept / 1e9:.2f} of {whole} GB"
    assert page.text("#tau") == f"{tokens / forwards:.2f}"
    assert page.text("#span") == f"{tokens:,.0f} tokens in {numbers['eagle:rounds_total']:,.0f} rounds"
    drafts = numbers["vllm:spec_decode_num_drafts_total"]
    accepted = numbers.by_label("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert drafts > 0
    assert items(page, "positions") == {
        f"token {int(position) + 1}": percent(count / drafts) for position, count in accepted.items()
    }
    assert len(accepted) == DEPTH
    depths = numbers.by_label("eagle:rounds_by_depth_total")
    named = {"0": "no draft", "1": "1 token"}
    assert items(page, "depths") == {
        named.get(depth, f"{depth} tokens"): percent(count / sum(depths.values())) for depth, count in depths.items()
    }
    assert page.text("#depth") == f"{numbers['eagle:depth']:.0f}"
    assert len(depths) > 1
    requests = items(page, "requests")
    outcomes = {name: int(requests[name]) for name in ("finished", "cancelled", "failed", "refused")}
    assert numbers.by_label("eagle:requests_total") == {name: n for name, n in outcomes.items() if n}
    assert outcomes["finished"] >= 3
    assert (outcomes["cancelled"], outcomes["failed"], outcomes["refused"]) == (1, 0, 1)
    assert page.js("document.querySelector('#choice').hidden")  # with one model there is no choice
    cached = numbers["eagle:cached_prompt_tokens_total"] / numbers["eagle:prompt_tokens_total"]
    assert cached > 0
    assert requests["from prefix cache"] == percent(cached)
    assert f"drafts by head, up to {DEPTH} tokens a round" in page.text("#about")
    assert "context of 512 tokens" in page.text("#about")
    assert re.fullmatch(r"[\d.]+ m?s", page.text("#first"))
    assert not page.text("#key-form")


@browsing
def test_the_page_updates_while_the_server_decodes(page: Page, shared: Live) -> None:
    page.open(shared.base + "/")
    page.until("document.querySelector('#positions .bar')")
    assert page.text("#speed") == "0"
    page.js("document.querySelector('[value=minute]').click()")
    assert page.text("#tau") == NOTHING  # nothing yet in the minute that the page covers
    before = int(items(page, "requests")["finished"])
    assert before == 0
    page.js(
        "new MutationObserver(([{target}]) => { window.moved ||= Number(target.textContent) > 0; })"
        ".observe(document.querySelector('#speed'), {childList: true})"
    )
    shared.openai.completions.create(model=NAME, prompt="x = 1", max_tokens=60)
    page.until("window.moved")
    page.until("document.querySelector('#span').innerText.startsWith('60 tokens in ')")  # or after a second poll
    page.until("[...document.querySelectorAll('#requests li')].some(li => li.innerText.match(/finished\\s*1$/))")
    assert page.text("#most").startswith("most ")
    page.until("document.querySelector('#speed').innerText === '0'")  # three seconds later


@browsing
def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(page: Page) -> None:
    with live(settings=wide(api_key="secret")) as running:
        page.open(running.base + "/")
        page.until("!document.querySelector('#key-form').hidden")
        assert page.text("#state") == "ready"  # the numbers need no key
        assert page.text("#model") == "eagle-serve"
        assert page.text("#key-form label") == "API key"
        for wrong in ("guess", "schlüssel", ""):
            enter(page, wrong)
            page.until("document.querySelector('#key-note').innerText === 'That key was refused.'")
            page.until("!document.querySelector('#key-form').hidden && !sessionStorage.length")
        enter(page, "secret")
        page.until("document.querySelector('#model').innerText === 'tiny'")
        assert page.text("#key-form") == ""
        assert page.js("document.querySelector('#key').value + localStorage.length + document.cookie") == "0"
        page.goto(running.base + "/")
        page.until("document.querySelector('#model').innerText === 'tiny'")


@browsing
def test_the_page_has_a_box_that_colors_accepted_draft_tokens(page: Page) -> None:
    prompt = "def f(x):"
    with live(lambda: Loaded(engine(context=64), "ngram", DEPTH, {"temperature": 0.0})) as running:
        reference = engine(context=64)
        chunks = list(reference.stream([{"role": "user", "content": prompt}], em.SamplingParams(max_tokens=512)))
        whole = chunks[-1].output
        assert whole is not None
        assert 0 < whole.accepted < len(whole.tokens)
        page.open(running.base + "/")
        page.until("document.querySelector('#model').innerText === 'tiny'")
        assert "colored" in page.text("#answer-note")
        page.js(f"document.querySelector('#prompt').value = {prompt!r}")
        page.js("document.querySelector('#send').click()")
        page.until("document.querySelector('#answer-note').innerText.includes('tokens/s')")
        assert page.js("document.querySelector('#answer').textContent") == whole.text
        drafted = "[...document.querySelectorAll('#answer .drafted')].map(each => each.textContent).join('')"
        colored = renderer(reference.target.tokenizer, (), color=True)
        assert page.js(drafted) == "".join(GREEN.findall("".join(map(colored, chunks))))
        assert f"{whole.accepted} of {len(whole.tokens)} tokens were accepted drafts" in page.text("#answer-note")
        assert page.text("#answer-note").startswith(f"τ {whole.acceptance_length:.2f}, ")
        assert page.text("#send") == "Send"
        with running.slowed():
            page.js("document.querySelector('#send').click()")
            page.until("document.querySelector('#send').innerText === 'Stop'")
            page.js("document.querySelector('#send').click()")
            page.until("document.querySelector('#answer-note').innerText === 'stopped'")
        page.js("document.querySelector('#prompt').value = 'x '.repeat(4000)")
        page.js("document.querySelector('#send').click()")
        page.until("document.querySelector('#answer-note').innerText.startsWith('No answer: ')")
        assert page.js(COLOR) == BAD
        page.js("document.querySelector('#prompt').value = ' '")
        page.js("document.querySelector('#send').click()")
        assert page.text("#answer-note") == "Type a message first."
        assert page.js("document.activeElement.id") == "prompt"
        assert page.js(COLOR) != BAD


TAKE = """(name => {
  const bytes = Uint8Array.from(atob('%s'), c => c.charCodeAt(0)), data = new DataTransfer();
  data.items.add(new File([bytes], 'shot.png', { type: 'image/png' }));
  const event = name === 'paste' ? new ClipboardEvent(name, { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(name, { dataTransfer: data, bubbles: true, cancelable: true });
  return document.querySelector('#prompt').dispatchEvent(event);
})"""


@browsing
def test_images_that_are_pasted_or_dropped_go_with_the_next_message(page: Page, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    folder = vision_folder(tmp_path / "mistral3", "mistral3")
    shots = [picture(seed, 48, 64) for seed in (1, 2)]
    send = "document.querySelector('#prompt').value = 'what is this?'; document.querySelector('#send').click()"

    def answered() -> str:
        page.js(send)
        page.until("document.querySelector('#answer-note').innerText.includes('tokens/s')")
        return str(page.js("document.querySelector('#answer').textContent"))

    def engine() -> em.Engine:
        target = em.load_target(folder)
        target.context_length = 80  # ends answers
        return em.Engine(target)

    with live(lambda: Loaded(engine(), "none", 0, {"temperature": 0.0})) as running:
        page.open(running.base + "/")
        for count, (event, shot) in enumerate(zip(("paste", "drop"), shots, strict=True), 1):
            taken = TAKE % base64.b64encode(shot).decode()
            assert page.js(f"{taken}('{event}')") is False, "the browser does nothing else with it"
            page.until(f"document.querySelector('#answer-note').innerText === 'Images with the next message: {count}'")
        seen, blind = answered(), answered()
        parts = [{"type": "image", "image": shot} for shot in shots]
        ask = {"role": "user", "content": [*parts, {"type": "text", "text": "what is this?"}]}
        reference = engine().generate([ask], em.SamplingParams(max_tokens=80))
        assert seen == reference.text != blind
        page.js(
            "document.querySelector('#prompt').dispatchEvent(new ClipboardEvent('paste', "
            "{ clipboardData: new DataTransfer() }))"
        )
        assert answered() == blind, "a pasted text is no image"


COLOR = "getComputedStyle(document.querySelector('#answer-note')).color"
BAD = "rgb(176, 42, 42)"


@browsing
def test_the_page_says_in_red_that_a_server_does_not_answer(page: Page) -> None:
    with canned() as it:
        it.metrics("eagle:rounds_total 1\n")
        page.open(it.base + "/")
        page.until("document.querySelector('#state').innerText === 'ready'")
    page.js("document.querySelector('#prompt').value = 'x'")
    page.js("document.querySelector('#send').click()")
    page.until("document.querySelector('#answer-note').innerText === 'No answer: The server does not answer.'")
    assert page.js(COLOR) == BAD
    page.until("document.querySelector('#state').innerText === 'unreachable'")
    assert page.text("#notice").endswith(". The server does not answer.")
    assert page.js("getComputedStyle(document.querySelector('#try')).filter") == "none"


@browsing
def test_depths_without_drafts_are_explained(page: Page) -> None:
    """A policy may plan drafts for text in which n-grams find nothing."""
    with canned() as it:
        it.metrics("eagle:rounds_total 1\n")
        page.open(it.base + "/")
        page.until("document.querySelector('#positions').innerText === 'nothing drafted yet'")
        it.metrics(
            'eagle:rounds_total 9\neagle:rounds_by_depth_total{depth="0"} 5\neagle:rounds_by_depth_total{depth="1"} 4\n'
        )
        page.until("document.querySelector('#depths').innerText.includes('1 token')")
        assert page.text("#positions") == "no draft found yet"


@browsing
def test_the_versions_of_a_head_that_learns_are_drawn_with_their_tau(page: Page) -> None:
    with canned() as it:
        it.metrics("eagle:rounds_total 1\n")
        page.open(it.base + "/")
        page.until("document.querySelector('#depths').innerText === 'no rounds yet'")
        assert page.text("#versions") == ""
        taus = "".join(f'eagle:learn_tau{{version="{at}"}} {tau}\n' for at, tau in ((0, 2.5), (1, 3.5), (2, 3.25)))
        it.metrics(f"eagle:rounds_total 2\n{taus}eagle:learn_version 1\n")
        page.until("document.querySelector('#versions').innerText.includes('version 2')")
        assert items(page, "versions") == {"version 0": "2.50", "version 1": "3.50", "version 2": "3.25"}
        assert page.js("document.querySelector('#versions .now').firstChild.innerText") == "version 1"
        width = "document.querySelector('#versions li:last-child i').style.width"
        assert float(page.js(width).rstrip("%")) == pytest.approx(100 * 3.25 / 3.5, abs=0.1)
        it.metrics("eagle:rounds_total 1\n")  # started again, without --learn
        page.until("document.querySelector('#versions').innerText === ''")
        assert page.js("document.querySelector('#versions').children.length") == 0


def both() -> Loaded:
    """Return a model with a head and n-grams."""
    target = given_target()
    ngrams = em.NgramProposer(min_ngram=3, memory=em.Memory())
    drafters = em.HybridProposer(given_head(target), ngrams)
    return Loaded(em.Engine(target, drafters, policy=em.FixedPolicy(DEPTH), max_batch=4), "eagle", DEPTH)


SHORT = 48
"""Tokens of a race in tests."""


def start_race(page: Page, prompt: str, tokens: int = SHORT) -> None:
    page.js(
        "window.longer ??= stream; "
        f"stream = (place, prompt, signal, more) => longer(place, prompt, signal, {{...more, max_tokens: {tokens}}}), 1"
    )
    page.js("document.querySelector('[value=race]').click()")
    page.js(f"document.querySelector('#prompt').value = {prompt!r}")
    page.js("document.querySelector('#send').click()")


def lanes(page: Page) -> list[list[str]]:
    """Return the lanes of a race: name, tokens/s, note and text."""
    texts: list[list[str]] = page.js(
        "[...document.querySelectorAll('#lanes li')].map(li => [...li.children].map(each => each.textContent))"
    )
    return texts


@browsing
def test_the_page_races_all_ways_to_decode_that_are_loaded(page: Page) -> None:
    with live(both, wide(api_key="secret")) as running:
        page.open(running.base + "/", 320, 640, "dark")
        page.until("!document.querySelector('#key-form').hidden")
        start_race(page, "def f(x):")
        page.until("document.querySelector('#race-note').innerText.startsWith('No race: ')")
        enter(page, "secret")
        page.until("document.querySelector('#model').innerText === 'tiny'")
        assert page.text("#send") == "Race"
        assert page.text("#answer-note") == ""
        results = list[RoundResult]()
        assert running.service.loaded is not None
        running.service.loaded.engine.observer = results.append
        start_race(page, "def f(x):")
        page.until("document.querySelector('#replay').checkVisibility()")
        assert max(len(result.accepted) for result in results) == 1  # each way decoded alone
        proposer = running.service.loaded.engine.proposer
        assert proposer is not None
        assert proposer.memory is not None
        assert proposer.memory.nbytes == 0, "no way drafts with the answer of another"
        names, speeds, notes, texts = zip(*lanes(page), strict=True)
        assert names == ("plain", "n-grams", "head", "default: head and n-grams")
        assert all(re.fullmatch(r"[\d,.]+ tokens/s", speed) for speed in speeds)
        assert notes[0] == f"{SHORT} tokens"
        assert all(re.fullmatch(r"\d+\.\d\dx plain, τ \d+\.\d\d, identical", note) for note in notes[1:])
        assert not notes[1].endswith("τ 1.00, identical")
        chat = {"model": NAME, "messages": [{"role": "user", "content": "def f(x):"}], "temperature": 0.0}
        answer = running.http.post(
            "/v1/chat/completions", json=chat | {"max_tokens": SHORT, "spec_decode": "none"}
        ).json()
        assert set(texts) == {answer["choices"][0]["message"]["content"]}
        assert page.js("document.documentElement.scrollWidth") <= 320
        drafted = "[...document.querySelectorAll('#lanes li')].map(li => li.querySelectorAll('.drafted').length > 0)"
        assert page.js(drafted)[:2] == [False, True]
        page.js("document.querySelector('#replay').click()")
        assert page.js("document.querySelectorAll('#lanes span[hidden]').length") > 0
        page.until("!document.querySelector('#lanes span[hidden]')")
        with running.slowed():
            page.js("document.querySelector('#send').click()")
            page.until("document.querySelector('#send').innerText === 'Stop' && document.querySelector('#lanes li')")
            page.js("document.querySelector('#send').click()")
            page.until("document.querySelector('#race-note').innerText === 'stopped'")
        assert [note for _, _, note, _ in lanes(page)] == ["stopped", "", "", ""]
        start_race(page, "x " * 4000)
        page.until("document.querySelector('#race-note').innerText.includes('maximum context length')")


@browsing
def test_a_race_of_few_tokens_is_not_timed_and_one_says_where_texts_differ(page: Page) -> None:
    with live() as running:
        page.open(running.base + "/")
        page.until("document.querySelector('#model').innerText === 'tiny'")
        start_race(page, "def f(x):", tokens=9)
        page.until("document.querySelector('#replay').checkVisibility()")
        (_, speed, note, _), (_, other, compared, _) = lanes(page)
        assert (speed, note) == (NOTHING, "9 tokens, too few to time")
        assert other == NOTHING
        assert re.fullmatch(r"τ \d\.\d\d, identical", compared)
        page.js("""{
          const show = showChunk;
          let spoiled = false;
          showChunk = (place, chunk) => {
            const said = chunk.choices[0]?.delta;
            if (said?.content && place.closest('li + li') && !spoiled) [said.content, spoiled] = ['?!', true];
            return show(place, chunk);
          };
        }""")
        start_race(page, "def f(x):")
        page.until("document.querySelector('#lanes li + li')?.innerText.includes('differs')")
        (plain, _, _, _), (ngrams, _, note, _) = lanes(page)
        assert (plain, ngrams) == ("plain", "n-grams")
        assert note.endswith("differs from character 1")
        page.until("document.querySelector('#race-note').innerText.includes('rounding')")


@browsing
def test_a_server_that_drafts_nothing_has_no_race(page: Page) -> None:
    with live(lambda: Loaded(engine("none"))) as running:
        page.open(running.base + "/")
        page.until("document.querySelector('#model').innerText === 'tiny'")
        start_race(page, "def f(x):")
        page.until("document.querySelector('#race-note').innerText === 'No race: this server has nothing that drafts'")


def enter(page: Page, key: str) -> None:
    page.js("document.querySelector('#key-note').textContent = ''")
    page.js(f"document.querySelector('#key').value = {key!r}")
    page.js("document.querySelector('#key-form button').click()")


@browsing
def test_the_page_shows_the_state_of_the_server(page: Page) -> None:
    ready = Event()

    def load() -> Loaded:
        ready.wait()
        return Loaded(engine(), "ngram", DEPTH, {"temperature": 0.0})

    with live(load, wait=False) as running:
        page.open(running.base + "/")
        page.until("document.querySelector('#state').innerText === 'starting'")
        assert "being loaded" in page.text("#notice")
        ready.set()
        page.until("document.querySelector('#state').innerText === 'ready'")
        assert page.text("#notice") == ""
        page.until("document.querySelector('#about').innerText.startsWith('context of 512 tokens · drafts by n-grams')")
        call = running.service.admit(1)  # a request that the server waits for
        running.terminate()
        page.until("document.querySelector('#state').innerText === 'draining'")
        assert "new ones get 503" in page.text("#notice")
        call.close()
        page.until("document.querySelector('#state').innerText === 'unreachable'")
        assert "those below are from then" in page.text("#notice")
        assert page.text("#rows-max") == "of 4"  # the last known number
        assert page.js("getComputedStyle(document.querySelector('section')).borderTopStyle") == "dashed"
        assert page.js("document.querySelector('#notice').role") == "alert"


@browsing
def test_the_page_shows_what_drafts_now(page: Page) -> None:
    """An administrator, or a head that has learned, may change it."""
    with live(lambda: Loaded(engine("eagle"), "eagle", DEPTH)) as running:
        page.open(running.base + "/")
        page.until(f"document.querySelector('#about').innerText.includes('drafts by head, up to {DEPTH} tokens')")
        body = {"model": NAME, "spec_decode": "none"}
        assert running.http.post("/admin/speculation", json=body).status_code == 200
        page.until("document.querySelector('#about').innerText.includes('no speculation')")


class Canned:
    """A server with responses from tests: status and body by path. Connections to other paths are cut."""

    def __init__(self, base: str):
        self.base = base
        self.answers: dict[str, tuple[int, str]] = {"/health": (200, '{"status": "ready"}')}

    def metrics(self, text: str) -> None:
        self.answers["/metrics"] = (200, text)


@contextmanager
def canned() -> Iterator[Canned]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = (200, PAGE) if self.path == "/" else it.answers.get(self.path, (0, ""))
            if not status:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {"Content-Type": "text/html; charset=utf-8", **HEADERS}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    it = Canned(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield it
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@browsing
def test_the_page_shows_names_from_the_server_as_text(page: Page) -> None:
    evil = "<img src=x onerror=document.title='broken'>"
    with canned() as it:
        it.metrics(f'eagle:requests_total{{outcome="a\\"b\\\\c\\n{evil}"}} 7\neagle:rounds_total 1\nnot a line\n')
        it.answers["/v1/models"] = (200, f'{{"data": [{{"id": "{evil}", "created": 1, "max_model_len": 5}}]}}')
        it.answers["/v1/spec_decode/metrics"] = (503, "")
        page.open(it.base + "/")
        page.until("document.querySelector('#model').innerText.includes('<img')")
        assert page.text("#model") == evil
        assert page.js("document.querySelectorAll('img').length") == 0
        assert page.js("document.title") == f"{evil} · eagle-serve"
        labels = page.js("[...document.querySelectorAll('#requests li > :first-child')].map(each => each.textContent)")
        assert f'a"b\\c\n{evil}' in labels


@browsing
def test_several_models_are_counted_together(page: Page) -> None:
    with canned() as it:
        it.metrics('eagle:rows{model_name="a"} 2\neagle:rows{model_name="b"} 3\n')
        models = '{"id": "a", "state": "loaded"}, {"id": "b", "state": "unloaded"}'
        it.answers["/v1/models"] = (200, f'{{"data": [{models}]}}')
        page.open(it.base + "/")
        page.until("document.querySelector('#model').innerText === '2 models'")
        assert page.text("#about") == "a (loaded) · b (unloaded)"
        assert page.text("#rows") == "5"


@browsing
def test_depths_of_several_models_are_not_added(page: Page) -> None:
    with canned() as it:
        it.metrics(
            "".join(
                f'eagle:rounds_by_depth_total{{depth="{depth}",model_name="{model}"}} 4\n'
                f'eagle:depth{{model_name="{model}"}} {depth}\n'
                for model, depth in (("a", 3), ("b", 5))
            )
        )
        page.open(it.base + "/")
        page.until("document.querySelector('#depth').innerText === '5'")
        assert page.text("#depths .now").startswith("5 tokens")


@browsing
def test_a_model_can_be_chosen_if_there_are_several(page: Page) -> None:
    made = lambda: Loaded(engine("none", context=in_full(512, 64)))  # noqa: E731
    sources = [ModelSource(name, made, max_batch=4) for name in "ab"]
    with live(models=Models(wide(), sources, at_start=True)) as running:
        page.open(running.base + "/")
        page.until("document.querySelector('#choice').options.length === 2")
        page.js("document.querySelector('#choice').value = 'b'")
        page.js("document.querySelector('#prompt').value = 'x'")
        page.js("document.querySelector('#send').click()")
        page.until("document.querySelector('#answer-note').innerText.includes('tokens/s')")
        text = running.http.get("/metrics").text
        assert re.search(r'eagle:requests_total\{model_name="b",outcome="finished"\} 1', text)


@browsing
def test_the_page_says_what_it_cannot_read(page: Page) -> None:
    with canned() as it:
        page.open(it.base + "/")  # /metrics is cut off
        page.until("document.querySelector('#state').innerText === 'unreachable'")
        assert page.text("#notice").startswith("No numbers yet. ")
        for path, status, body in (("/metrics", 500, "oh"), ("/health", 502, "<html>"), ("/health", 200, "[]")):
            it.metrics("eagle:rows 2\n")
            it.answers["/health"] = (200, '{"status": "ready"}')
            page.until("document.querySelector('#state').innerText === 'ready'")
            it.answers[path] = (status, body)
            page.until("document.querySelector('#state').innerText === 'unreachable'")
            assert page.text("#notice").endswith(f"{path} answers {status}")
            assert page.text("#rows") == "2"


@browsing
def test_the_page_counts_from_zero_after_a_restart(page: Page) -> None:
    with canned() as it:
        it.metrics("eagle:rounds_total 50\neagle:row_rounds_total 50\neagle:generation_tokens_total 150\n")
        page.open(it.base + "/")
        page.until("document.querySelector('#tau').innerText === '3.00'")
        page.js("document.querySelector('[value=minute]').click()")
        it.metrics("eagle:rounds_total 60\neagle:row_rounds_total 60\neagle:generation_tokens_total 170\n")
        page.until("document.querySelector('#tau').innerText === '2.00'")  # 20 tokens in 10 forwards
        it.metrics("eagle:rounds_total 3\neagle:row_rounds_total 3\neagle:generation_tokens_total 9\n")
        page.until(f"document.querySelector('#tau').innerText === '{NOTHING}'")
        assert page.text("#speed") == "0"  # not negative
        page.js("document.querySelector('[value=all]').click()")
        assert page.text("#tau") == "3.00"


LATER = """{
  const now = performance.now;
  performance.now = () => now() + 3.6e6;
}"""
"""Makes an hour pass at once."""


@browsing
def test_a_page_that_was_hidden_shows_no_long_time_as_the_last_minute(page: Page) -> None:
    with canned() as it:
        it.metrics("eagle:rounds_total 50\neagle:row_rounds_total 50\neagle:generation_tokens_total 150\n")
        page.open(it.base + "/")
        page.until("document.querySelector('#tau').innerText === '3.00'")
        page.js("document.querySelector('[value=minute]').click()")
        page.js("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
        page.js("new Promise(done => setTimeout(done, 3000))")  # three seconds of the page, after which it asks no more
        it.metrics(
            "eagle:rounds_total 90\neagle:rows 2\neagle:row_rounds_total 90\neagle:generation_tokens_total 790\n"
        )
        page.js(LATER + "delete document.hidden")
        page.until("document.querySelector('#rows').innerText === '2'")
        assert page.text("#span") == "0 tokens in 0 rounds"
        it.metrics(
            "eagle:rounds_total 92\neagle:rows 3\neagle:row_rounds_total 92\neagle:generation_tokens_total 799\n"
        )
        page.until("document.querySelector('#rows').innerText === '3'")
        assert page.text("#span") == "9 tokens in 2 rounds"


@browsing
def test_the_page_shows_quantiles_of_the_time_to_the_first_token(page: Page) -> None:
    def buckets(*counts: int) -> str:
        bounds = ("0.1", "0.5", "2.0", "+Inf")
        name = "eagle:time_to_first_token_seconds_bucket"
        return "\n".join(f'{name}{{le="{le}"}} {n}' for le, n in zip(bounds, counts, strict=True)) + "\n"

    cases = {
        (10, 10, 10, 10): ("50 ms", "95 ms"),  # evenly within the first
        (0, 8, 10, 10): ("0.35 s", "1.63 s"),  # 0.1 + 0.4 * 5/8; 0.5 + 1.5 * 1.5/2
        (0, 0, 0, 4): ("over 2.00 s", "over 2.00 s"),
        (0, 0, 0, 0): (NOTHING, None),
    }
    with canned() as it:
        it.metrics(buckets(0, 0, 0, 0))
        page.open(it.base + "/")
        for counts, (median, most) in cases.items():
            it.metrics(buckets(*counts))
            page.until(f"document.querySelector('#first').innerText === {median!r}")
            assert page.text("#first-note") == (f"median; 95 % within {most}" if most else "median")


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] === 1) return c; } };
  const worst = [];
  for (const e of document.querySelectorAll('body *')) {
    const bare = ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (bare || e.closest('script, style, noscript')) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    worst.push([(a + 0.05) / (b + 0.05), e.textContent.trim().slice(0, 40)]);
  }
  return worst.sort((x, y) => x[0] - y[0])[0];
})()"""


@browsing
def test_the_page_is_readable_in_both_color_schemes_on_narrow_screens(page: Page, shared: Live) -> None:
    page.open(shared.base + "/", 320, 640)
    page.until("document.querySelector('#positions .bar')")
    page.js("document.querySelectorAll('[hidden]').forEach(each => each.hidden = false)")
    for scheme, background in (("light", "rgb(244, 243, 239)"), ("dark", "rgb(20, 24, 26)")):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert page.js("getComputedStyle(document.body).backgroundColor") == background
        for state in ("ready", "starting", "draining", "unreachable"):
            page.js(f"show({state!r}, 'why')")
            ratio, text = page.js(CONTRAST)
            assert ratio >= 4.5, text
    assert page.js("document.documentElement.scrollWidth") <= 320
    page.js("list('depths', [['16 tokens', 0.5]], bar, '')")
    label = "(e => e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).lineHeight))"
    assert page.js(f"{label}(document.querySelector('#depths li > :first-child'))") < 1.5, "the label wraps"
    named = "[...document.querySelectorAll('section, input')].every(e => e.labels?.length || e.ariaLabelledByElements)"
    assert page.js(named)


@browsing
def test_the_page_does_not_move_if_users_prefer_reduced_motion(page: Page, shared: Live) -> None:
    page.open(shared.base + "/")
    page.until("document.querySelector('#positions .bar')")
    moving = "getComputedStyle(document.querySelector('.bar > i')).transitionDuration"
    assert page.js(moving) == "0.4s"
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert page.js(moving) == "0s"
    page.js("document.querySelector('#state').dataset.state = 'starting'")
    assert page.js("getComputedStyle(document.querySelector('#state'), '::before').animationName") == "none"


@browsing
@pytest.mark.skipif(not FULL, reason="the other tests show the same numbers in a browser that they control")
def test_the_page_shows_its_numbers_without_a_debugging_pipe(shared: Live, tmp_path: Path) -> None:
    path = chromium()
    assert path is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command = [
        path,
        *flags,
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=4000",
        "--dump-dom",
        shared.base + "/",
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert '<h1 id="model">tiny</h1>' in dom
    assert re.search(r'id="state"[^>]*data-state="ready"[^>]*>ready<', dom)
