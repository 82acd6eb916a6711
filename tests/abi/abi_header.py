# SPDX-License-Identifier: Apache-2.0
"""The public header as a C compiler and a C parser see it: functions, structs with offsets, constants."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycparser import c_ast, c_parser

HEADER = Path(__file__).resolve().parents[2] / "include" / "nvte_ep" / "nvte_ep.h"
PREFIX = "nvte_ep_"
COMPILER = os.environ.get("CC", "gcc")


@dataclass
class Struct:
    """fields: (name, C type, offset, size)."""

    size: int = 0
    fields: list[tuple[str, str, int, int]] = field(default_factory=list)


@dataclass
class Header:
    """functions: name -> (return type, argument types). constants: enumerators and plain integer macros."""

    functions: dict[str, tuple[str, list[str]]]
    structs: dict[str, Struct]
    constants: dict[str, int]


def _preprocessed() -> str:
    # The parser knows C, not the extensions of the system headers.
    flags = [
        "-std=c99",
        "-E",
        "-P",
        "-D__attribute__(x)=",
        "-D__extension__=",
        "-D__asm__(x)=",
        "-D__inline=inline",
    ]
    return subprocess.run([COMPILER, *flags, str(HEADER)], check=True, capture_output=True, text=True).stdout


def c_type(node: Any) -> str:
    """A type in one spelling: "const nvte_ep_tensor_t*", "int64_t[4]", "void(*)(void*, size_t)"."""
    if isinstance(node, c_ast.TypeDecl):
        name = (
            " ".join(node.type.names)
            if isinstance(node.type, c_ast.IdentifierType)
            else f"struct {node.type.name}"
        )
        return " ".join([*node.quals, name])
    if isinstance(node, c_ast.PtrDecl):
        if isinstance(node.type, c_ast.FuncDecl):
            return f"{c_type(node.type.type)}(*)({', '.join(_arguments(node.type))})"
        return c_type(node.type) + "*" + "".join(f" {qualifier}" for qualifier in node.quals)
    if isinstance(node, c_ast.ArrayDecl):
        return f"{c_type(node.type)}[{node.dim.value}]"
    raise TypeError(f"no spelling for {type(node).__name__}")


def _arguments(function: c_ast.FuncDecl) -> list[str]:
    arguments = [c_type(argument.type) for argument in function.args.params] if function.args else []
    return [] if arguments == ["void"] else arguments


def _macros() -> list[str]:
    """Macros that are plain integers."""
    return re.findall(r"^#define (NVTE_EP_\w+) +\d+$", HEADER.read_text(), re.MULTILINE)


def _measure(structs: dict[str, list[tuple[str, str]]], constants: list[str]) -> dict[str, int]:
    """What the compiler says: sizeof, offsetof and values, by expression."""
    expressions = list(constants)
    for name, members in structs.items():
        expressions.append(f"sizeof({name})")
        for member, _ in members:
            expressions += [f"offsetof({name}, {member})", f"sizeof((({name}*)0)->{member})"]
    prints = [
        f'  printf("%s\\"%s\\": %lld", "{", " if index else ""}", "{text}", (long long)({text}));'
        for index, text in enumerate(expressions)
    ]
    program = "\n".join(
        [
            f'#include "{HEADER}"',
            "#include <stdio.h>",
            "int main(void) {",
            '  printf("{");',
            *prints,
            '  printf("}");',
            "  return 0;",
            "}\n",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "layout.c"), Path(folder, "layout")
        source.write_text(program)
        subprocess.run([COMPILER, "-std=c99", "-w", str(source), "-o", str(binary)], check=True)
        output = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout
    measured: dict[str, int] = json.loads(output)
    return measured


def read_header() -> Header:
    functions: dict[str, tuple[str, list[str]]] = {}
    members: dict[str, list[tuple[str, str]]] = {}
    enumerators: list[str] = []
    for node in c_parser.CParser().parse(_preprocessed()).ext:
        declared = getattr(node, "type", None)
        if (
            isinstance(node, c_ast.Decl)
            and isinstance(declared, c_ast.FuncDecl)
            and node.name.startswith(PREFIX)
        ):
            functions[node.name] = (c_type(declared.type), _arguments(declared))
        elif (
            isinstance(node, c_ast.Typedef)
            and node.name.startswith(PREFIX)
            and isinstance(declared.type, c_ast.Struct)
        ):
            if declared.type.decls:
                members[node.name] = [(decl.name, c_type(decl.type)) for decl in declared.type.decls]
        elif isinstance(node, c_ast.Decl) and isinstance(declared, c_ast.Enum) and declared.values:
            enumerators += [
                value.name for value in declared.values.enumerators if value.name.startswith("NVTE_EP_")
            ]
    names = enumerators + _macros()
    measured = _measure(members, names)
    structs = {
        name: Struct(
            measured[f"sizeof({name})"],
            [
                (
                    member,
                    kind,
                    measured[f"offsetof({name}, {member})"],
                    measured[f"sizeof((({name}*)0)->{member})"],
                )
                for member, kind in fields
            ],
        )
        for name, fields in members.items()
    }
    return Header(functions, structs, {name: measured[name] for name in names})
