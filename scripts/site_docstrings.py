"""What griffe, which reads the docstrings for the site, must be told. mkdocs.yml names this file.

The layers of Keras are made while a program runs. For whoever reads the sources there are classes
in their place, whose docstrings say "See `TablePart`.": on the site they have the docstring of that
base.
"""

import re
from typing import Any

import griffe

_SEE = re.compile(r"See `(\w+)`\.")


class WithoutAny(griffe.Extension):
    """Leaves out the types of arguments that say nothing."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """Changes the arguments of a function. Griffe calls it when all have been read."""
        for parameter in func.parameters:
            if str(parameter.annotation) == "Any":
                parameter.annotation = None


class DocstringOfBase(griffe.Extension):
    """Gives a class whose docstring only names one of its bases the docstring of that base."""

    def on_class(self, *, cls: Any, **_: Any) -> None:
        """Changes the docstring of a class. Griffe calls it when all classes have been read."""
        named = cls.docstring and _SEE.fullmatch(cls.docstring.value.strip())
        if not named:
            return
        for base in cls.mro():
            if base.name == named[1] and base.docstring:
                cls.docstring.value = base.docstring.value


class FunctionOfAnotherFile(griffe.Function):
    """A member of a class whose source is in `filepath`, and not in the file of the class."""

    def __init__(self, *args: Any, filepath: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._filepath = filepath

    @property
    def filepath(self) -> Any:
        """The file that `lineno` and `endlineno` are of."""
        return self._filepath


class FunctionsAsMethods(griffe.Extension):
    """Shows a method that a class has as `name = module.function` by what the function says."""

    def on_class(self, *, cls: Any, **_: Any) -> None:
        """Puts functions in the place of attributes. Griffe calls it when all have been read."""
        for name, member in list(cls.members.items()):
            value = member.value if member.is_attribute else None
            if not isinstance(value, griffe.Expr):
                continue
            try:
                function = cls.modules_collection[value.canonical_path]
            except KeyError:
                continue
            if function.is_function and len(function.parameters):
                _, *parameters = function.parameters  # the first is the object
                cls.set_member(
                    name,
                    FunctionOfAnotherFile(
                        name,
                        filepath=function.filepath,
                        lineno=function.lineno,
                        endlineno=function.endlineno,
                        docstring=function.docstring,
                        parameters=griffe.Parameters(*parameters),
                        returns=function.returns,
                    ),
                )
