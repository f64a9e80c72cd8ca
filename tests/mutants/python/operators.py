"""Mutants of a module: one small change each, such as programmers make by mistake.

Figures that a module or class gives a name stay as they are: they were chosen or measured, and only
a test that repeats them could notice. So does `strict=` of zip, which only states what holds.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

_COMPARISONS: list[tuple[type[ast.cmpop], type[ast.cmpop]]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
]
_ARITHMETIC: list[tuple[type[ast.operator], type[ast.operator]]] = [
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
    (ast.Div, ast.Mult),
    (ast.Mod, ast.FloorDiv),
    (ast.LShift, ast.RShift),
    (ast.BitAnd, ast.BitOr),
]
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{b: a for a, b in itertools.chain(_ARITHMETIC, _COMPARISONS)},
    **dict(itertools.chain(_ARITHMETIC, _COMPARISONS)),
    **{ast.And: ast.Or, ast.Or: ast.And},
}
_NEGATED_BY_SWAPS = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_NOT_RUN = ("annotation", "returns", "decorator_list", "bases", "type_params")


class Change(NamedTuple):
    """A range of the source's bytes, and what stands there in the mutant."""

    start: int
    end: int
    text: str

    def of(self, source: bytes) -> bytes:
        """The mutant."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def changes(source: bytes) -> list[Change]:
    """All mutants of a module, of which no two are alike."""
    begins = list(itertools.accumulate(map(len, source.splitlines(keepends=True)), initial=0))

    def change(node: Any, text: str) -> Change:
        start = begins[node.lineno - 1] + node.col_offset
        return Change(start, begins[node.end_lineno - 1] + node.end_col_offset, text)

    return [
        change(place, text)
        for node in _executed(ast.parse(source))
        for place, text in (*_of_statement(node), *_of_condition(node), *_of_expression(node))
    ]


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose value matters: no annotations, texts, logs, `strict=`."""
    is_strict = isinstance(node, ast.keyword) and node.arg == "strict"
    if is_strict or isinstance(node, ast.JoinedStr) or _is_logging(node):
        return
    yield node
    if isinstance(node, ast.Module | ast.ClassDef):
        node.body = [each for each in node.body if not _is_figure(each)]
    for field, value in ast.iter_fields(node):
        if field not in _NOT_RUN:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _executed(child)


def _is_figure(node: ast.stmt) -> bool:
    """Whether it gives a number a name, such as 1 << 20."""
    figures = ast.Constant | ast.UnaryOp | ast.BinOp | ast.unaryop | ast.operator
    return isinstance(node, ast.Assign) and all(
        isinstance(each, figures) for each in ast.walk(node.value)
    )


def _is_logging(node: ast.AST) -> bool:
    """Whether it is a call of a logger, or code for type checkers alone."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
        return node.test.id == "TYPE_CHECKING"
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("_log.", "logging."))


def _of_statement(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Drops a statement that has an effect beyond the function's variables."""
    drops = isinstance(node, ast.Raise | ast.Delete | ast.AugAssign)
    if isinstance(node, ast.Assign):
        drops = isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if isinstance(node, ast.Expr):
        drops = not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if drops:
        yield node, "pass"


def _of_condition(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
    if isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield test, f"({ast.unparse(test.operand)})"
        elif not (isinstance(test, ast.Compare) and isinstance(test.ops[0], _NEGATED_BY_SWAPS)):
            yield test, f"(not ({ast.unparse(test)}))"


def _of_expression(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for variant in _variants(node):
        text = ast.unparse(variant)
        yield node, text if isinstance(node, ast.stmt | ast.Constant | ast.Call) else f"({text})"


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    variant: Any = copy.copy(node)
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            variant.ops = [*node.ops]
            variant.ops[i] = _SWAPS[type(op)]()
            yield variant
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPS:
        if not (isinstance(node, ast.BinOp) and _has_text(node)):
            variant.op = _SWAPS[type(node.op)]()
            yield variant
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        variant.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield variant
    elif isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict"):
                variant.keywords = node.keywords[:i] + node.keywords[i + 1 :]
                yield variant


def _has_text(node: ast.BinOp) -> bool:
    """Whether it joins or formats texts."""
    texts = ast.JoinedStr | ast.List | ast.Tuple
    return any(
        isinstance(each, texts) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in (node.left, node.right)
    )
