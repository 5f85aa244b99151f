"""Exit codes, and the message of a failed command: one line on stderr with the error and a next step (docs/errors.md);
with `-o json` or jsonl one JSON object there.

`MAGNETAR_DEBUG=1` shows the traceback instead. Codes are a contract with scripts: never renumber.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ...proto.errors import MagnetarError

OK, FAILED, USAGE, NOT_AVAILABLE, NOT_FOUND, IN_USE, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130


class CommandFailure(click.ClickException):
    """Raised when a command fails for a known reason. `code`: the exit code of the command, one of the codes at the
    head of this module."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def run_command_line(command: click.Command) -> int:
    """Runs the command line of this process and returns its exit code. Errors are printed on stderr, not raised."""
    return run_reporting_errors(lambda: _outcome(command))


def run_reporting_errors(work: Callable[[], int]) -> int:
    """Calls `work` and returns the exit code that it returns. If `work` raises an error, prints the error on stderr and
    returns the exit code for it. Returns OK if the reader of a pipe has closed it, INTERRUPTED after Ctrl-C."""
    try:
        code = work()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error still gets a message and a code
        return code
    except BrokenPipeError as error:
        if _reader_is_gone():  # it has read enough (`| head`)
            return OK
        return _unexpected(error)
    except click.exceptions.NoArgsIsHelpError as error:
        if wants_json(sys.argv):
            _print_error(error, f"which command? see '{error.ctx.command_path} --help'", USAGE, None)
        else:
            error.show()
        return USAGE
    except click.ClickException as error:
        code = error.code if isinstance(error, CommandFailure) else error.exit_code
        _print_error(error, error.format_message(), code, error)
        return code
    except (KeyboardInterrupt, click.Abort, EOFError):
        return INTERRUPTED
    except Exception as error:
        return _unexpected(error)


def _outcome(command: click.Command) -> int:
    """Runs the command as `click.Command.main` does, except that this would exit with 1 at a closed pipe without
    saying why. Returns the exit code."""
    if "_MAGNETAR_COMPLETE" in os.environ:
        return _complete(command)
    for given in sys.argv[1:]:
        check_argument_text(given)
    if any(each.startswith("MAGNETAR_") and each.endswith("_FILE") for each in os.environ):
        from ...runtime.config import set_variables_from_files

        set_variables_from_files(os.environ)
    try:
        with command.make_context("magnetar", sys.argv[1:]) as context:
            result = command.invoke(context)
    except click.exceptions.Exit as error:
        return error.exit_code
    return result if isinstance(result, int) else OK


def _complete(command: click.Command) -> int:
    """Completes a command line for a shell. If this fails, prints nothing, because the user is still typing."""
    import contextlib

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.suppress(Exception):
        command.main(prog_name="magnetar", standalone_mode=False)
    return OK


def check_argument_text(given: str) -> None:
    """Raises UsageError if the argument `given` is neither valid text nor the name of a file. (Python represents bytes
    of an argument that are not UTF-8 as surrogates.)"""
    try:
        os.fsencode(given)
    except UnicodeEncodeError:
        raise click.UsageError(f"{ascii(given)[:80]} is no text") from None
    if "\0" in given:
        raise click.UsageError(f"{ascii(given)[:80]} has a character NUL")


def _reader_is_gone() -> bool:
    """Whether standard output is a closed pipe. If so, its buffer is dropped."""
    import select

    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)  # reports an end without a reader in any case
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _unexpected(error: Exception) -> int:
    found = find_magnetar_error(error)
    if found is None and isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        _print_error(error, f"{ascii(error.object)[:80]} is no UTF-8 text", USAGE, None)
        return USAGE
    if found is None:
        text = f"{type(error).__name__}: {error} (MAGNETAR_DEBUG=1 shows where; please report it)"
        _print_error(error, text, FAILED, None)
        return FAILED
    code = find_exit_code(found)
    _print_error(error, describe_error(found), code, None, found)
    return code


