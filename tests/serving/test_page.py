"""A person's way through the page in a real browser, on a phone and on a desk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import WIDTHS, Page, chromium

from tests.serving.patient import patient_server

pytestmark = [pytest.mark.slow, pytest.mark.browser]
OWN = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
OWN |= {"num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 4096}
HELPERS = """
globalThis.$ = (id) => document.getElementById(id);
globalThis.text = (id) => $(id).textContent;
globalThis.enter = (field, value, kind = "input") => {
  field.value = value; field.dispatchEvent(new Event(kind, { bubbles: true }));
};
globalThis.press = (words, where = document) => {
  const found = [...where.querySelectorAll("button")].find((b) => b.textContent === words);
  if (!found) throw new Error(`no button ${words}`);
  found.click();
};
"""
CUT = """
[...document.querySelectorAll("label, button, summary, h2, h3, legend, th")]
  .filter((e) => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)
  .filter((e) => !e.matches(".slide, .hidden") && getComputedStyle(e).display !== "inline" && !e.closest("#bar"))
  .map((e) => e.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with patient_server() as running:
        yield running.url


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, address: str) -> Iterator[Page]:
    with chromium() as opened:
        opened.shape(*WIDTHS[request.param], touch=request.param == "phone")
        opened.open(address)
        opened.run(HELPERS)
        settled(opened)
        yield opened
        assert opened.errors == []
        assert all(url.startswith((address, "data:")) for url in opened.requests)


def settled(page: Page) -> None:
    page.until(
        "text('limits').includes('Largest batch') && !document.querySelector('.partly, .busy')"
    )


def test_a_person_goes_from_a_model_to_what_to_run(page: Page) -> None:
    assert page.run("text('verdict')").startswith("FITS RTX 4090")
    assert "limit 23.64 GiB, device " in page.run("text('bar-words')")
    page.run("enter(form.model, 'smollm2-360m'); enter(form.bs, 3)")
    page.until("text('config').includes('--bs 8') && text('config').includes('smollm2-360m')")
    page.run("document.querySelector('#components tbody button').click()")
    page.until("text('formulas').includes('B = ')")
    page.run("press('Keep to compare')")
    page.run("$('search').click()")
    page.until("document.querySelector('.card button')")
    assert "candidates priced" in page.run("text('plan-said')")
    assert "tokens/s" in page.run("document.querySelector('.card').textContent")
    page.run("document.querySelector('.card button').click()")
    page.until("location.hash.includes('kernels=liger') && location.hash.includes('vs=model')")
    settled(page)
    shown = page.run("[...document.querySelectorAll('#compare tr')].map((r) => r.textContent)")
    assert any(row.startswith("kernels") for row in shown), "only what differs is listed"
    assert not any(row.startswith("model") for row in shown)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run(CUT) == []
    page.run("$('timeline').scrollIntoView()")
    page.until("document.querySelector('#timeline canvas')?.width > 0")
    is_touch = page.run("matchMedia('(hover: none)').matches")
    assert page.run("!document.querySelector('.keys').offsetParent") == is_touch


def test_what_does_not_fit_is_one_press_from_what_does(page: Page) -> None:
    page.run("enter($('bs-number'), 64); enter(form.gpus, 1)")
    page.until("document.querySelector('#remedy button')")
    assert page.run("text('verdict')").startswith("DOES NOT FIT")
    page.run("press('Make it fit')")
    page.until("text('verdict').startsWith('FITS')")


def test_a_wrong_name_dims_the_old_answer_and_offers_the_right_one(page: Page) -> None:
    page.run("enter(form.model, 'lama-3.1-8b')")
    page.until("!$('error').hidden")
    assert page.run("document.body.classList.contains('stale')")
    page.run("press('Use llama-3.1-8b', $('error'))")
    page.until("$('error').hidden && !document.body.classList.contains('stale')")


