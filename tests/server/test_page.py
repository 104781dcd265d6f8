"""The page in headless Chromium, where there is one: what it shows is what the engine did, and one can talk to it."""

from __future__ import annotations

import re
import shutil

import pytest

from replayssm.server.page import PAGE
from tests.server.common import serving, shipped

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield made
        made.close()


@pytest.fixture
def page(browser):
    context = browser.new_context()
    made = context.new_page()
    made.set_default_timeout(20_000)
    made.complaints = []
    made.on("console", lambda message: made.complaints.append(message.text) if message.type == "error" else None)
    made.on("pageerror", lambda error: made.complaints.append(str(error)))
    made.asked = []
    made.on("request", lambda request: made.asked.append(request.url))
    yield made
    context.close()


def shows(page, name, pattern):
    page.wait_for_function(
        "([id, pattern]) => new RegExp(pattern).test(document.getElementById(id).textContent)", arg=[name, pattern]
    )
    return page.locator(f"#{name}").text_content()


@needs_chromium
def test_state_and_chat(page):
    with serving(shipped(), {"max_requests": 3, "prefix_cache": True, "page_size": 16}) as running:
        for _ in range(2):
            running.call("/v1/completions", {"prompt": "It was the best of times. " * 14, "max_tokens": 30, "seed": 1})
        page.goto(running.url)
        assert shows(page, "phase", "^ready$")
        assert "tiny" in shows(page, "model", "version")
        assert shows(page, "slots", "of 3$") == "0 of 3"
        meter, stats = running.engine.runner.meter, running.engine.stats
        share = 100 * meter.saved / (meter.saved + meter.moved)
        assert f"({share:.1f} %)" in shows(page, "saved", "%")
        assert shows(page, "rows", "%").startswith("100.0 %")
        assert shows(page, "drafts", "o") == "off"
        assert re.match(r"[1-9]\d*\.\d %", shows(page, "prefix", "%"))
        assert shows(page, "tokens", ",").endswith(f", {stats.generated_tokens}")

        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("12")
        page.get_by_label("Message").fill("<b>Who</b> are you?")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelectorAll('#talk p').length === 2")
        page.wait_for_function("() => !document.querySelector('#send').disabled")
        asked = {"messages": [{"role": "user", "content": "<b>Who</b> are you?"}], "max_tokens": 12, "temperature": 0}
        expected = running.call("/v1/chat/completions", asked).json["choices"][0]["message"]["content"]
        turns = [turn.text_content() for turn in page.locator("#talk p span").all()]
        assert turns == ["<b>Who</b> are you?", expected]

        page.get_by_label("Most tokens").fill("100000")
        page.get_by_label("Message").fill("Tell me more")
        page.get_by_role("button", name="Send").click()
        page.wait_for_function("() => document.querySelectorAll('#talk p').length === 4")
        page.get_by_role("button", name="Stop").click()
        page.wait_for_function("() => !document.querySelector('#send').disabled")
        running.wait_idle()

        page.get_by_role("button", name="Clear").click()
        assert page.locator("#talk p").count() == 0
        page.get_by_label("Temperature").evaluate("x => { x.min = ''; x.value = '-1'; }")
        page.get_by_label("Message").fill("Wrong")
        page.get_by_role("button", name="Send").click()
        assert "temperature" in shows(page, "trouble", "temperature")
        assert all(url.startswith(running.url) or url.startswith("data:") for url in page.asked)
    assert [text for text in page.complaints if "400" not in text] == []


@needs_chromium
def test_right_drafts_are_shown(page):
    options = {"spec": "ngram", "ring_len": 16, "spec_adaptive": False}
    with serving(shipped(), options) as running:
        page.goto(running.url)
        assert shows(page, "drafts", "0$") == "– of 0"
        running.call("/v1/completions", {"prompt": "the sea the sea the sea", "max_tokens": 60, "temperature": 0})
        stats, meter = running.engine.stats, running.engine.runner.meter
        right = f"{100 * stats.drafts_kept / stats.drafted:.1f} % of {stats.drafted}"
        assert shows(page, "drafts", "[1-9]") == right
        windows = 100 * meter.window_rows / (meter.window_rows + meter.replay_rows)
        assert shows(page, "rows", "drafts$").endswith(f", {windows:.1f} % with drafts")
    assert page.complaints == []


@needs_chromium
def test_the_page_shows_live_numbers(page):
    with serving(shipped(), {"max_requests": 3, "context": 4096}) as running, running.openai() as client:
        page.goto(running.url)
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=4000, stream=True, n=2, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        shows(page, "slots", "^2 of 3$")
        shows(page, "ring", r"^\d+ of 16 records$")
        assert float(shows(page, "rate", r"^[1-9]").replace(",", "")) > 1
        shows(page, "flushes", r"^[1-9]|^0\.\d")
        assert page.locator("#slots-bar").evaluate("x => x.value") == pytest.approx(2 / 3)
        stream.close()
        shows(page, "slots", "^0 of 3$")
        running.wait_idle()


@needs_chromium
def test_a_key_is_asked_for(page):
    with serving(api_key="secret") as running:
        page.goto(running.url)
        shows(page, "phase", "key")
        page.get_by_label("API key").fill("secret")
        shows(page, "phase", "^ready$")


@needs_chromium
def test_accessible_names_and_order(page):
    with serving() as running:
        page.goto(running.url)
        shows(page, "phase", "^ready$")
        assert page.locator("html").get_attribute("lang") == "en"
        for name in ("Message", "Temperature", "Most tokens"):
            assert page.get_by_label(name, exact=True).count() == 1
        for element in page.locator("meter").all():
            assert element.get_attribute("aria-label")
        assert page.get_by_role("log").get_attribute("aria-live") == "polite"
        reached = []
        for _ in range(7):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id"))
        assert [name for name in reached if name in ("talk", "text", "temperature", "most", "send", "clear")] == [
            "talk", "text", "temperature", "most", "send", "clear",
        ]  # fmt: skip
        page.set_viewport_size({"width": 320, "height": 600})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_every_number_of_the_page_has_a_place_and_is_in_the_statistics(server):
    text, stats = PAGE.read_text(encoding="utf-8"), server.call("/stats").json
    places = set(re.findall(r' id="([\w-]+)"', text))
    assert set(re.findall(r'(?:show|used)\("([\w-]+)"', text)) <= places
    read = set(re.findall(r"\bs\.([a-z_]+)", text))
    assert {"spec", "drafted", "drafts_kept", "window_rows"} <= read
    assert read <= stats.keys()


def test_nothing_from_outside(server):
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import|url\(", text)
    reply = server.call("/")
    assert reply.text == text
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
