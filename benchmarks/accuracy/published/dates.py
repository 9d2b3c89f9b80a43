"""When a run was made: a version or a date in its text, else not before its model was published."""

from __future__ import annotations

import re

# Releases of transformers and torch, as (year, month): what a version in a note dates (their
# release pages on PyPI).
_TRANSFORMERS = {
    18: (2022, 4),
    20: (2022, 6),
    25: (2022, 12),
    28: (2023, 4),
    31: (2023, 7),
    34: (2023, 10),
    37: (2024, 1),
    40: (2024, 4),
    43: (2024, 7),
    45: (2024, 9),
    46: (2024, 11),
    48: (2025, 1),
    50: (2025, 3),
    53: (2025, 6),
    57: (2025, 10),
}
_TORCH = {
    (1, 8): (2021, 3),
    (1, 11): (2022, 3),
    (1, 13): (2022, 11),
    (2, 0): (2023, 4),
    (2, 1): (2023, 11),
    (2, 2): (2024, 2),
    (2, 3): (2024, 5),
    (2, 4): (2024, 8),
    (2, 5): (2024, 11),
    (2, 6): (2025, 2),
    (2, 7): (2025, 5),
    (2, 8): (2025, 9),
    (2, 9): (2025, 11),
    (2, 10): (2026, 2),
}
# Model names and the month of their weights. A run is taken to be some months younger
# (RUN_AFTER_MONTHS).
_MODELS = (
    (r"ministral-?3|olmo-?3|granite-?4|glm-?4[._-][5-9]|kimi|minimax|qwen-?3[._-]5", (2025, 10)),
    (r"apertus|seed-?oss|hunyuan|smollm-?3|ernie|lfm-?2|afm-4|exaone-?4", (2025, 8)),
    (r"qwen-?3|gpt-?oss|magistral|devstral", (2025, 6)),
    (r"llama-?4|gemma-?3|mistral-small-3[._-]1|granite-?3[._-]3|phi-?4-mini", (2025, 4)),
    (r"qwen-?2[._-]5|llama-?3[._-][23]|falcon-?3|phi-?4|olmo-?2", (2024, 10)),
    (r"llama-?3[._-]1|gemma-?2\b|gemma-?2-|mistral-nemo|ministral", (2024, 8)),
    (r"qwen-?2\b|qwen-?2-|llama-?3\b|llama-?3-|phi-?3|codestral|yi-?1[._-]5", (2024, 6)),
    (
        r"gemma-?\d?b?\b|qwen-?1[._-]5|qwen1half|phi-?2|tiny-?llama|mixtral|starcoder2|olmo\b|deepseek-moe",
        (2024, 2),
    ),
    (
        r"mistral|zephyr|yi-|yi\b|qwen|baichuan-?2|chatglm-?3|internlm|falcon-180|code-?llama",
        (2023, 11),
    ),
    (
        r"llama-?2|baichuan|chatglm|xgen|mpt|falcon|redpajama|open-?llama|starcoder|wizard",
        (2023, 8),
    ),
    (r"llama|alpaca|vicuna|dolly|pythia|stablelm|cerebras", (2023, 5)),
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_SEASONS = {"early": 2, "start of": 1, "mid": 6, "late": 11, "end of": 12}
_NIGHTLY_MONTHS = 3  # a version's nightlies are of the quarter before its release
Date = tuple[int, int]


def date_in(text: str) -> Date | None:
    """(year, month) that a text in lower case states: by a library's version, a month, or a year
    alone (taken at its middle)."""
    return _version(text) or _calendar(text)


def arxiv_date(text: str) -> Date | None:
    """The month in the number of a paper that a text in lower case names, as "arxiv 2201.11990"."""
    found = re.search(r"arxiv[:\s]+(\d\d)(0[1-9]|1[0-2])\.\d{4,5}", text)
    return (2000 + int(found[1]), int(found[2])) if found else None


def date_of_model(name: str) -> Date | None:
    """The month a model of that name was published, where it is one of the last years' language
    models."""
    lowered = name.lower()
    return next((date for pattern, date in _MODELS if re.search(pattern, lowered)), None)


def _version(text: str) -> Date | None:
    if re.search(r"transformers\s*(?:==|>=|version|v|:|-)?\s*v?5\b", text):
        return (2026, 1)
    found = re.search(r"transformers\s*(?:==|>=|version|v|:|-)?\s*v?4\.(\d+)", text)
    if found:
        known = [minor for minor in _TRANSFORMERS if minor <= int(found[1])]
        return _TRANSFORMERS[max(known)] if known else (2021, 6)
    found = re.search(
        r"\b(?:py)?torch\s*(?:==|>=|version|v|:|-)?\s*v?([12])\.(\d+)(?:\.0)?(a0|\.dev| nightly)?",
        text,
    )
    if found:
        earlier = [version for version in _TORCH if version <= (int(found[1]), int(found[2]))]
        year, month = _TORCH[max(earlier)] if earlier else (2020, 6)
        month -= _NIGHTLY_MONTHS if found[3] else 0
        return (year, month) if month > 0 else (year - 1, month + 12)
    return None


def _calendar(text: str) -> Date | None:
    years = r"(20(?:1[89]|2\d))"
    found = re.search(rf"\b({'|'.join(_MONTHS)})[a-z]*\.?[\s_-]+(?:\d{{1,2}},?\s+)?{years}\b", text)
    if found:
        return int(found[2]), _MONTHS.index(found[1]) + 1
    found = re.search(rf"(?<![\d.]){years}(0[1-9]|1[0-2])(?![\d.])", text)  # "h200_202506_x.md"
    if found:
        return int(found[1]), int(found[2])
    found = re.search(rf"\b{years}[-/_.](0?[1-9]|1[0-2])\b", text)
    if found:
        return int(found[1]), int(found[2])
    found = re.search(rf"\b({'|'.join(_SEASONS)})[\s-]+{years}\b", text)
    if found:
        return int(found[2]), _SEASONS[found[1]]
    found = re.search(
        rf"(?<![\d.,x]){years}(?![\d.,]*\d)(?!\s*(?:token|sampl|seq|step|gpu|gb|mib|rows|epoch))",
        text,
    )
    return (int(found[1]), 6) if found else None
