"""How reports look: text of 100 columns with the finding first, pages that fit a phone, one line for each bad call."""

import html.parser
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.inspection.reports import WIDTH, Report, Section, table
from mpjax.inspection.tools import CLASSES

LONG = "encoder_with_a_name_that_goes_on/stage_of_the_hierarchy_number_two/block_of_residual_layers/projection_matrix"


def loss(w, x):
    for i in range(3):
        with jax.named_scope(f"{LONG}_{i}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("head_" + "x" * 150):
        return jnp.sum(jnp.exp((x @ w).astype(jnp.float16)).astype(jnp.float32))


@pytest.fixture(scope="module")
def reports():
    w, x = np.eye(16, dtype=np.float32), np.ones((8, 16), np.float32)
    gradient = jax.grad(loss)
    found = {
        "audit": mpjax.audit(gradient, w, x),
        "explain": mpjax.explain(gradient, w, x),
        "numerics": mpjax.numerics(loss, w, x),
        "nonfinite": mpjax.find_nonfinite(loss, 100 * w, x),
        "profile": mpjax.profile(jax.jit(gradient), w, x, steps=1),
    }
    found["layerwise"] = mpjax.layerwise_error(loss, w, x)
    watched, grads = mpjax.watch(loss), gradient(w, x)
    found["watch"] = watched.update(watched.init(w, x), w, x, grads=grads).records()[0]
    return found


NAMES = ["audit", "explain", "numerics", "nonfinite", "profile", "layerwise", "watch"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("all_rows", [False, True])
def test_text_fits_100_columns_however_long_names_are(reports, name, all_rows):
    lines = reports[name].text(all=all_rows).splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_finding_comes_before_every_table(reports, name):
    first = {
        "audit": "in half",
        "explain": "in float16",
        "numerics": "largest safe loss scale",
        "nonfinite": "made by",
        "profile": "a step on",
        "layerwise": "error",
        "watch": "step 0",
    }
    text = reports[name].text()
    table = text.find("──")
    assert -1 < text.find(first[name]) < (table if table >= 0 else len(text))


class Page(html.parser.HTMLParser):
    """What a page's layout depends on."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loose, self.wide, self.unclosed = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "table" and "table" not in {c for _, c in self.open}:
            self.loose.append(tag)
        width = found.get("width", "0")
        if re.fullmatch(r"\d+(\.\d+)?(px)?", width) and float(width.removesuffix("px")) > 400:
            self.wide.append((tag, width))
        if tag not in ("meta", "br", "img"):
            self.open.append((tag, found.get("class", "")))

    def handle_endtag(self, tag):
        opened, _ = self.open.pop()
        if opened != tag:
            self.unclosed.append((opened, tag))


@pytest.mark.parametrize("name", NAMES)
def test_pages_fit_a_phone(reports, name):
    text = reports[name].to_html()
    page = Page(text)
    assert page.open == page.unclosed == []
    assert page.loose == [], "tables scroll by themselves, not the page"
    assert page.wide == []
    assert '<meta name="viewport"' in text
    assert not re.search(r"(?<!-)\b(min-)?width: *(4[1-9]\d|[5-9]\d\d|\d{4,})px", text)


def test_figures_have_legends_and_axes(reports, tmp_path):
    reports["numerics"].plot(tmp_path / "ranges.svg")
    drawing = (tmp_path / "ranges.svg").read_text()
    for text in ("gradients of activations", "float16 holds these", "share of the nonzero ones"):
        assert f"<!-- {text} -->" in drawing


def test_percentages_are_drawn_as_bars_and_long_tables_are_folded():
    section = Section("", "", "module|%share", [("a", "60.0%"), ("b", "30.0%"), ("c", "0")], shown=2)
    text = section.html()
    assert re.findall(r"--bar: (\d+)%", text) == ["100", "50", "0"]
    assert text.index("<td>b</td>") < text.index("<summary>… and 1 more") < text.index("<td>c</td>")
    assert section.lines()[2:] == table(("module", "share"), section.rows[:2], {1})[2:] + section.lines()[-1:]


def test_every_class_of_reports_draws_itself_in_a_notebook():
    named = [name for name in CLASSES if re.search("Report|Record|Explanation|NonFinite", name)]
    assert len(named) >= 9
    assert all(issubclass(getattr(mpjax.inspection, name), Report) for name in named)
