"""Every error that Deltaserve raises on purpose.

    DeltaserveError
    |-- ConfigError           the process refuses to start; the sentence names the flag or file to change
    |   `-- CheckpointError   the checkpoint on disk is not what its config or our name table says
    |-- RequestError          one request is wrong; answered with a 4xx that names the field
    |   |-- ContextLengthError
    |   `-- ModelNotFoundError
    |-- OverloadedError       the request is fine, but there is no room for it now (429)
    |-- LogitsError           the model or a rule left one row nothing to choose from; ends that request only
    `-- EngineDeadError       the engine process or one of its ranks is gone (503)

`assert` is for our own mistakes; these classes are for everybody else's.
"""

from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A value as error sentences show it: short, and never an error itself."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge number"
    return _SHORT.repr(value)


class DeltaserveError(Exception):
    """Base of the tree above."""


class ConfigError(DeltaserveError, ValueError):
    """A setting, or a combination of settings, that cannot be served."""


class CheckpointError(ConfigError):
    """A checkpoint whose files disagree with its config or with the name table."""


class RequestError(DeltaserveError, ValueError):
    """A request that cannot be served as it is.

    `param` is the name of the offending field as the client wrote it, or None where no single field is to blame.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContextLengthError(RequestError):
    """Prompt, or prompt plus requested output, beyond the context length."""


class ModelNotFoundError(RequestError):
    """A model name that this server does not serve."""


class OverloadedError(DeltaserveError):
    """No room for this request now; the client may retry."""


class LogitsError(DeltaserveError):
    """Logits of one row that are NaN or infinite, or of which a rule left none."""


class EngineDeadError(DeltaserveError):
    """The engine stopped; requests in flight are answered with this."""
