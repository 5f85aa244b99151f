"""What each rpc and each frame needs, as it was: a row whose permission becomes another is a change that is meant."""

from pathlib import Path

from magnetar.broker.access.table_core import PERMISSION_RULES
from tests.recorded.recording import Recording


def test_what_callers_need_is_what_was_written_down(tmp_path: Path) -> None:
    recording = Recording("permissions.txt", tmp_path)
    for name, rule in sorted(PERMISSION_RULES.items()):
        of = ", ".join(each for each in (rule.field, rule.subscription) if each)
        recording.add(name, f"{rule.permission.name} on {rule.on.name} {of}".rstrip())
    recording.check()
