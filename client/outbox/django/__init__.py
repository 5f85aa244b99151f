"""The Django app of the outbox: `INSTALLED_APPS = [..., "magnetar.outbox.django"]`, then `manage.py migrate`."""
