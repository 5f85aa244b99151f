"""Exit codes, and what a failed command says: one line on stderr with what was wrong and what to do (docs/errors.md).

`MAGNETAR_DEBUG=1` shows the traceback instead. Codes are a contract with scripts: never renumber.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..proto.errors import MagnetarError

OK, FAILED, USAGE, NOT_AVAILABLE, NOT_FOUND, IN_USE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


class Failure(click.ClickException):
    """A command that failed for a reason it can name; `code` is one of the exit codes above."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def run(command: click.Command) -> int:
    """Runs the command line of this process and returns its exit code."""
    try:
        result = command.main(prog_name="magnetar", standalone_mode=False)
        return result if isinstance(result, int) else OK
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except Failure as error:
        _say(error, error.message, error)
        return error.code
    except click.ClickException as error:
        _say(error, error.format_message(), error)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    found = cause(error)
    if found is None:
        _say(error, f"{type(error).__name__}: {error} (MAGNETAR_DEBUG=1 shows where; please report it)", None)
        return FAILED
    _say(error, describe(found), None)
    return code_of(found)


def cause(error: BaseException) -> MagnetarError | None:
    """The error of ours in `error` or behind it, the innermost first: the SDK's exceptions wrap what a server said.

    An OSError becomes one with its path.
    """
    from ..proto.errors import Busy, MagnetarError

    found: MagnetarError | None = None
    at: BaseException | None = error
    seen: list[BaseException] = []
    while at is not None and not any(at is before for before in seen):
        seen.append(at)
        if isinstance(at, MagnetarError) and (found is None or at.code != MagnetarError.code):
            found = at
        elif isinstance(at, OSError) and at.errno is not None and found is None:
            text = f"{at.strerror}: {at.filename}" if at.filename else str(at)
            return Busy(text) if isinstance(at, BlockingIOError) else MagnetarError(text)
        at = at.__cause__ or (None if found is not None else at.__context__)
    return found


SDK_CODES = {
    "InvalidUrl": USAGE,
    "InvalidTopicName": USAGE,
    "InvalidConfiguration": USAGE,
    "MessageTooBig": USAGE,
    "TopicNotFound": NOT_FOUND,
    "SubscriptionNotFound": NOT_FOUND,
    "ConsumerBusy": IN_USE,
    "ProducerBusy": IN_USE,
}
"""Of exceptions that the SDK raises by itself (client/errors.py), by class: importing it here would load the SDK."""


def code_of(error: MagnetarError) -> int:
    from ..proto.errors import Busy, InvalidRequest, NotFound, WrongProtocol

    match error:
        case WrongProtocol():
            return FAILED
        case InvalidRequest():
            return USAGE
        case NotFound():
            return NOT_FOUND
        case Busy():
            return IN_USE
        case _:
            return SDK_CODES.get(type(error).__name__, FAILED)


def describe(error: MagnetarError) -> str:
    """What was wrong, whether it may have happened all the same, and a next step where one is known."""
    from ..proto.errors import (
        Busy,
        ConnectionLost,
        NamespaceNotFound,
        OutcomeUnknown,
        TenantNotFound,
        TimedOut,
        TopicNotFound,
        Unavailable,
    )

    text = error.message or type(error).__name__
    match error:
        case Unavailable() if "unreached" in error.fields and "--url" not in text:
            return f"{text}; --url or MAGNETAR_URL names another"
        case ConnectionLost() | TimedOut() | OutcomeUnknown() if "try" not in text:
            return f"{text} (it may have happened or not; is the server there? see --url and MAGNETAR_URL)"
        case Busy() if "endpoint" in error.fields:
            return f"{text}; stop what listens there, or choose another port (0: a free one)"
        case TenantNotFound() if "create" not in text:
            return f"{text}; 'magnetar tenants list' shows those that exist, 'magnetar tenants create NAME' makes one"
        case NamespaceNotFound() if "create" not in text:
            return f"{text}; 'magnetar namespaces create TENANT/NAMESPACE' makes it"
        case TopicNotFound() if "create" not in text:
            return f"{text}; 'magnetar topics create TOPIC' makes it"
        case _:
            return text


def _say(error: Exception, text: str, shown: click.ClickException | None) -> None:
    if os.environ.get("MAGNETAR_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    if isinstance(shown, click.UsageError):
        shown.show()
        return
    print(f"magnetar: {text}", file=sys.stderr)
