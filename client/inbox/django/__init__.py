"""The Django app of the inbox: `INSTALLED_APPS = [..., "magnetar.inbox.django"]`, then `manage.py migrate`."""
