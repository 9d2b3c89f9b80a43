"""Sums of whole numbers in a script, worked out without running it."""

from __future__ import annotations

import ast

_DEEPEST = 64


def whole_number(text: str) -> int:
    """A sum, product or quotient of whole numbers. Raises ArithmeticError, SyntaxError or ValueError
    for another text."""

    def value(node: ast.expr, depth: int = 0) -> int:
        if depth > _DEEPEST:
            raise ValueError
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand, depth + 1)
        if isinstance(node, ast.BinOp):
            left, right = value(node.left, depth + 1), value(node.right, depth + 1)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, (ast.Div, ast.FloorDiv)):
                return left // right
            if isinstance(node.op, ast.Mod):
                return left % right
        raise ValueError

    return value(ast.parse(text.strip(), mode="eval").body)
