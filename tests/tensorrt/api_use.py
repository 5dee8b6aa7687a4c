"""What source code uses of TensorRT's Python classes, found by following the types that the bindings themselves state.

pybind11 writes each signature into its docstring, so the result of `builder.create_network(...)` is known to be an
INetworkDefinition. Values start at `flavour.module` (the package) and at parameters annotated `trt.SomeClass`; from
there, attributes, calls, loops, local functions' return annotations and attributes of `self` are followed. A value of
TensorRT's whose type is not stated must not be looked into: that is reported, so that nothing passes unchecked.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

PACKAGE = "trt"
"""The name that annotations give the package."""


@dataclass(frozen=True)
class Use:
    """An attribute of a class of the package (of the package itself where `owner` is empty), and where it is used."""

    owner: str
    attribute: str
    place: str = field(compare=False, default="")


@dataclass(frozen=True)
class Package:
    """The package itself."""


@dataclass(frozen=True)
class Class:
    """A class of the package."""

    name: str


@dataclass(frozen=True)
class Instance:
    """An object of a class of the package."""

    name: str


@dataclass(frozen=True)
class Many:
    """Something that is looped over."""

    of: Any


@dataclass(frozen=True)
class Callable_:
    """A method or function with its docstring's signatures."""

    what: str
    signatures: tuple[Signature, ...]


@dataclass(frozen=True)
class Unstated:
    """A value of the package's whose type is not known."""

    what: str


@dataclass(frozen=True)
class Signature:
    """One overload: parameters without self, and what is returned."""

    parameters: tuple[Parameter, ...]
    returns: str


@dataclass(frozen=True)
class Parameter:
    """A parameter with the type that is stated, and whether it may be left out."""

    name: str
    kind: str
    optional: bool