def find_magnetar_error(error: BaseException) -> MagnetarError | None:
    """Returns the MagnetarError in the chain of causes of `error`; None if there is none. Of several, returns the
    innermost that has a specific class, because exceptions of the SDK wrap those of the server. If an OSError comes
    first in the chain, returns a MagnetarError made from it, whose text names the path."""
    from ...proto.errors import Busy, MagnetarError

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


EXIT_CODE_BY_ERROR = {
    "InvalidUrl": USAGE,
    "InvalidTopicName": USAGE,
    "InvalidConfiguration": USAGE,
    "MessageTooBig": USAGE,
    "TopicNotFound": NOT_FOUND,
    "SubscriptionNotFound": NOT_FOUND,
    "ConsumerBusy": IN_USE,
    "ProducerBusy": IN_USE,
    "OutboxTableMissing": NOT_FOUND,
    "RelayFenced": IN_USE,
    "ShardsDiffer": IN_USE,
}
"""Exit codes of exceptions that the SDK raises itself (client/common/errors.py), by class name: importing them would
load the SDK."""


def find_exit_code(error: MagnetarError) -> int:
    """Returns the exit code of a command that failed with this error. FAILED if no other code fits."""
    from ...proto.errors import Busy, InvalidRequest, NotFound, WrongProtocol

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
            return EXIT_CODE_BY_ERROR.get(type(error).__name__, FAILED)


def describe_error(error: MagnetarError) -> str:
    """Returns the text about an error for the user: what was wrong, whether the operation may have happened
    nevertheless, and what to do next, if that is known."""
    from ...proto.errors import (
        Busy,
        ConnectionLost,
        NamespaceNotFound,
        OutcomeUnknown,
        TenantNotFound,
        TimedOut,
        TopicNotFound,
        Unavailable,
    )

    said, notes = error.message or type(error).__name__, getattr(error, "__notes__", ())
    text = "; ".join((said, *(each for each in notes if not each.endswith("?"))))
    match error:
        case Unavailable() if "unreached" in error.fields and "--url" not in text:
            text = f"{text}; --url or MAGNETAR_URL names another"
        case ConnectionLost() | TimedOut() | OutcomeUnknown() if "try" not in text:
            text = f"{text} (it may have happened or not; is the server there? see --url and MAGNETAR_URL)"
        case Busy() if "endpoint" in error.fields:
            text = f"{text}; stop what listens there, or choose another port (0: a free one)"
        case TenantNotFound() if "create" not in text:
            text = f"{text}; 'magnetar tenants list' shows those that exist, 'magnetar tenants create NAME' makes one"
        case NamespaceNotFound() if "create" not in text:
            text = f"{text}; 'magnetar namespaces create TENANT/NAMESPACE' makes it"
        case TopicNotFound() if "create" not in text:
            text = f"{text}; 'magnetar topics create TOPIC' makes it"
        case _:
            pass
    return "; ".join((text, *(each for each in notes if each.endswith("?"))))  # a question ends the sentence


def wants_json(arguments: list[str]) -> bool:
    """Returns whether the command line contains `-o json` or `-o jsonl`, even if the command line is invalid.
    `arguments`: as in `sys.argv`, with the program first."""
    given = arguments[1:]
    if "--" in given:
        given = given[: given.index("--")]
    pairs = pairwise(given)
    kinds = ("json", "jsonl")
    together = {f"{flag}{kind}" for flag in ("-o", "-o=", "--output=") for kind in kinds}
    return any(flag in ("-o", "--output") and kind in kinds for flag, kind in pairs) or not together.isdisjoint(given)


def _print_error(
    error: Exception, text: str, code: int, shown: click.ClickException | None, found: MagnetarError | None = None
) -> None:
    """Prints the error as one line on stderr; with `-o json` as one JSON object (docs/errors.md)."""
    if os.environ.get("MAGNETAR_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    if wants_json(sys.argv):
        told: dict[str, object] = {"error": type(found or error).__name__, "message": text, "exitCode": code}
        if found is not None:
            told |= {"definite": found.definite, "retryable": found.retryable}
        import json

        print(json.dumps(told, ensure_ascii=False), file=sys.stderr)
    elif isinstance(shown, click.UsageError):
        shown.show()
    else:
        print(f"magnetar: {text}", file=sys.stderr)
