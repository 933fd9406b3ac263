"""What the tables of the configuration are made of.

Owns: the base of every table, and the bounded numbers they share. Called by: `config` and the modules of its tables.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Upper bounds stand where no machine and no sense reach: a slip of the keyboard must not end in a library's traceback.
_MOST = 10**9  # of whatever is counted
_NAME = 240  # bytes of a file's name: 255 on every file system we know, less what a run appends

Positive = Annotated[int, Field(gt=0, le=_MOST)]
Natural = Annotated[int, Field(ge=0, le=_MOST)]
Processes = Annotated[int, Field(gt=0, le=1000)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e6)]
LearningRate = Annotated[float, Field(gt=0, le=10)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        """Texts become paths and arguments of programs, which know no NUL."""
        if isinstance(value, str):
            if "\0" in value:
                raise ValueError(f"{value!r:.80} holds a NUL character, which no path and no name can")
            if any(len(part.encode()) > _NAME for part in value.split("/")):
                raise ValueError(f"{value!r:.80}... has a part of more than {_NAME} bytes, too long for a file's name")
        return value
