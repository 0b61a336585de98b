"""Rewrite the code of an attention's forward, so that its norms and rope functions are called through a `Pass`.

`self.q_norm(x)` becomes `_pass.norm("q_norm", self.q_norm, x)`, and `apply_rotary_pos_emb(q, k, cos, sin)` becomes
`_pass.rope("apply_rotary_pos_emb", apply_rotary_pos_emb, q, k, cos, sin)`. Their results may be deferred (`_deferred`).
A name to which such a result, or a view of it, is assigned anywhere may hold one too. These expressions stay where they
are assigned to names, viewed, normalised or rotated. Everywhere else they become `_pass.real(...)`. `_pass.settled`
comes before code that changes tensors, which may be those that a pending launch reads. All else stays.
"""

from __future__ import annotations

import ast
import copy
import linecache
import math
import re
from collections.abc import Iterable
from types import CodeType
from typing import Any

from ._variants import OF_K, OF_Q

VIEWS = ("transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "to")

_PASS = "_jitrope_pass"
_SETTLE = f"{_PASS}.settled(None)"
_CHANGES = re.compile(r"_$|set_|enter_context")
"""The names of methods and functions that change a tensor (`mul_`), or a mode of torch."""
_NOT_THE_CODE = "its loaded code is not that of its source"


class Source:
    """The source of a function, and what flows from norms to rope functions in it.

    function: the host's, without decorators. ropes: the parameters of each rope function, by its name in the code.
    Raises ValueError with the reason if the code cannot be rewritten.
    """

    def __init__(self, function: Any, ropes: dict[str, tuple[str, ...]]) -> None:
        self.function, self.ropes = function, ropes
        lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
        try:
            whole = ast.parse("".join(lines))
        except SyntaxError:
            raise ValueError(_NOT_THE_CODE) from None
        # The compiler treats calls of imported names in its own way, so the imports are compiled too.
        self.imports = [node for node in whole.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        found = [node for node in ast.walk(whole) if self._is_it(node)]
        if len(found) != 1 or not isinstance(found[0], ast.FunctionDef):
            raise ValueError(_NOT_THE_CODE if lines else "its source is not there")
        self.tree = found[0]
        self.me = self.tree.args.args[0].arg if self.tree.args.args else ""
        if _text(self._compiled(self.tree)) != _text(function.__code__):
            raise ValueError(_NOT_THE_CODE)

    def modules(self) -> list[str]:
        """The names of the modules that are called with one argument."""
        return sorted({name for node in ast.walk(self.tree) if (name := self._called(node))})

    def order(self, norms: Iterable[str]) -> str:
        """ "before" or "after": the place of the norms at a rope function. "": some or all are at none."""
        found, norms = "", set(norms)
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            heads = self._heads(node) if self._rope(node) else []
            if heads and all(map(_Names(self, norms, False, node.lineno).later, heads)):
                return "before"
            if self._called(node) in norms and _Names(self, (), True, node.lineno).later(node.args[0]):
                found = "after"
        return found

    def rewritten(self, norms: Iterable[str], plan: str, after: bool) -> CodeType:
        """The function's code with a `Pass` of the plan with this global name. after: the norms follow rope."""
        tree = _Rewriter(self, _Names(self, norms, True)).visit(copy.deepcopy(self.tree))
        inner = [x for x in ast.walk(tree) if isinstance(x, (ast.FunctionDef, ast.Lambda)) and x is not tree]
        if any(f"{_PASS}.settled" in ast.unparse(x) for x in inner):  # it may run in a mode of its own
            raise ValueError("a function inside of it changes a tensor in place")
        settles = f"{_PASS}.settled" in ast.unparse(tree)
        if after and settles:  # a rotation may be computed again, for another use
            raise ValueError("a tensor is changed in place, and the norms are after rope")
        tree.body = [_statement(f"{_PASS} = {plan}.begin({settles})", tree.body[0]), *tree.body]
        return self.code_of(tree)

    def code_of(self, tree: ast.FunctionDef) -> CodeType:
        """The code of a changed tree, at the place of the host's."""
        host = self.function.__code__
        place = {name: getattr(host, name) for name in ("co_firstlineno", "co_qualname") if hasattr(host, name)}
        return self._compiled(tree).replace(**place)

    def _is_it(self, node: ast.AST) -> bool:
        """Whether a node is the function's definition."""
        if not isinstance(node, ast.FunctionDef) or node.name != self.function.__code__.co_name:
            return False
        lines = [node.lineno, *(part.lineno for part in node.decorator_list)]
        return min(lines) == self.function.__code__.co_firstlineno  # type: ignore[no-any-return]

    def _compiled(self, tree: ast.FunctionDef) -> CodeType:
        """The code of the function, compiled in a class of its name, as the host's."""
        bare = ast.FunctionDef(**{**vars(tree), "decorator_list": [], "returns": None})
        owner = self.function.__qualname__.split(".")[-2:][0]
        made: Any = ast.parse(f"class {owner}: pass")
        made.body[0].body = [ast.fix_missing_locations(bare)]
        made.body = [*self.imports, *made.body]
        code: Any = compile(made, self.function.__code__.co_filename, "exec", dont_inherit=True)
        for name in (owner, tree.name):
            code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
        return code  # type: ignore[no-any-return]

    def _called(self, node: ast.AST) -> str:
        """The name of the module that is called: `self.name(x)`; "" for other code."""
        match node:
            case ast.Call(ast.Attribute(ast.Name(owner), name), [_], []) if owner == self.me:
                return name
        return ""

    def _rope(self, node: ast.AST) -> str:
        """The name of the rope function that is called, or ""."""
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.ropes
        return node.func.id if named else ""  # type: ignore[attr-defined]

    def _heads(self, call: ast.Call) -> list[ast.expr]:
        """The arguments of a rope function that are rotated; none if one is missing."""
        names = self.ropes[self._rope(call)]
        given = {**dict(zip(names, call.args)), **{word.arg or "": word.value for word in call.keywords}}
        heads = [name for name in names if name in (*OF_Q, *OF_K)]
        return [given[name] for name in heads] if all(name in given for name in heads) else []


def _text(code: CodeType) -> tuple[Any, ...]:
    """All of a code that follows from its source, but for the code of functions in it."""
    others = [x for x in code.co_consts if not isinstance(x, CodeType)]
    constants = [sorted(map(repr, x)) if isinstance(x, frozenset) else repr(x) for x in others]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _statement(text: str, place: ast.stmt) -> ast.stmt:
    made = ast.parse(text).body[0]
    for node in ast.walk(made):
        ast.copy_location(node, place)
    return made


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """The parts of a tuple of targets with their values, if the values are a tuple of as many; else none."""
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple) or len(target.elts) != len(value.elts):
        return []
    starred = any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts))
    return [] if starred else list(zip(target.elts, value.elts))


