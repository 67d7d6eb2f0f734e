"""Parse high-IR text (`*.dk`): Python's own parser gives true positions, this module the IR.

`parse_high(Source) -> Unit`. Everything outside the language is reported at once, with spans and
hints.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dovetail.ir.diagnostics import Diagnostic, Source, Span
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.expr import Index, Int, Name, NamedType
from dovetail.ir.high import nodes as high
from dovetail.ir.high.parse_expr import BINARY_OPS, ExprParser, Reporter
from dovetail.ir.node import MOST_NESTING, NESTING_HINT

MOST_CHOICES = 1 << 16
"""Of a tunable: each is a kernel of its own."""
LOOP_KINDS = ("range", "unroll", "vrange")
KINDS = ("kernel", "inline")
FORMS = {"regs": "regs((rows, columns), f32)", "local": "local(size, f32)"}
"""What makes variables that are memory, as it is written."""
NOTE = re.compile(r"^# note: (.*)$", re.MULTILINE)
STATEMENT_HINTS: dict[type[ast.AST], str] = {
    ast.ClassDef: "kernels are plain functions",
    ast.ImportFrom: "write `import module`; its @inline functions become visible",
    ast.Try: "kernels have no exceptions",
    ast.With: "kernels have no context managers",
    ast.FunctionDef: "functions stand at module level",
    ast.Assert: "check arguments before the call",
}


def parse_high(source: Source) -> high.Unit:
    """Return the module in `source`; raises SyntaxDiagnostic with every fault found."""
    try:
        tree = ast.parse(source.text, source.name)
        _check_depth(tree, source)
        return _ModuleParser(source).module(tree)
    except SyntaxError as error:
        raise SyntaxDiagnostic([_python_fault(source, error)]) from None
    except (RecursionError, MemoryError):
        raise SyntaxDiagnostic([_whole(source, "the text is nested too deeply")]) from None
    except ValueError as error:  # null bytes, integers too long to convert
        raise SyntaxDiagnostic([_whole(source, str(error))]) from None


def _python_fault(source: Source, error: SyntaxError) -> Diagnostic:
    line, column = error.lineno or 1, max(1, error.offset or 1)
    end_line, end_column = error.end_lineno or line, error.end_offset or column + 1
    span = Span(line, column, max(line, end_line), max(column + 1, end_column))
    return Diagnostic("high-syntax", error.msg, span, source)


def _whole(source: Source, message: str) -> Diagnostic:
    return Diagnostic("high-syntax", message, Span(1, 1, 1, 2), source)


def _check_depth(tree: ast.Module, source: Source) -> None:
    waiting: list[tuple[ast.AST, int]] = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MOST_NESTING and hasattr(node, "lineno"):
            message = f"this is nested more than {MOST_NESTING} levels deep"
            place = Reporter(source).span(node)
            raise SyntaxDiagnostic(
                [Diagnostic("high-nesting", message, place, source, NESTING_HINT)]
            )
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)]


class _ModuleParser:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.report = Reporter(source)
        self.parser = ExprParser(self.report)
        self._statements: dict[type[ast.AST], Callable[[Any, Span], high.Stmt | None]] = {
            ast.Assign: self._assign,
            ast.AnnAssign: self._annotated,
            ast.AugAssign: self._augmented,
            ast.Expr: self._expression,
            ast.If: self._if,
            ast.For: self._for,
            ast.While: self._while,
            ast.Return: self._return,
            ast.Break: lambda node, span: high.Break(span=span),
            ast.Continue: lambda node, span: high.Continue(span=span),
            ast.Pass: lambda node, span: None,
        }

    # ---- module and functions ----

    def module(self, tree: ast.Module) -> high.Unit:
        doc, body = _split_doc(tree.body)
        functions: list[high.Function] = []
        imports: list[str] = []
        for node in body:
            if isinstance(node, ast.FunctionDef):
                functions.append(self._function(node))
            elif isinstance(node, ast.Import):
                imports += self._import(node)
            else:
                self._unsupported(node, "at module level")
        self.report.finish()
        notes = tuple(NOTE.findall(self.source.text))
        return high.Unit(functions=tuple(functions), imports=tuple(imports), doc=doc, notes=notes)

    def _import(self, node: ast.Import) -> list[str]:
        for alias in node.names:
            if alias.asname or "." in alias.name:
                self.report.add("high-bad-import", "write `import module`", alias)
        return [alias.name for alias in node.names]

    def _function(self, node: ast.FunctionDef) -> high.Function:
        doc, body = _split_doc(node.body)
        tunables: list[high.Tunable] = []
        while body and _is_tunable(body[0]):
            tunables += self._tunable(body[0])
            body = body[1:]
        return high.Function(
            kind=self._kind(node),
            name=node.name,
            params=self._params(node.args),
            returns=self.parser.type(node.returns) if node.returns else None,
            tunables=tuple(tunables),
            body=self._block(body),
            doc=doc,
            span=self._head_span(node),
        )

    def _head_span(self, node: ast.FunctionDef) -> Span:
        line = self.source.line(node.lineno)
        return Span(node.lineno, node.col_offset + 1, node.lineno, len(line) + 1)

    def _kind(self, node: ast.FunctionDef) -> str:
        names = [d.id if isinstance(d, ast.Name) else "" for d in node.decorator_list]
        if len(names) == 1 and names[0] in KINDS:
            return names[0]
        self.report.add(
            "high-bad-decorator",
            f"`{node.name}` must carry exactly one decorator: @kernel or @inline",
            node.decorator_list[-1] if names else self._head_span(node),
        )
        return "inline"

    def _params(self, args: ast.arguments) -> tuple[high.Param, ...]:
        odd: list[ast.AST] = [*args.posonlyargs, *args.kwonlyargs, *args.defaults]
        odd += [item for item in (args.vararg, args.kwarg, *args.kw_defaults) if item]
        for item in odd:
            self.report.add(
                "high-bad-parameter",
                "parameters are written `name: type`, without defaults, stars or slashes",
                item,
            )
        return tuple(self._param(arg) for arg in args.args)

    def _param(self, arg: ast.arg) -> high.Param:
        span = self.report.span(arg)
        if arg.annotation is None:
            self.report.add(
                "high-bad-parameter", f"`{arg.arg}` has no type", arg, "write `name: f32`"
            )
            return high.Param(name=arg.arg, type=NamedType(name="f32", span=span), span=span)
        return high.Param(name=arg.arg, type=self.parser.type(arg.annotation), span=span)

    # ---- tunables ----

    def _tunable(self, node: Any) -> list[high.Tunable]:
        span, call = self.report.span(node), node.value
        if _called(call) != "choice":
            self.report.add(
                "high-bad-choice",
                f"`{node.target.id}: param` needs `= choice(...)`",
                node,
                "for example `MR: param = choice(range(1, 7), default=4)`",
            )
            return []
        choices = [item for arg in call.args for item in self._choices(arg)]
        given = [self._choice(k.value) for k in call.keywords if k.arg == "default"]
        for keyword in (k for k in call.keywords if k.arg != "default"):
            self.report.add("high-bad-choice", "the only keyword is `default`", keyword)
        if not choices:
            if not call.args:
                self.report.add("high-bad-choice", f"`{node.target.id}` has no choices", call)
            return []
        default = given[0] if given else choices[0]
        return [
            high.Tunable(name=node.target.id, choices=tuple(choices), default=default, span=span)
        ]

    def _choices(self, node: ast.expr) -> list[int | str]:
        if isinstance(node, ast.Call) and _called(node) == "range":
            bounds = [self._choice(arg) for arg in node.args]
            if bounds and all(isinstance(b, int) for b in bounds) and bounds[2:] != [0]:
                values = range(*(int(b) for b in bounds[:3]))
                if not values[MOST_CHOICES:]:
                    return list(values)
                self.report.add("high-bad-choice", f"more than {MOST_CHOICES} choices", node)
                return []
            self.report.add("high-bad-choice", "`range` takes 1 to 3 integer literals", node)
            return []
        return [self._choice(node)]

    def _choice(self, node: ast.expr) -> int | str:
        value = None
        with suppress(ValueError, TypeError):  # no literal, or a set of lists
            value = ast.literal_eval(node)
        if isinstance(value, str) and value.isidentifier():
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self.report.add(
            "high-bad-choice", "choices are integer literals, dtype names in quotes or ranges", node
        )
        return 0

    # ---- statements ----

    def _block(self, body: Sequence[ast.stmt]) -> tuple[high.Stmt, ...]:
        return tuple(stmt for node in body if (stmt := self._statement(node)))

    def _statement(self, node: ast.stmt) -> high.Stmt | None:
        """Return the statement of `node`; None where there is none, or a fault was reported."""
        handler = self._statements.get(type(node))
        if handler is None:
            return self._unsupported(node, "in a kernel")
        return handler(node, self.report.span(node))

    def _unsupported(self, node: ast.stmt, where: str) -> high.Stmt | None:
        span = self.report.span(node)
        line = self.source.line(span.line)
        self.report.add(
            "high-unsupported-statement",
            f"{type(node).__name__} cannot stand {where}",
            Span(span.line, span.column, span.line, max(span.column + 1, len(line) + 1)),
            STATEMENT_HINTS.get(type(node)),
        )
        return None

    def _target(self, node: ast.expr) -> Name | Index:
        target = self.parser.expr(node) if isinstance(node, ast.Name | ast.Subscript) else None
        if isinstance(target, Name | Index):
            return target
        self.report.add(
            "high-bad-target", "only a name, `p[i]` or `tile[i, j]` can be assigned", node
        )
        return Name(id="_")

    def _assign(self, node: ast.Assign, span: Span) -> high.Stmt | None:
        if len(node.targets) > 1:
            self.report.add("high-bad-target", "assign one target at a time", node)
        target = node.targets[0]
        match target, node.value:
            case ast.Name(name), ast.Call(ast.Name("regs"), [ast.Tuple(elts), ast.Name(elem)], []):
                shape = tuple(map(self.parser.expr, elts))
                return high.Regs(name=name, shape=shape, elem=elem, span=span)
            case ast.Name(name), ast.Call(ast.Name("local"), [size, ast.Name(elem)], []):
                return high.Local(name=name, size=self.parser.expr(size), elem=elem, span=span)
            case _, ast.Call(ast.Name("regs" | "local" as form)):
                self.report.add(f"high-bad-{form}", f"write `name = {FORMS[form]}`", node.value)
                return None
        place = self._target(target)
        return high.Assign(target=place, value=self.parser.expr(node.value), span=span)

    def _annotated(self, node: ast.AnnAssign, span: Span) -> high.Stmt | None:
        if _is_tunable(node):
            self.report.add("high-bad-choice", "tunables stand at the start of the function", node)
            return None
        if node.value is None or not isinstance(node.target, ast.Name):
            self.report.add(
                "high-bad-target", "a typed assignment names a variable and its value", node
            )
            return None
        target, kind = self._target(node.target), self.parser.type(node.annotation)
        value = self.parser.expr(node.value)
        return high.Assign(target=target, value=value, type=kind, span=span)

    def _augmented(self, node: ast.AugAssign, span: Span) -> high.Stmt | None:
        op = BINARY_OPS.get(type(node.op))
        if op is None:
            return self._unsupported(node, "in a kernel")
        target, value = self._target(node.target), self.parser.expr(node.value)
        return high.Assign(target=target, value=value, op=f"{op}=", span=span)

    def _expression(self, node: ast.Expr, span: Span) -> high.Stmt | None:
        if not isinstance(node.value, ast.Call):
            self.report.add(
                "high-unused-value", "this value is computed and thrown away", node, "assign it"
            )
            return None
        return high.ExprStmt(expr=self.parser.expr(node.value), span=span)

    def _if(self, node: ast.If, span: Span) -> high.Stmt | None:
        cond = self.parser.expr(node.test)
        then, other = self._block(node.body), self._block(node.orelse)
        return high.If(cond=cond, then=then, other=other, span=span)

    def _while(self, node: ast.While, span: Span) -> high.Stmt | None:
        self._no_else(node.orelse)
        cond = self.parser.expr(node.test)
        return high.While(cond=cond, body=self._block(node.body), span=span)

    def _for(self, node: ast.For, span: Span) -> high.Stmt | None:
        self._no_else(node.orelse)
        call, kind = node.iter, _called(node.iter)
        limit = 2 if kind == "vrange" else 3
        if (
            not isinstance(call, ast.Call)
            or kind not in LOOP_KINDS
            or not isinstance(node.target, ast.Name)
        ):
            self.report.add(
                "high-bad-loop",
                "loops are written `for name in range(...)`, `unroll(...)` or `vrange(...)`",
                node.iter,
            )
            return None
        if not 1 <= len(call.args) <= limit or call.keywords:
            self.report.add("high-bad-loop", f"`{kind}` takes 1 to {limit} arguments", call)
            return None
        bounds = [self.parser.expr(arg) for arg in call.args]
        start, stop, *rest = bounds if len(bounds) > 1 else (Int(value=0), *bounds)
        step = rest[0] if rest else Int(value=1)
        body, var = self._block(node.body), node.target.id
        return high.For(kind=kind, var=var, start=start, stop=stop, step=step, body=body, span=span)

    def _no_else(self, orelse: Sequence[ast.stmt]) -> None:
        if orelse:
            self.report.add("high-bad-loop", "loops have no `else`", orelse[0])

    def _return(self, node: ast.Return, span: Span) -> high.Stmt | None:
        value = self.parser.expr(node.value) if node.value else None
        return high.Return(value=value, span=span)


def _called(node: ast.expr | None) -> str | None:
    match node:
        case ast.Call(func=ast.Name(name)):
            return name
    return None


def _is_tunable(node: ast.stmt) -> bool:
    match node:
        case ast.AnnAssign(target=ast.Name(), annotation=ast.Name("param")):
            return True
    return False


def _split_doc(body: list[ast.stmt]) -> tuple[str, list[ast.stmt]]:
    match body:
        case [ast.Expr(ast.Constant(str(doc))), *rest]:
            return inspect.cleandoc(doc), rest
    return "", body