def test_a_config_of_ones_own_is_dropped_priced_and_linked(page: Page) -> None:
    drop = f"""
      const given = new DataTransfer();
      given.items.add(new File([{json.dumps(json.dumps(OWN))}], "mine.json"));
      document.dispatchEvent(new DragEvent("drop", {{ dataTransfer: given, bubbles: true }}));
    """
    page.run(f"(() => {{ {drop} }})()")
    page.until("text('own-name') === 'mine.json' && text('config').includes('./config.json')")
    settled(page)
    size = page.run("text('figures')")
    link = page.run("location.href")
    page.open("about:blank")
    page.open(link)
    page.run(HELPERS)
    page.until("text('own-name') === 'mine.json'")
    settled(page)
    assert page.run("text('figures')") == size
    page.run("press('Remove')")
    page.until("text('config').includes('--model llama-3.1-8b')")


def test_a_link_restores_what_has_a_field_and_what_has_none(page: Page) -> None:
    page.run(
        "location.hash = '#model=smollm2-135m&gpu=A100-SXM4-80GB&method=lora&bs=3&ctx=3000&rank=12"
        "&grad_accum=5&dropout=0.05&clip=false&checkpointing=every:3&gpus=8&data_parallel=zero3"
        "&price=2.5&targets=q_proj,%24(touch%20x)%3B%27'"
    )
    page.until("text('config').includes('--ctx 3000')")
    assert page.run("form.gpus.value") == "8" and page.run("form.bs.value") != "3"
    assert page.run("text('extra')").startswith("Also set: dropout: 0.05")
    for flag in ("--rank 12", "--grad-accum 5", "--no-clip", "--gpus 8", "--data-parallel zero3"):
        assert flag in page.run("text('config')")
    assert """--targets 'q_proj,$(touch x);'"'"''""" in page.run("text('config')")
    page.run("enter($('further'), \"--train-modules 'lm_head, x' --fsdp\", 'change')")
    page.until("text('config').includes(\"--train-modules 'lm_head, x'\")")
    assert "--data-parallel fsdp2" in page.run("text('config')")
    page.run("$('extra-clear').click(); enter(form.checkpointing, 'full')")
    page.until("text('cost').includes('for a million tokens')")
    page.run("enter($('kind'), 'python', 'change')")
    page.until("text('config').includes('rank=12,')")
    for kind in ("hf", "axolotl", "torchtune", "accelerate", "deepspeed"):
        page.run(f"$('config').textContent = ''; enter($('kind'), '{kind}', 'change')")
        page.until("text('config').length > 80")


HOSTILE = {  # parts of a link, each with words of what the page says
    "&" + 20_000 * "vs=": "",
    "&bs=0x10": "bs '0x10' is not a whole number",
    "&rank=<img src=x onerror=stop()>&method=lora": "is not a whole number",
    "&__proto__=1&constructor=2": "'constructor' is not one of the page's",
}


@pytest.mark.parametrize("part", HOSTILE, ids=lambda part: part[:12])
def test_a_hostile_link_is_answered(page: Page, address: str, part: str) -> None:
    """In words or with figures, and no text of it becomes an element or a script."""
    page.open("about:blank")
    page.open(f"{address}#model=gpt2&gpu=T4&ctx=64{part}")
    page.run(HELPERS)
    if HOSTILE[part]:
        page.until(f"text('error').includes({HOSTILE[part]!r})")
    else:
        page.until("text('verdict').startsWith('FITS T4') && text('config').includes('--ctx 64')")
    assert (
        page.run("document.querySelectorAll('#form b, #extra b, #own b, svg, iframe').length") == 0
    )
    page.errors[:] = [e for e in page.errors if "cannot be parsed" not in e]  # of number fields


def test_the_page_is_used_by_keyboard_alone(page: Page) -> None:
    page.run("form.bs.focus()")
    page.key("ArrowRight")
    page.until("$('bs-number').value === '4'")
    page.run("document.querySelector('.skip').focus()")
    assert page.run("getComputedStyle(document.querySelector('.skip')).left") == "16px"
    page.key("Enter", "\r")
    page.until("document.activeElement.id === 'answer'")


def test_pictures_can_be_taken(page: Page, tmp_path: Path) -> None:
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"