def _is_part(target: ast.expr) -> bool:
    """Whether a target assigns to a part of a tensor, or to an attribute."""
    stored = [x for x in ast.walk(target) if isinstance(getattr(x, "ctx", None), ast.Store)]
    return any(isinstance(x, (ast.Subscript, ast.Attribute)) for x in stored)


class _Names:
    """The names that may hold a deferred result: of these norms, and of rope functions if asked; before a line."""

    def __init__(self, source: Source, norms: Iterable[str], turned: bool, line: float = math.inf) -> None:
        self.source, self.norms, self.turned = source, set(norms), turned
        self.names: set[str] = set()
        assigned = [node for node in ast.walk(source.tree) if isinstance(node, ast.Assign) and node.lineno < line]
        size = -1
        while size != len(self.names):
            size = len(self.names)
            for node in assigned:
                for target in node.targets:
                    self._assign(target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if self.later(value):
                self.names.add(target.id)
        elif isinstance(target, ast.Tuple):
            for part, given in _pairs(target, value) or [(part, value) for part in target.elts]:
                self._assign(part, given)

    def later(self, node: ast.AST) -> bool:
        """Whether an expression may be deferred."""
        if isinstance(node, ast.Name):
            return node.id in self.names and isinstance(node.ctx, ast.Load)
        if not isinstance(node, ast.Call):
            return False
        if self.source._called(node) in self.norms or (self.turned and bool(self.source._rope(node))):
            return True
        return isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS and self.later(node.func.value)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, source: Source, names: _Names) -> None:
        self.source, self.names = source, names

    def visit(self, node: ast.AST) -> Any:
        """Rewrite any code; a deferred expression becomes real."""
        if self.names.later(node):
            return ast.copy_location(_call("real", self.kept(node)), node)
        if isinstance(node, (ast.For, ast.comprehension, ast.withitem)):
            target = node.optional_vars if isinstance(node, ast.withitem) else node.target
            if target is not None and _is_part(target):
                raise ValueError("a loop or a `with` assigns to a part of a tensor")
        return super().visit(node)

    def kept(self, node: Any) -> Any:
        """Rewrite an expression whose result may stay deferred."""
        if not self.names.later(node) or isinstance(node, ast.Name):
            return node if isinstance(node, ast.Name) else self.visit(node)
        name, rope = self.source._called(node), self.source._rope(node)
        if name in self.names.norms:
            made = _call("norm", ast.Constant(name), node.func, self.kept(node.args[0]))
        elif rope:
            made = _call("rope", ast.Constant(rope), node.func, *map(self.kept, node.args))
            made.keywords = [ast.keyword(word.arg, self.kept(word.value)) for word in node.keywords]
        else:
            node.func.value = self.kept(node.func.value)
            node.args = [self.visit(x) for x in node.args]
            node.keywords = [ast.keyword(word.arg, self.visit(word.value)) for word in node.keywords]
            made = node
        return ast.copy_location(made, node)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """All is computed before a call that may change a tensor, or a mode of torch."""
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        flags = [x for x in node.args if isinstance(x, ast.Constant) and x.value is True]  # perhaps `inplace`
        if flags or _CHANGES.search(name) or any(word.arg in ("out", "inplace") for word in node.keywords):
            node.func = ast.copy_location(_call("settled", node.func), node.func)
        return node

    def visit_With(self, node: ast.With) -> Any:
        """A context may change a mode of torch, so nothing is deferred into it or out of it."""
        if any(map(self.names.later, ast.walk(node))):
            raise ValueError("a norm, rope or its result is in a `with` statement")
        self.generic_visit(node)
        return [_statement(_SETTLE, node), node] if f"{_PASS}.settled" in ast.unparse(node) else node

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        """A deferred result may be assigned to names. All is computed before a part of a tensor is assigned."""
        inside = any(map(_is_part, node.targets))
        node.value = self.visit(node.value) if inside else self._kept_for(node.targets, node.value)
        node.targets = [self.visit(target) for target in node.targets]
        return [*([_statement(_SETTLE, node)] if inside else []), node]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt]:
        """All is computed before a part of a tensor is assigned."""
        self.generic_visit(node)
        return [*([_statement(_SETTLE, node)] if _is_part(node.target) else []), node]

    def _kept_for(self, targets: list[ast.expr], value: ast.expr) -> Any:
        if len(targets) == 1 and (pairs := _pairs(targets[0], value)):
            value.elts = [self._kept_for([target], part) for target, part in pairs]  # type: ignore[attr-defined]
            return value
        parts = [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
        return self.kept(value) if all(isinstance(part, ast.Name) for part in parts) else self.visit(value)

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        """A name that is changed in place must hold a tensor. All else is computed before."""
        self.generic_visit(node)
        before = [_statement(_SETTLE, node)]
        if isinstance(node.target, ast.Name) and node.target.id in self.names.names:
            before.append(_statement(f"{node.target.id} = {_PASS}.real({node.target.id})", node))
        return [*before, node]


def _call(method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(_PASS, ast.Load()), method, ast.Load()), list(arguments), [])
