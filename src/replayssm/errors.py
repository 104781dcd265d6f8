"""Every mistake a user can make has one class here; each message names the value, the limit and the remedy.

`ReplayError` is the base. `exit_code` is what the command line returns for it.
"""

from __future__ import annotations


class ReplayError(Exception):
    """Base class of all errors that `replayssm` raises for wrong input."""

    exit_code = 2


class ShapeError(ReplayError, ValueError):
    """Two sizes that must agree do not, or a size is outside its limits."""

    @classmethod
    def mismatch(cls, name: str, got: object, want: object, why: str = "") -> ShapeError:
        """A tensor has another shape than the other arguments ask for."""
        return cls(f"{name} has shape {_show(got)}, expected {_show(want)}" + (f" ({why})" if why else ""))


class DtypeError(ReplayError, TypeError):
    """A tensor or an option names a data type that is not supported there."""

    @classmethod
    def unsupported(cls, name: str, got: object, allowed: tuple[object, ...]) -> DtypeError:
        """A dtype outside `allowed`."""
        return cls(f"{name} has dtype {_short(got)}, supported: {', '.join(_short(a) for a in allowed)}")


class DeviceError(ReplayError, ValueError):
    """Tensors of one call lie on different devices, or on one that has no backend."""


class LayoutError(ReplayError, ValueError):
    """A tensor has strides that the operation cannot take without a silent copy."""


class SlotError(ReplayError, IndexError):
    """A slot index is out of range, or one slot is named twice in a batch."""


class PoolFullError(ReplayError, RuntimeError):
    """More slots are asked for than are free."""


class RingLengthError(ReplayError, ValueError):
    """The ring length is outside 1 … 64."""

    def __init__(self, got: object, low: int = 1, high: int = 64) -> None:
        super().__init__(f"ring length {got} is outside {low}…{high}; 8 suits most models")


class OptionError(ReplayError, ValueError):
    """An option has a value outside its limits, or contradicts another."""


class MemoryBudgetError(ReplayError, ValueError):
    """The memory is smaller than what must be in it before the first request."""

    def __init__(
        self,
        memory: int,
        weights: int,
        reserve: int,
        remedy: str = "give more of it, smaller weights (--weights), or more shards (--tp)",
    ) -> None:
        kept = f" and {_gib(reserve)} kept free" if reserve else ""
        super().__init__(f"memory of {_gib(memory)} does not hold weights of {_gib(weights)}{kept}; {remedy}")


class GrammarError(ReplayError, ValueError):
    """A grammar for the output cannot be compiled, or no text of the model can meet it."""


class PromptError(ReplayError, ValueError):
    """The prompt is empty, or longer than the model's context."""


class ModelNotFoundError(ReplayError, FileNotFoundError):
    """The model folder, its weights or its tokenizer are missing."""


class ModelFilesError(ReplayError, ValueError):
    """Model files exist but cannot be used: truncated, inconsistent or not parseable."""


class UnsupportedModelError(ReplayError, ValueError):
    """The model type has no linear-attention layer that replay knows."""


class CacheStateError(ReplayError, RuntimeError):
    """A cache is used in a way that would lose or corrupt a recurrent state."""


def _show(shape: object) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]" if isinstance(shape, (tuple, list)) else str(shape)


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
