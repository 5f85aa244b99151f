"""For type checkers: `magnetar.admin` is client/admin.py."""

from .client.admin import Admin as Admin
from .client.admin import AdminClient as AdminClient