class Reader:
    """Follows one module's source. `bindings` is the package whose statements are believed."""

    def __init__(self, bindings: ModuleType, file: str, source: str) -> None:
        self._bindings = bindings
        self._file = file
        self._tree = ast.parse(source)
        self._returns: dict[str, ast.expr] = {}
        self._self: dict[str, Any] = {}
        self.uses: set[Use] = set()
        self.problems: list[str] = []

    def read(self) -> Reader:
        """Follows everything; `uses` and `problems` are complete then."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                self._returns[node.name] = node.returns
        for _ in range(2):  # attributes of self may be set below where they are used
            self.uses.clear()
            self.problems.clear()
            self._block(self._tree.body, {})
        return self

    def _block(self, statements: list[ast.stmt], names: dict[str, Any]) -> None:
        for statement in statements:
            self._statement(statement, names)

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        if isinstance(node, ast.FunctionDef):
            self._function(node, dict(names), {})
        elif isinstance(node, ast.ClassDef):
            self._class(node, names)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, self._type(node.value, names), names)
        elif isinstance(node, ast.AnnAssign):
            value = self._type(node.value, names) if node.value else None
            self._assign(node.target, self._annotation(node.annotation) or value, names)
        elif isinstance(node, ast.For):
            looped = self._type(node.iter, names)
            self._assign(node.target, looped.of if isinstance(looped, Many) else None, names)
            self._block([*node.body, *node.orelse], names)
        elif isinstance(node, ast.With):
            for item in node.items:
                value = self._type(item.context_expr, names)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, value, names)
            self._block(node.body, names)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self._statement(child, names)
                elif isinstance(child, ast.ExceptHandler):
                    self._block(child.body, names)
                elif isinstance(child, ast.expr):
                    self._type(child, names)

    def _class(self, node: ast.ClassDef, names: dict[str, Any]) -> None:
        bases = [b for b in (self._type(base, names) for base in node.bases) if isinstance(b, Class)]
        for child in node.body:
            overridden: dict[str, str] = {}
            if isinstance(child, ast.FunctionDef) and bases and not child.name.startswith("_"):
                method = self._attribute(bases[0], child.name, child, "overrides")
                overridden = _kinds(method.signatures[0]) if isinstance(method, Callable_) else {}
            if isinstance(child, ast.FunctionDef):
                self._function(child, dict(names), overridden)
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):  # a field
                self._self[child.target.id] = self._annotation(child.annotation) or self._self.get(child.target.id)
            else:
                self._statement(child, names)

    def _function(self, node: ast.FunctionDef, names: dict[str, Any], stated: dict[str, str]) -> None:
        """A function's body; an overriding method's parameters have the types of the overridden one's, in order."""
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            names[argument.arg] = self._annotation(argument.annotation) if argument.annotation else None
        for argument, kind in zip(arguments[1:], stated.values(), strict=False):
            names[argument.arg] = self._stated(kind, argument.arg)
        self._block(node.body, names)

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Attribute):
            if isinstance(target.value, ast.Name) and target.value.id == "self":
                known = self._self.get(target.attr)
                self._self[target.attr] = known if value is None or (isinstance(value, Unstated) and known) else value
            else:
                self._type(target, names)
        elif isinstance(target, ast.Tuple):
            for element in target.elts:
                self._assign(element, None, names)
        else:
            self._type(target, names)

    def _type(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """What an expression is, of the package's; None for everything else."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute_expression(node, names)
        if isinstance(node, ast.Call):
            return self._call(node, names)
        if isinstance(node, ast.Await | ast.NamedExpr):
            value = self._type(node.value, names)
            if isinstance(node, ast.NamedExpr):
                self._assign(node.target, value, names)
            return value
        if isinstance(node, ast.IfExp | ast.BoolOp):
            branches = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            if isinstance(node, ast.IfExp):
                self._type(node.test, names)
            return next(filter(None, [self._type(branch, names) for branch in branches]), None)
        if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
            return self._comprehension(node, dict(names))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._type(child, names)
        return None

    def _comprehension(self, node: Any, names: dict[str, Any]) -> Any:
        for generator in node.generators:
            looped = self._type(generator.iter, names)
            self._assign(generator.target, looped.of if isinstance(looped, Many) else None, names)
            for condition in generator.ifs:
                self._type(condition, names)
        if isinstance(node, ast.DictComp):
            self._type(node.key, names)
            self._type(node.value, names)
            return None
        element = self._type(node.elt, names)
        return Many(element) if element is not None else None

    def _attribute_expression(self, node: ast.Attribute, names: dict[str, Any]) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self._self:
            return self._self[node.attr]
        owner = self._type(node.value, names)
        if owner is None:
            return Package() if node.attr == "module" else None
        return self._attribute(owner, node.attr, node)

    def _attribute(self, owner: Any, name: str, node: ast.AST, verb: str = "uses") -> Any:
        place = f"{self._file}:{getattr(node, 'lineno', 0)}"
        if name.startswith("__"):
            return None  # of Python's own
        if not isinstance(owner, Package | Class | Instance):
            self.problems.append(f"{place}: {verb} .{name} of a value whose type is not stated: {owner}")
            return None
        holder: Any = self._bindings if isinstance(owner, Package) else getattr(self._bindings, owner.name, None)
        for part in owner.name.split(".")[1:] if not isinstance(owner, Package) else ():
            holder = getattr(holder, part, None)
        owner_name = "" if isinstance(owner, Package) else owner.name
        self.uses.add(Use(owner_name, name, place))
        return self._member(owner, owner_name, holder, name)

    def _member(self, owner: Any, owner_name: str, holder: Any, name: str) -> Any:
        member = inspect.getattr_static(holder, name, None)
        full = f"{owner_name}.{name}".lstrip(".")
        if member is None:
            return Unstated(full)
        if inspect.isclass(member):
            return Class(full)
        if isinstance(member, property):
            return self._stated(_signatures(member.fget.__doc__ or "")[0].returns, full)
        if isinstance(getattr(holder, name), holder if inspect.isclass(holder) else ()):
            return Instance(owner_name)  # a member of an enumeration
        return Callable_(full, tuple(_signatures(getattr(holder, name).__doc__ or "")))

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        function = self._type(node.func, names)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._type(argument, names)
        if isinstance(function, Class):
            made = getattr(self._bindings, function.name)
            self._check_call(node, Callable_(function.name, tuple(_signatures(made.__init__.__doc__ or ""))))
            return Instance(function.name)
        if isinstance(function, Callable_):
            self._check_call(node, function)
            kinds = {signature.returns for signature in function.signatures}
            return self._stated(kinds.pop(), function.what) if len(kinds) == 1 else Unstated(function.what)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        return self._annotation(self._returns[name]) if name in self._returns else None

    def _check_call(self, node: ast.Call, function: Callable_) -> None:
        """Whether one of the signatures takes these arguments."""
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            return
        given = {str(keyword.arg) for keyword in node.keywords}
        for signature in function.signatures:
            rest = signature.parameters[len(node.args) :]
            needed = {p.name for p in rest if not p.optional}
            if len(node.args) <= len(signature.parameters) and needed <= given <= {p.name for p in rest}:
                return
        self.problems.append(
            f"{self._file}:{node.lineno}: {function.what} takes no such arguments: {ast.unparse(node)}"
        )

    def _annotation(self, node: ast.expr) -> Any:
        """What an annotation says: `trt.X`, with or without `| None`, or an iterable of it."""
        if isinstance(node, ast.BinOp):
            return self._annotation(node.left) or self._annotation(node.right)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE:
            self.uses.add(Use("", node.attr, f"{self._file}:{node.lineno}"))
            return Instance(node.attr)
        if isinstance(node, ast.Subscript):
            inner = self._annotation(node.slice)
            return Many(inner) if inner is not None else None
        return None

    def _stated(self, kind: str, what: str) -> Any:
        """The type that a signature states; None for Python's own."""
        match = re.search(r"\btensorrt\w*\.tensorrt\w*\.([\w.]+)", kind)
        if match:
            return Many(Instance(match[1])) if kind.startswith(("list", "List")) else Instance(match[1])
        own = re.fullmatch(r"(None|int|str|bool|float|bytes|dict|list|tuple|typing\.\w+)(\[.*\])?", kind)
        return None if own else Unstated(f"{what} -> {kind}")


def _signatures(doc: str) -> list[Signature]:
    """The overloads that a docstring of pybind11's states."""
    found = []
    for line in doc.splitlines():
        match = re.match(r"(?:\d+\. )?\w*\((.*)\) -> (.+?)\s*$", line)
        if match and not match[1].startswith("*args"):
            found.append(Signature(tuple(map(_parameter, _split(match[1])[1:])), match[2]))
    return found or [Signature((), "nothing")]


def _kinds(signature: Signature) -> dict[str, str]:
    return {parameter.name: parameter.kind for parameter in signature.parameters}


def _parameter(text: str) -> Parameter:
    name, _, rest = text.partition(":")
    kind, default, _ = rest.partition(" = ")
    return Parameter(name.strip(), kind.strip(), bool(default))


def _split(parameters: str) -> list[str]:
    """Parts between commas that no bracket holds."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(parameters):
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            parts.append(parameters[start:index])
            start = index + 1
    return [*parts, parameters[start:]]
