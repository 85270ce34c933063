"""The site in a real browser: search finds what people look for, and pages fit wide and narrow screens.

Needs `pip install '.[docs]'`, and for a browser chromium and its driver; skipped with a reason without them.
"""

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import Attributes

ROOT = Path(__file__).resolve().parent.parent
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings", "selenium") if find_spec(name) is None]
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("default"),
]

SIZES = {"wide": (1400, 900), "phone": (390, 844)}
FOUND = {
    "which-pipeline/": ("which pipeline should I use", "which pipeline", "slow network", "bandwidth"),
    "fsdp/": ("FSDP2",),
    "checkpoint/": ("checkpoint",),
    "ddp/": ("mixed precision", "gradient accumulation", "clipping"),
    "failures/": ("timeout",),
    "gpu/": ("nccl",),
    "compared/": ("horovod", "hivemind"),
    "owners/": ("Muon", "ZeRO"),
}
PAGES = ["", "which-pipeline/", "ddp/", "fsdp/", "catalogue/", "glossary/", "contract/", "api/pipelines/"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert [str(page) for page in folder.rglob("*.html") if "][fnddp" in page.read_text()] == []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as started:
        yield started


def set_screen(browser: Any, size: str) -> None:
    width, height = SIZES[size]
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def wait(browser: Any, selector: str) -> Any:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.expected_conditions import visibility_of_element_located
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60, poll_frequency=0.05).until(
        visibility_of_element_located((By.CSS_SELECTOR, selector))
    )


def test_the_site_is_built_of_pages_that_a_parser_understands(site: str) -> None:
    """Without warnings, also where no browser looks at it."""
    with urllib.request.urlopen(f"{site}search/search_index.json") as answer:
        index = json.load(answer)
    pages = sorted({entry["location"].partition("#")[0] for entry in index["docs"]})
    assert set(PAGES) <= {*pages}
    for page in pages:
        with urllib.request.urlopen(site + page) as answer:
            assert Attributes(answer.read().decode()).broken == [], page


@pytest.mark.parametrize("size", SIZES)
def test_search_finds_what_people_look_for_at_the_first_place(site: str, browser: Any, size: str) -> None:
    set_screen(browser, size)
    for page, words in ((page, words) for page, all_words in FOUND.items() for words in all_words):
        browser.get(site)
        wait(browser, "label[for=__search].md-header__button" if size == "phone" else ".md-search__input").click()
        wait(browser, ".md-search__input").send_keys(words)
        # results change while one types
        wait(browser, f".md-search-result__item:first-child .md-search-result__link[href^='{site}{page}']")


def test_the_table_of_the_answer_is_as_wide_as_a_phone(site: str, browser: Any) -> None:
    """A card for each link: no cell begins or ends outside of the screen, where it could be scrolled to only."""
    set_screen(browser, "phone")
    browser.get(site + "which-pipeline/")
    wait(browser, ".folds td")
    edges = browser.execute_script(
        "return [...document.querySelectorAll('.folds td')].map(cell => cell.getBoundingClientRect())"
        ".flatMap(cell => [cell.left, cell.right])"
    )
    assert 0 <= min(edges) <= max(edges) <= SIZES["phone"][0]


@pytest.mark.parametrize("size", SIZES)
def test_pages_are_no_wider_than_the_screen(site: str, browser: Any, size: str) -> None:
    set_screen(browser, size)
    for page in PAGES:
        browser.get(site + page)
        wait(browser, "article h1")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= SIZES[size][0], page
        assert size == "phone" or wait(browser, ".md-tabs").is_displayed(), page
