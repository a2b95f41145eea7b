"""Turns grpo_kernels/formulas.py into a C++ header, so that the kernels run the one copy of the mathematics.

The formulas are branch-free functions of numbers; this reads the part of Python that they use and refuses any other.
Parameters are numbers (double), but flags (bool) where an `if` tests them, and texts where they are compared with one.
"""

from __future__ import annotations

import ast
import hashlib

NUMBER, FLAG, TEXT = "double", "bool", "std::string_view"
OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&&", ast.BitOr: "||", ast.And: "&&",
    ast.Or: "||", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.USub: "-", ast.Not: "!", ast.Invert: "!",
}  # fmt: skip
LANGUAGE = {"exp": "std::exp", "log": "std::log", "abs": "std::fabs", "sqrt": "std::sqrt"}


def digest(source: str) -> str:
    """Tells from which formulas a library was built."""
    return hashlib.sha256(source.encode()).hexdigest()


def header(source: str, *entries: str) -> str:
    """The C++ of some functions of `source` and of all that they call."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    made: dict[str, Function] = {}

    def make(name: str) -> None:
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in made:
                make(node.func.id)
        made[name] = Function(functions[name], made)

    for entry in entries:
        make(entry)
    body = "\n".join(function.code for function in made.values())
    return (
        "// Made from grpo_kernels/formulas.py by csrc/translate.py.\n#pragma once\n\n#include <cmath>\n"
        "#include <string_view>\n#include <tuple>\n\nnamespace grpo_kernels {\nnamespace formulas {\n\n"
        f"{body}\n"
        f'constexpr char kDigest[] = "{digest(source)}";\n\n'
        "}  // namespace formulas\n}  // namespace grpo_kernels\n"
    )


class Function:
    """One function as C++: `code`, and the types of its parameters and results."""

    def __init__(self, node: ast.FunctionDef, known: dict[str, Function]) -> None:
        self.name, self.known = node.name, known
        names = [argument.arg for argument in node.args.args]
        self.types = dict.fromkeys(names, NUMBER)
        for part in ast.walk(node):
            self._note_type(part)
        self.parameters = [self.types[name] for name in names]
        self.results: list[str] = []
        lines = self._block(node.body, "  ")
        local = [f"  {kind} {name}{{}};" for name, kind in self.types.items() if name not in names]
        given = ", ".join(f"{self.types[name]} {name}" for name in names)
        self.code = "\n".join([f"inline {self.result} {node.name}({given}) {{", *local, *lines, "}", ""])

    @property
    def result(self) -> str:
        """The C++ type that it returns."""
        return self.results[0] if len(self.results) == 1 else f"std::tuple<{', '.join(self.results)}>"

    def _refused(self, node: ast.AST) -> SyntaxError:
        return SyntaxError(f"csrc/translate.py: {self.name}: cannot turn into C++: {ast.unparse(node)}")

    def _note_type(self, node: ast.AST) -> None:
        """Parameters that are no numbers, from how they are used."""
        found: list[tuple[ast.AST, str]] = []
        if isinstance(node, ast.If | ast.IfExp):
            found = [(node.test, FLAG)]
        elif isinstance(node, ast.BoolOp):
            found = [(value, FLAG) for value in node.values]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = [(node.operand, FLAG)]
        elif isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
            found = [(node.left, TEXT)] if isinstance(node.comparators[0].value, str) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.where":
            found = [(node.args[0], FLAG)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found = [*zip(node.args, self.known[node.func.id].parameters, strict=True)]
        for part, kind in found:
            if isinstance(part, ast.Name) and part.id in self.types and kind != NUMBER:
                self.types[part.id] = kind

    def _block(self, body: list[ast.stmt], indent: str) -> list[str]:
        lines = []
        for node in body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                lines.append(indent + self._assign(node.targets[0], node.value))
            elif isinstance(node, ast.If):
                lines.append(f"{indent}if ({self._code(node.test)}) {{")
                lines += self._block(node.body, indent + "  ")
                if node.orelse:
                    lines += [f"{indent}}} else {{", *self._block(node.orelse, indent + "  ")]
                lines.append(f"{indent}}}")
            elif isinstance(node, ast.Return) and node.value is not None:
                lines.append(indent + self._return(node.value))
            else:
                raise self._refused(node)
        return lines

    def _assign(self, target: ast.expr, value: ast.expr) -> str:
        if isinstance(target, ast.Tuple):
            names = [name.id for name in target.elts if isinstance(name, ast.Name)]
            if isinstance(value, ast.Tuple):
                code = f"std::make_tuple({', '.join(map(self._code, value.elts))})"
                kinds = [self._type(one) for one in value.elts]
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                code, kinds = self._code(value), self.known[value.func.id].results
            else:
                raise self._refused(value)
            for name, kind in zip(names, kinds, strict=True):
                self.types.setdefault(name, kind)
            return f"std::tie({', '.join(names)}) = {code};"
        if not isinstance(target, ast.Name):
            raise self._refused(target)
        code = self._code(value)
        self.types.setdefault(target.id, self._type(value))
        return f"{target.id} = {code};"

    def _return(self, value: ast.expr) -> str:
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        codes = [self._code(one) for one in values]
        self.results = [self._type(one) for one in values]
        if len(values) == 1 and isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            self.results = self.known[value.func.id].results
        return f"return {codes[0]};" if len(codes) == 1 else f"return {{{', '.join(codes)}}};"

    def _type(self, node: ast.expr) -> str:
        if isinstance(node, ast.Compare | ast.BoolOp):
            return FLAG
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            return FLAG
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
            return FLAG
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.known[node.func.id].results[0]
        return self.types.get(node.id, NUMBER) if isinstance(node, ast.Name) else NUMBER

    def _code(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return f'"{node.value}"'
            if isinstance(node.value, bool):
                return str(node.value).lower()
            if isinstance(node.value, int | float):
                return repr(float(node.value))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return f"({self._code(node.left)} {OPERATORS[type(node.op)]} {self._code(node.right)})"
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return f"({OPERATORS[type(node.op)]}{self._code(node.operand)})"
        if isinstance(node, ast.BoolOp):
            return "(" + f" {OPERATORS[type(node.op)]} ".join(map(self._code, node.values)) + ")"
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self._code(node.left), self._code(node.comparators[0])
            return f"({left} {OPERATORS[type(node.ops[0])]} {right})"
        if isinstance(node, ast.Call) and not node.keywords:
            return self._call(node)
        raise self._refused(node)

    def _call(self, node: ast.Call) -> str:
        arguments = [self._code(argument) for argument in node.args]
        if isinstance(node.func, ast.Name):
            return f"{node.func.id}({', '.join(arguments)})"
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "tl":
            if node.func.attr == "where":
                condition, yes, no = arguments
                return f"({condition} ? {yes} : {no})"
            if node.func.attr in LANGUAGE:
                return f"{LANGUAGE[node.func.attr]}({', '.join(arguments)})"
        raise self._refused(node)
