"""The symbols that layer types share, as expressions."""

from __future__ import annotations

from napkinmath.base.expr import symbol

b, s, h, a, k, dh, f, v = (symbol(name) for name in ("b", "s", "h", "a", "k", "dh", "f", "v"))
e, topk, fe, fs = (symbol(name) for name in ("e", "topk", "fe", "fs"))
ma, mg, lk, lv = (symbol(name) for name in ("ma", "mg", "lk", "lv"))
kg, dg, mi = symbol("kg"), symbol("dg"), symbol("mi")
